"""The published classes of configuration files. `meshwright.config.launch.files` reads and writes them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors.callers import warn
from ..enums import DistributedType
from .files import (
    KNOWN_KEYS,
    ConfigFile,
    config_folder,
    default_config_path,
    distributed_kind,
    engine_of_kind,
    read_config,
    write_config,
)

if TYPE_CHECKING:
    from typing_extensions import Self

cache_dir = str(config_folder())
hf_cache_home = str(config_folder().parent)
default_yaml_config_file = str(config_folder() / "default_config.yaml")
default_json_config_file = default_yaml_config_file  # published so: JSON is YAML too
default_config_file = str(default_config_path())

# Defaults of keys that a file may leave out.
_DEFAULTS = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": None, "use_cpu": False, "debug": False}


@dataclass
class BaseConfig:
    """The keys of every configuration file."""

    compute_environment: str
    distributed_type: DistributedType | str
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name.endswith("_config") and getattr(self, item.name) is None:
                setattr(self, item.name, {})

    def to_dict(self) -> dict[str, Any]:
        """Return plain keys and values as in a file: without None and without empty sections."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
            if value is not None and value != {}
        }

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> Self:
        """Read a configuration file, by default the default one; warn of unknown keys."""
        return _built(_read(yaml_file), cls)

    @classmethod
    def from_json_file(cls, json_file: str | Path | None = None) -> Self:
        """Read a configuration file, by default the default one; warn of unknown keys."""
        return _built(_read(json_file), cls)

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write YAML."""
        write_config(yaml_file, self.to_dict(), as_json=False)

    def to_json_file(self, json_file: str | Path) -> None:
        """Write JSON."""
        write_config(json_file, self.to_dict(), as_json=True)


@dataclass
class ClusterConfig(BaseConfig):
    """The settings of a launch on this machine, or on several."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None
    # Keys of this library only. accelerate 1.15 refuses a file that has them, so they are written only if set.
    rdzv_conf: str | None = None
    max_restarts: int | None = None
    survive: bool | None = None
    replace_hung_after: float | None = None
    check_replicas_every: int | None = None
    memory_copies_every: int | None = None
    memory_copies_dir: str | None = None
    offload_training: str | None = None
    data_order: str | None = None
    monitor_interval: float | None = None
    grace_period: float | None = None
    log_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = distributed_kind({"distributed_type": self.distributed_type})
        self.distributed_type = DistributedType("XLA" if kind == "TPU" else kind)


@dataclass
class SageMakerConfig(BaseConfig):
    """The settings of a job on Amazon SageMaker: read and written, but not launched by this version."""

    ec2_instance_type: str
    iam_role_name: str | None
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


Config = TypeVar("Config", bound=BaseConfig)


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig | SageMakerConfig:
    """Read a configuration file, by default the default one; warn of unknown keys."""
    file = _read(config_file)
    return _built(file, config_class_of(file))


def _read(path: str | Path | None) -> ConfigFile:
    return read_config(path or default_config_path())


def _built(file: ConfigFile, config_class: type[Config]) -> Config:
    for remark in remarks_on(file, config_class):
        warn(remark)
    return config_of(file, config_class)


def config_class_of(file: ConfigFile) -> type[ClusterConfig] | type[SageMakerConfig]:
    """Return the class for a file's `compute_environment`."""
    return ClusterConfig if engine_of_kind(file.kind) is None else SageMakerConfig


def remarks_on(file: ConfigFile, config_class: type[BaseConfig]) -> list[str]:
    """Return a message for every unknown key, and for every key that this kind of file does not have."""
    misplaced = (key for key in file.contents if key in KNOWN_KEYS - keys_of(config_class))
    return [
        *file.unknown,
        *(f"{file.path}: `{key}` means nothing where compute_environment is {file.kind}." for key in misplaced),
    ]


def keys_of(config_class: type[BaseConfig]) -> frozenset[str]:
    """Return the keys that this kind of file can have."""
    return frozenset(item.name for item in fields(config_class))


def config_of(file: ConfigFile, config_class: type[Config]) -> Config:
    """Return the config of a file, with defaults for missing keys."""
    own = keys_of(config_class)
    given = {key: value for key, value in file.contents.items() if key in own and value is not None}
    kind = distributed_kind(file.contents)
    values = {**_DEFAULTS, **({"num_processes": 1} if kind == "NO" and "num_processes" in own else {}), **given}
    values["distributed_type"] = kind
    if values["mixed_precision"] is False:  # YAML reads an unquoted `no` as False
        values["mixed_precision"] = "no"
    missing = [item.name for item in fields(config_class) if item.default is MISSING and item.name not in values]
    if missing:
        raise ValueError(f"The configuration file {file.path} lacks {', '.join(missing)}.")
    return config_class(**values)
