"""`FullyShardedDataParallelPlugin`: what to shard and how. Settings of FSDP1 are translated, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedSettingError

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_SHARDING_NUMBERS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD",
                     "5": "HYBRID_SHARD_ZERO2"}  # fmt: skip
_WITHOUT_EFFECT = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
_FSDP1_ONLY = ("sharding_strategy", *_WITHOUT_EFFECT)
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "no": "float32"}


@dataclass
class FullyShardedDataParallelPlugin:
    """Shard parameters, gradients and optimizer state over processes, by torch's `fully_shard` (FSDP2).

    The fields are the published ones. Fields of FSDP1 are translated, and a warning lists the translations.
    """

    fsdp_version: int | None = None
    """2, whatever is given: scripts written for FSDP1 run on FSDP2."""
    sharding_strategy: Any = None
    """FSDP1's choice; becomes `reshard_after_forward`, and for the HYBRID ones a copy of the model per host."""
    reshard_after_forward: Any = None
    """Free a block's gathered parameters after its forward pass (True), or keep them for the backward pass."""
    backward_prefetch: Any = None
    """Has no effect: FSDP2 gathers the next unit of the backward pass by itself."""
    mixed_precision_policy: Any = None
    """A `MixedPrecisionPolicy`, its fields as a dict, or "bf16"/"fp16"; without one, the Accelerator's precision."""
    auto_wrap_policy: str | Callable[..., bool] | None = None
    """Which modules become units: by class or name, by size, none, a function, or (None) the repeated blocks."""
    cpu_offload: Any = None
    """Keep shards of parameters, gradients and optimizer state on the host."""
    ignored_modules: Iterable[nn.Module] | str | None = None
    """Modules, or a regular expression for their names, that are left whole on every process."""
    state_dict_type: Any = None
    """How `save_state` writes: SHARDED_STATE_DICT (every process its part) or FULL_STATE_DICT (one file)."""
    state_dict_config: Any = None
    """Has no effect: it belongs to FSDP1."""
    optim_state_dict_config: Any = None
    """Has no effect: it belongs to FSDP1."""
    limit_all_gathers: bool = True
    """Has no effect: FSDP2 limits them by itself."""
    use_orig_params: bool | None = None
    """Has no effect: FSDP2 always keeps the original parameters."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """Initialise a module of a model made on the meta device; by default its `reset_parameters`."""
    sync_module_states: bool | None = None
    """Has no effect: see `cpu_ram_efficient_loading`."""
    forward_prefetch: bool | None = None
    """Has no effect: FSDP2 gathers the next unit of the forward pass by itself."""
    activation_checkpointing: bool | None = None
    """Recompute the units' activations in the backward pass."""
    activation_checkpointing_offload: bool | None = None
    """Keep the inputs of recomputed units on the host."""
    cpu_ram_efficient_loading: bool | None = None
    """Only the first process loads weights; the others receive their shards from it."""
    transformer_cls_names_to_wrap: list[str] | str | None = None
    """Class names, or patterns of module names such as `model.layers.*`, of the units."""
    min_num_params: int | None = None
    """With "size_based_wrap": a unit has at least this many parameters."""

    def __post_init__(self) -> None:
        self.copy_per_host = False
        self._translate()
        self.fsdp_version = 2
        reshard = self.reshard_after_forward
        self.reshard_after_forward = True if reshard is None else _as_bool(reshard)
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)
        self.cpu_ram_efficient_loading = bool(self.cpu_ram_efficient_loading)
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = [
                name.strip() for name in self.transformer_cls_names_to_wrap.split(",") if name.strip()
            ]
        if isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = self.auto_wrap_policy.lower()
            if self.auto_wrap_policy not in WRAP_POLICIES:
                raise ValueError(
                    f"auto_wrap_policy={self.auto_wrap_policy!r} is unknown: choose one of {', '.join(WRAP_POLICIES)}, "
                    "or give a function."
                )
        self.set_cpu_offload()
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = _policy(self.mixed_precision_policy)

    def _translate(self) -> None:
        """Translate the settings of FSDP1 to FSDP2."""
        notes = []
        if self.sharding_strategy is not None:
            name = str(getattr(self.sharding_strategy, "name", self.sharding_strategy)).upper()
            name = _SHARDING_NUMBERS.get(name, name)
            if name == "NO_SHARD":
                raise UnsupportedSettingError(
                    "sharding_strategy=NO_SHARD", "it shards nothing, which is DDP.", "Leave the FSDP plugin out."
                )
            if name not in _RESHARDS:
                raise ValueError(f"sharding_strategy={name!r} is unknown: choose one of {', '.join(_RESHARDS)}.")
            self.copy_per_host = name.startswith("HYBRID")
            if self.reshard_after_forward is None:
                self.reshard_after_forward = _RESHARDS[name]
            hybrid = " and a copy per host (dp_replicate_size)" if self.copy_per_host else ""
            notes.append(f"sharding_strategy={name} is reshard_after_forward={self.reshard_after_forward}{hybrid}")
        ignored = [name for name in _WITHOUT_EFFECT if getattr(self, name)]
        if ignored:
            notes.append(f"{', '.join(ignored)}: FSDP2 does this by itself, the setting has no effect")
        if self.fsdp_version == 1:
            notes.insert(0, "fsdp_version=1 runs on FSDP2")
        if notes:
            logger.warning("FSDP settings translated: %s.", "; ".join(notes))

    def set_cpu_offload(self) -> None:
        """Turn a yes or no into torch's offload policy."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if not isinstance(self.cpu_offload, OffloadPolicy):
            wanted = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
            self.cpu_offload = CPUOffloadPolicy() if _as_bool(wanted) else OffloadPolicy()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how states are saved."""
        from torch.distributed.fsdp import StateDictType

        chosen = state_dict_type or self.state_dict_type or StateDictType.SHARDED_STATE_DICT
        if not isinstance(chosen, StateDictType):
            by_number = {str(kind.value): kind.name for kind in StateDictType}
            name = by_number.get(str(chosen), str(chosen).upper())
            if name not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
                raise UnsupportedSettingError(
                    f"state_dict_type={chosen}",
                    "FSDP2 has no such form.",
                    "Choose SHARDED_STATE_DICT or FULL_STATE_DICT.",
                )
            chosen = StateDictType[name]
        self.state_dict_type = chosen

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute in a number format, unless a policy was chosen already; gradients are reduced in fp32."""
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _policy(mixed_precision)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Take the classes of the units from the model's `_no_split_modules`, where no class was named."""
        own = getattr(model, "_no_split_modules", None)
        if self.auto_wrap_policy == "transformer_based_wrap" and not self.transformer_cls_names_to_wrap and own:
            self.transformer_cls_names_to_wrap = list(own)

    @property
    def saves_shards(self) -> bool:
        """Return whether every process saves its own part."""
        return self.state_dict_type.name == "SHARDED_STATE_DICT"  # type: ignore[no-any-return]

    @property
    def offloads(self) -> bool:
        """Return whether shards are kept on the host."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        return isinstance(self.cpu_offload, CPUOffloadPolicy)

    @classmethod
    def from_variables(cls, words: Mapping[str, str]) -> FullyShardedDataParallelPlugin:
        """Build a plugin from environment variables. FSDP1's fields always have a value there, so most are ignored."""
        values: dict[str, Any] = dict(words)
        if values.get("fsdp_version", "1").strip() == "2":
            values = {name: value for name, value in values.items() if name not in _FSDP1_ONLY}
        values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
        for name in ("fsdp_version", "min_num_params"):
            if name in values:
                values[name] = int(values[name])
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"):
            if name in values:
                values[name] = _as_bool(values[name])
        if values.get("auto_wrap_policy", "").lower() != "size_based_wrap":
            values.pop("min_num_params", None)  # published with a default, whatever the policy
        return cls(**values)


def _as_bool(value: Any) -> bool:
    if isinstance(value, str):
        return _RESHARDS.get(value.upper(), value.strip().lower() in ("1", "true", "yes", "y", "on"))
    return bool(value)


def _policy(value: Any) -> Any:
    """Return torch's policy for a number format, a dict of its fields, or FSDP1's class."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, (torch.dtype, str)):
        dtype = getattr(torch, _DTYPES.get(value, value)) if isinstance(value, str) else value
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    given = value if isinstance(value, dict) else vars(value)
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    return MixedPrecisionPolicy(**{name: given[name] for name in known if given.get(name) is not None})
