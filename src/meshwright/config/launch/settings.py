"""The settings of one `meshwright launch`: one frozen object, with the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedSettingError
from ..environment import MEGATRON_FIELDS, MEGATRON_SIZES, PARALLELISM_SIZES, read
from ..origins import NOT_YET, Resolved
from ..packages import has_package
from .files import ENGINE_OF_SWITCH, ConfigFile, engine_of_kind
from .options import COMPILE, FP8, OPTIONS, Option, as_flags, yes_no

if TYPE_CHECKING:
    from ..plugins.megatron import MegatronLMPlugin

DEFAULT = "default"
FLAG = "flag "
ENVIRONMENT = "environment variable "


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The settings of one launch. Fields that are None are filled in by the plan, from what the machine has."""

    cpu: bool = False
    multi_gpu: bool = False
    mixed_precision: str = "no"
    num_processes: int | None = None
    num_machines: int | None = None
    num_cpu_threads_per_process: int | None = None
    enable_cpu_affinity: bool = False
    gradient_accumulation_steps: int | None = None
    gpu_ids: str | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    nnodes: str | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    role: str = "default"
    max_restarts: int = 0
    survive: bool = False
    replace_hung_after: float | None = None
    check_replicas_every: int | None = None
    memory_copies_every: int | None = None
    memory_copies_dir: str | None = None
    monitor_interval: float = 0.1
    grace_period: float = 30.0
    mpirun_hostfile: str | None = None
    ray: bool = False
    ray_address: str | None = None
    ray_resources: str | None = None
    ray_min_processes: int | None = None
    log_dir: str | None = None
    tee: str = "0"
    redirects: str = "0"
    quiet: bool = False
    instruments: str | None = None
    debug: bool = False
    debug_rank: int | None = None
    explain: bool = False
    lenient: bool = False
    module: bool = False
    no_python: bool = False
    config_file: str | None = None
    """The file that was read."""
    resolved: Mapping[str, Resolved] = field(default_factory=dict)
    """Every option of the table with its origin, those of the engines too."""

    @classmethod
    def resolve(cls, flags: Mapping[str, Any], config: ConfigFile | None) -> LaunchSettings:
        """Choose every value: flag first, then the environment, then the file, then the default."""
        resolved = {option.name: _resolve(option, flags, config) for option in OPTIONS}
        _switch_on(resolved)
        own = {item.name for item in fields(cls)} & resolved.keys()
        values = {name: resolved[name].value for name in own if resolved[name].value is not None}
        return cls(resolved=resolved, config_file=str(config.path) if config is not None else None, **values)

    def origin(self, name: str) -> str:
        """Return the origin of a value."""
        return self.resolved[name].origin

    def given(self, name: str) -> bool:
        """Return whether the value is not the default."""
        return name in self.resolved and self.resolved[name].origin != DEFAULT

    def to_flags(self) -> list[str]:
        """Return the flags of this launch, for another launcher, which inherits the environment anyway."""
        file = [] if self.config_file is None else ["--config_file", self.config_file]
        flags = {name: item.value for name, item in self.resolved.items() if item.origin.startswith(FLAG)}
        return file + as_flags(flags)

    def child_variables(self) -> dict[str, str]:
        """Return the published variables that carry these settings into the processes."""
        variables = {"ACCELERATE_MIXED_PRECISION": self.mixed_precision, "ACCELERATE_USE_CPU": str(self.cpu)}
        for option in OPTIONS:
            value = self.resolved[option.name].value
            if option.variable is None or option.variable in _SET_BY_THE_PLAN or value is None:
                continue
            if self.given(option.name):
                variables[option.variable] = str(value).upper() if option.name == "dynamo_backend" else str(value)
        return variables

    def refuse_missing_engines(self, config: ConfigFile | None) -> None:
        """Raise if an unsupported engine is requested, instead of silently running something else."""
        self.megatron()  # refuses what has no counterpart
        if self.resolved["tpu"].value:
            self._refuse_missing_xla()
        if config is not None and (service := engine_of_kind(config.kind)) is not None:
            raise UnsupportedSettingError(
                f"{service} ({config.path}: compute_environment)", NOT_YET, "Use compute_environment: LOCAL_MACHINE."
            )

    def megatron(self) -> MegatronLMPlugin | None:
        """Return Megatron-LM's settings of this launch, or None where there are none."""
        if not self.resolved["use_megatron_lm"].value:
            return None
        from ..plugins.megatron import MegatronLMPlugin

        fields_given: dict[str, Any] = {}
        for name, kind in MEGATRON_FIELDS.items():
            if self.given(f"megatron_lm_{name}"):
                value = self.resolved[f"megatron_lm_{name}"].value
                fields_given[name] = yes_no(value) if kind is bool else value
        return MegatronLMPlugin(**fields_given)

    def _refuse_missing_xla(self) -> None:
        if not has_package("torch_xla"):
            raise UnsupportedSettingError(
                f"TPU ({self.origin('tpu')})",
                "torch_xla is not installed.",
                "Run `pip install torch_xla`; with torch_tpu, leave --tpu out.",
            )
        if self.resolved["tpu_use_cluster"].value:
            raise UnsupportedSettingError(
                f"tpu_use_cluster ({self.origin('tpu_use_cluster')})",
                "the hosts of a pod are reached by Google's tools.",
                "Run this launch on every host: gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...",
            )

    def _used_engines(self) -> set[str]:
        """Return the engines whose options the processes of this launch read."""
        used = {engine for switch, engine in ENGINE_OF_SWITCH.items() if self.resolved[switch].value}
        if self.resolved["dynamo_backend"].value not in (None, "no"):
            used.add(COMPILE)
        return used | ({FP8} if self.mixed_precision == "fp8" else set())

    def refuse_flags_without_effect(self) -> list[str]:
        """Raise if a flag has no effect, for verbs whose answer would be that of another launch; return the rest."""
        for name, sentence in self._without_effect().items():
            if self.origin(name).startswith(FLAG):
                raise ValueError(f"{sentence} Add what it belongs to, or leave it out.")
        return self.without_effect()

    def without_effect(self) -> list[str]:
        """Return a message for every given value that has no effect."""
        return list(self._without_effect().values())

    def _without_effect(self) -> dict[str, str]:
        sentences = {}
        for option in OPTIONS:
            value = self.resolved[option.name]
            if not self.given(option.name) or value.value in (option.default, "no", None):
                continue
            if value.origin.rpartition(": ")[0] or option.name in ENGINE_OF_SWITCH:  # a file's sections
                continue
            if what := self._unread(option):
                sentences[option.name] = f"{option.name} = {value.value} ({value.origin}) has no effect: {what}."
        return sentences

    def _unread(self, option: Option) -> str:
        """Return why nothing reads an option in this launch; nothing where something does."""
        if option.needs is not None and not self.resolved[option.needs].value:
            return f"it is read with --{option.needs} only"
        if option.engine is None or option.engine in self._used_engines():
            return ""
        return _READ_WITH.get(option.engine, f"it is read by {option.engine} only")


_READ_WITH = {
    COMPILE: "it is read with a dynamo_backend only",
    FP8: "it is read by mixed_precision fp8 only",
    **{
        engine: f"it is read by {engine} only (--{switch})"
        for switch, engine in ENGINE_OF_SWITCH.items()
        if switch.startswith("use_")
    },
}

# Switch -> the sizes that turn it on: a size that is given is used.
_SIZES_OF_SWITCH = {
    "use_parallelism_config": tuple(f"parallelism_config_{name}" for name in PARALLELISM_SIZES),
    "use_megatron_lm": tuple(f"megatron_lm_{name}" for name in MEGATRON_SIZES),
}

# Left to the plan, which knows the machines and how many processes share the cores, or read by the launcher only.
_SET_BY_THE_PLAN = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "OMP_NUM_THREADS", "PET_MAX_RESTARTS", "PET_RDZV_CONF"}
)


def _switch_on(resolved: dict[str, Resolved]) -> None:
    """Turn on the switches that were not given and whose sizes were, with the origin of the size."""
    for switch, sizes in _SIZES_OF_SWITCH.items():
        given = [resolved[name] for name in sizes if resolved[name].value not in (None, 1)]
        given = [size for size in given if size.origin.startswith((FLAG, ENVIRONMENT))]  # a file says its kind itself
        if given and resolved[switch].origin == DEFAULT:
            resolved[switch] = Resolved(value=True, origin=given[0].origin)


def _resolve(option: Option, flags: Mapping[str, Any], config: ConfigFile | None) -> Resolved:
    if option.name in flags:
        return Resolved(value=flags[option.name], origin=f"{FLAG}--{option.spelled or option.name}")
    if option.variable is not None and (word := read(option.variable)) is not None:
        return Resolved(value=_from_environment(option, word), origin=f"{ENVIRONMENT}{option.variable}")
    if config is not None and option.name in config.values:
        return Resolved(value=config.values[option.name], origin=config.origin_of(option.name))
    return Resolved(value=option.default, origin=DEFAULT)


def _from_environment(option: Option, word: str) -> Any:
    try:
        value = option.read(word)
    except ValueError as error:
        raise ValueError(f"The environment variable {option.variable}={word!r} is not valid: {error}") from error
    if option.choices is not None:
        value = {choice.lower(): choice for choice in option.choices}.get(str(value).lower(), value)
    if option.choices is not None and value not in option.choices:
        raise ValueError(
            f"The environment variable {option.variable}={word!r} is unknown: "
            f"choose one of {', '.join(option.choices)}."
        )
    return value
