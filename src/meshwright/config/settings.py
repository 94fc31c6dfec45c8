"""The settings of one Accelerator, resolved once, with the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .combinations import Feature
from .enums import DataOrder, PrecisionType
from .environment import asks_for_deepspeed, asks_for_megatron, asks_for_parallelism, read_fsdp, read_setting
from .origins import Resolved, resolve
from .plugins.compilation import SETTING_OF_FIELD, TorchDynamoPlugin
from .plugins.deepspeed import ACCUMULATION, DeepSpeedPlugin
from .plugins.handlers import GradientAccumulationPlugin
from .plugins.megatron import MegatronLMPlugin
from .plugins.offload import OffloadConfig, resolve_offload
from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from .plugins.sharding import FullyShardedDataParallelPlugin

AXES_OF_MODELS = ("dp_shard", "tp", "cp", "sp", "pp", "ep")
"""The axes whose processes hold one model between them."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of one Accelerator that shape its training steps."""

    mixed_precision: str
    """Number format of the forward pass: "no", "fp16", "bf16" or "fp8"."""
    gradient_accumulation: GradientAccumulationPlugin
    """How micro-batches add up to an optimizer step."""
    compilation: TorchDynamoPlugin
    """How models are compiled."""
    sharding: FullyShardedDataParallelPlugin | None
    """How parameters are sharded, if they are."""
    deepspeed: Mapping[str, DeepSpeedPlugin] | None
    """The DeepSpeed plugins by name, if DeepSpeed trains."""
    parallelism: ParallelismConfig | None
    """The axes of the device mesh, if given."""
    megatron: MegatronLMPlugin | None
    """Megatron-LM's settings, which `sharding` and `parallelism` are translated from, if given."""
    offload: OffloadConfig | None
    """Where the repeated blocks of models are kept, if not on the device."""
    origins: Mapping[str, str]
    """Field name -> where its value came from."""

    @classmethod
    def from_arguments(
        cls,
        *,
        mixed_precision: str | None,
        inherited: TrainingSettings | None = None,
        gradient_accumulation_steps: int,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        fsdp_plugin: Any = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | DeepSpeedPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        offload: OffloadConfig | str | None = None,
    ) -> TrainingSettings:
        """Resolve the arguments of `Accelerator` against the environment.

        `inherited` are the settings of the first Accelerator of this process. Number format, compilation, and how
        models are spread over processes and memory are taken from it where no argument says them.
        """
        (
            dynamo_plugin,
            fsdp_plugin,
            deepspeed_plugins,
            parallelism_config,
            torch_tp_plugin,
            megatron_lm_plugin,
            offload,
        ) = _with_inherited(
            inherited,
            dynamo_plugin,
            (fsdp_plugin, deepspeed_plugins, parallelism_config, torch_tp_plugin, megatron_lm_plugin, offload),
        )
        deepspeed = resolve_deepspeed(deepspeed_plugins)
        precision = _precision(mixed_precision, inherited)
        if deepspeed is not None:
            precision = _agreed_precision(precision, deepspeed)
        check_precision(str(precision.value), precision.origin)
        if gradient_accumulation_plugin is not None:
            if gradient_accumulation_steps != 1:
                raise ValueError(
                    "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`, and "
                    f"there is gradient_accumulation_steps={gradient_accumulation_steps} beside a plugin: give the "
                    "number as GradientAccumulationPlugin(num_steps=...)."
                )
            plugin, origin = gradient_accumulation_plugin, "code"
            if plugin.num_steps is None:
                raise ValueError("GradientAccumulationPlugin needs num_steps, the micro-batches per step.")
        else:
            in_code = gradient_accumulation_steps if gradient_accumulation_steps != 1 else None
            steps = resolve("gradient_accumulation_steps", in_code, 1)
            if deepspeed is not None:
                steps = _agreed_accumulation(steps, deepspeed)
            plugin, origin = GradientAccumulationPlugin(num_steps=steps.value), steps.origin
        if not isinstance(plugin.num_steps, int) or plugin.num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be 1 or more, not {plugin.num_steps!r} ({origin}).")
        _check_type("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin)
        _check_type("torch_tp_plugin", torch_tp_plugin, TorchTensorParallelPlugin)
        _check_type("megatron_lm_plugin", megatron_lm_plugin, MegatronLMPlugin)
        sharding = fsdp_plugin or _sharding_from_environment()
        parallelism = _mesh(parallelism_config, torch_tp_plugin)
        megatron = megatron_lm_plugin or (MegatronLMPlugin() if asks_for_megatron() else None)
        if megatron is not None:
            _refuse_beside_megatron(sharding, deepspeed, parallelism)
            sharding, parallelism = megatron.sharding(), megatron.parallelism()
        compilation, compilation_origins = resolve_compilation(dynamo_plugin)
        return cls(
            mixed_precision=str(PrecisionType(str(precision.value))),
            gradient_accumulation=plugin,
            compilation=compilation,
            sharding=sharding,
            deepspeed=deepspeed,
            parallelism=parallelism,
            megatron=megatron,
            offload=resolve_offload(offload),
            origins={
                "mixed_precision": precision.origin,
                "gradient_accumulation_steps": origin,
                **compilation_origins,
            },
        )

    def features(self) -> dict[Feature, str]:
        """Return the features that are in use, as messages name them."""
        sharding, parallelism = self.sharding, self.parallelism
        axes = {} if parallelism is None else {axis: parallelism.size(axis) for axis in AXES_OF_MODELS}
        shards = parallelism is None or any(axes[axis] != 1 for axis in ("dp_shard", "cp", "pp"))
        tensor_parallel = None if parallelism is None else parallelism.tp_handler
        of_sharding = sharding and {
            Feature.FSDP: True,
            Feature.FSDP_CPU_OFFLOAD: sharding.offloads,
            Feature.IGNORED_MODULES: sharding.ignored_modules is not None,
            Feature.CPU_RAM_EFFICIENT: sharding.cpu_ram_efficient_loading and shards,
        }
        given = (of_sharding or {}) | {
            Feature.DEEPSPEED: self.deepspeed is not None,
            Feature.MEGATRON: self.megatron is not None,
            Feature.SEQUENCE_PARALLEL: tensor_parallel is not None and tensor_parallel.sequence_parallel,
            Feature.FP16: self.mixed_precision == "fp16",
            Feature.FP8: self.mixed_precision == "fp8",
            Feature.MEMORY_COPIES: read_setting("memory_copies_every") is not None,
        }
        in_use = {feature: feature.value for feature, is_given in given.items() if is_given}
        in_use |= {Feature(f"{axis}_size"): f"{axis}_size={size}" for axis, size in axes.items() if size != 1}
        if self.compilation.compiles:
            in_use[Feature.COMPILE] = f"dynamo_backend={self.compilation.backend}"
        if self.offload is not None:
            in_use[Feature.OFFLOAD] = f"offload={self.offload.placement!r}"
        return in_use

    def explain(self) -> str:
        """Return each value and its origin, one line each."""
        values = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation.num_steps,
        }
        if self.compilation.compiles:
            said = self.compilation.to_dict()
            values |= {setting: said[field] for field, setting in SETTING_OF_FIELD.items()}
        return "\n".join(f"{name} = {value}  ({self.origins[name]})" for name, value in values.items())


def resolve_compilation(in_code: TorchDynamoPlugin | None) -> tuple[TorchDynamoPlugin, dict[str, str]]:
    """Return how models are compiled, and the origins of its values by setting."""
    plugin = in_code if in_code is not None else TorchDynamoPlugin()
    origins = {
        setting: resolve(setting, True if field in plugin.in_code else None, None).origin
        for field, setting in SETTING_OF_FIELD.items()
    }
    return plugin, origins if plugin.compiles else {}


def resolve_deepspeed(
    in_code: Mapping[str, DeepSpeedPlugin] | DeepSpeedPlugin | None,
) -> Mapping[str, DeepSpeedPlugin] | None:
    """Return the plugins by name, the first of them selected; None where DeepSpeed is not used."""
    if in_code is None:
        in_code = DeepSpeedPlugin() if asks_for_deepspeed() else {}
    plugins = dict(in_code) if isinstance(in_code, Mapping) else {"default": in_code}
    for name, plugin in plugins.items():
        if not isinstance(plugin, DeepSpeedPlugin):
            raise TypeError(f"deepspeed_plugins[{name!r}] must be a DeepSpeedPlugin, not a {type(plugin).__name__}.")
    if plugins and not any(plugin.selected for plugin in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins or None


def _agreed_precision(precision: Resolved, plugins: Mapping[str, DeepSpeedPlugin]) -> Resolved:
    """Take the precision from DeepSpeed's config where it is not explicit; set it in configs that have none."""
    chosen = next(plugin for plugin in plugins.values() if plugin.selected)
    if not _is_explicit(precision) and chosen.mixed_precision is not None:
        return Resolved(value=chosen.mixed_precision, origin=chosen.source)
    for plugin in plugins.values():
        if _is_explicit(precision) or plugin.mixed_precision is None:
            plugin.set_mixed_precision(str(precision.value), f"{precision.origin}, mixed_precision")
    return precision


def _agreed_accumulation(steps: Resolved, plugins: Mapping[str, DeepSpeedPlugin]) -> Resolved:
    """Take the accumulation from DeepSpeed's config where it is not explicit; otherwise they must agree."""
    chosen = next(plugin for plugin in plugins.values() if plugin.selected)
    in_config = chosen.gradient_accumulation_steps
    if in_config is None or steps.value == in_config:
        return steps
    if not _is_explicit(steps):
        return Resolved(value=in_config, origin=chosen.origins.get(ACCUMULATION, chosen.source))
    claims = chosen.claims()
    claims.claim(ACCUMULATION, steps.value, f"{steps.origin}, gradient_accumulation_steps")
    claims.check()
    return steps


def _with_inherited(inherited: TrainingSettings | None, dynamo_plugin: Any, spread: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to compile and how to spread models; each as given, or else as the first Accelerator has it."""
    if inherited is None:
        return (dynamo_plugin, *spread)
    if all(argument is None for argument in spread):
        is_translated = inherited.megatron is not None  # sharding and mesh are what Megatron-LM's settings become
        sharding, mesh = (None, None) if is_translated else (inherited.sharding, inherited.parallelism)
        spread = (sharding, inherited.deepspeed, mesh, None, inherited.megatron, inherited.offload)
    return (inherited.compilation if dynamo_plugin is None else dynamo_plugin, *spread)


def _precision(in_code: str | None, inherited: TrainingSettings | None) -> Resolved:
    if in_code is None and inherited is not None:
        return Resolved(value=inherited.mixed_precision, origin="the first Accelerator")
    return resolve("mixed_precision", in_code, "no")


def _is_explicit(value: Resolved) -> bool:
    return not value.origin.endswith("default")


def resolve_data_order(in_code: str | None) -> DataOrder:
    """Return whose order shuffled samples have, by code or by the environment."""
    order = resolve("data_order", in_code, DataOrder.ONE_PROCESS)
    if order.value not in DataOrder:
        raise ValueError(
            f"Unknown order of the data: {order.value!r} (from {order.origin}). Choose one of "
            f"{', '.join(DataOrder.list())}."
        )
    return DataOrder(order.value)


def _check_type(argument: str, given: Any, expected: type) -> None:
    if given is not None and not isinstance(given, expected):
        raise TypeError(f"`{argument}` must be a {expected.__name__} object, not a {type(given).__name__}.")


def _mesh(config: ParallelismConfig | None, tp_plugin: TorchTensorParallelPlugin | None) -> ParallelismConfig | None:
    if tp_plugin is None:
        return config or (ParallelismConfig() if asks_for_parallelism() else None)
    if config is not None:
        raise ValueError(
            "Accelerator was given torch_tp_plugin and parallelism_config: say it in one place, "
            f"ParallelismConfig(tp_size={tp_plugin.tp_size}, ...)."
        )
    return tp_plugin.parallelism()


def _refuse_beside_megatron(sharding: object, deepspeed: object, parallelism: object) -> None:
    """Refuse two settings that both say how the processes are used."""
    others = {"FSDP": sharding, "DeepSpeed": deepspeed, "a ParallelismConfig or a torch_tp_plugin": parallelism}
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"Megatron-LM's settings and {name} both say how a model is distributed: leave one of them out. "
                "What the fields of MegatronLMPlugin become is in its translation()."
            )


def _sharding_from_environment() -> FullyShardedDataParallelPlugin | None:
    words = read_fsdp()
    return None if words is None else FullyShardedDataParallelPlugin.from_variables(words)


def check_precision(name: str, origin: str) -> None:
    """Refuse an unknown number format."""
    if name not in PrecisionType:
        raise ValueError(
            f"Unknown mixed_precision mode: {name} (from {origin}). Choose one of {', '.join(PrecisionType.list())}."
        )
