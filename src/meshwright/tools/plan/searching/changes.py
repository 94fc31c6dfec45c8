"""Let a script run as a choice says, where its own code says otherwise, and tell what to change in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....accelerator import Accelerator
from ....config.plugins.parallelism import ParallelismConfig, PipelineConfig
from .choices import AXES, Choice

_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
_MESH, _SHARDING = "parallelism_config", "fsdp_plugin"


def change_settings_in_code(choice: Choice) -> None:
    """Replace what the script gives to Accelerator by what was chosen."""
    plain = Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(_MESH) is not None or choice.pp > 1:
            kwargs[_MESH] = _mesh(kwargs.get(_MESH) or ParallelismConfig(), choice)
        if kwargs.get(_SHARDING) is not None:
            kwargs[_SHARDING].reshard_after_forward = choice.reshard
            kwargs[_SHARDING].activation_checkpointing = choice.recompute
        plain(self, *args, **kwargs)

    Accelerator.__init__ = init  # type: ignore[method-assign]


def _mesh(config: ParallelismConfig, choice: Choice) -> ParallelismConfig:
    handler = config.pp_handler
    if choice.pp > 1:
        handler = replace(handler or PipelineConfig(), microbatches=choice.microbatches)
    sizes: dict[str, Any] = {f"{axis}_size": getattr(choice, axis) for axis in AXES}
    return replace(config, **sizes, pp_handler=handler)


def changes_of(choice: Choice, base: Choice, in_code: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """Return what has to be changed in the script, because no option of a launch can."""
    found = []
    if choice.batch != base.batch:
        found.append(f"batch size {choice.batch} of each process instead of {base.batch}{_argument(base, arguments)}")
    if choice.accumulation != base.accumulation and any(name in in_code for name in _ACCUMULATION):
        found.append(f"gradient_accumulation_steps={choice.accumulation} instead of {base.accumulation}")
    if _MESH in in_code and choice.axes != base.axes:
        sizes = ", ".join(f"{axis}_size={size}" for axis, size in choice.axes.items())
        found.append(f"ParallelismConfig({sizes}), with its other arguments")
    if choice.pp > 1 and choice.microbatches != (base.microbatches if _MESH in in_code else choice.pp):
        found.append(f"ParallelismConfig(pp_handler=PipelineConfig(microbatches={choice.microbatches}))")
    if _SHARDING in in_code and (choice.reshard, choice.recompute) != (base.reshard, base.recompute):
        found.append(
            f"FullyShardedDataParallelPlugin(reshard_after_forward={choice.reshard}, "
            f"activation_checkpointing={choice.recompute})"
        )
    return found


def _argument(base: Choice, arguments: Sequence[str]) -> str:
    """Return the argument of the script that probably is the batch size, in brackets."""
    pairs = [word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word]
    pairs += [[name, value] for name, value in pairwise(arguments) if name.startswith("--")]
    names = {name for name, value in pairs if "batch" in name and "eval" not in name and value == str(base.batch)}
    return f" ({names.pop()})" if len(names) == 1 else ""
