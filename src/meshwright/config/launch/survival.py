"""Refuse what `--survive` cannot do: replicas are one process each, or a few that FSDP shards a model over."""

from __future__ import annotations

from ...errors import UnsupportedSettingError
from .settings import LaunchSettings

_SPREAD_MODELS = ("use_deepspeed", "use_megatron_lm", "tpu")
_AXES = ("tp", "cp", "pp", "ep", "sp")


def refuse_survival(settings: LaunchSettings, method: str, num_processes: int) -> None:
    """Raise if a launch with `--survive` could not replace its processes."""
    if method == "mpirun":
        raise _refusal(settings, "mpirun starts the processes, and ends all of them when one dies.", "Leave it out.")
    if num_processes == 1:
        raise _refusal(
            settings,
            "this launcher starts one process, so that no other replica can continue.",
            "Use --num_processes 2 or more, and start one launcher per machine.",
        )
    if settings.nnodes is not None or settings.rdzv_backend != "static":
        cause = settings.origin("nnodes" if settings.nnodes is not None else "rdzv_backend")
        raise _refusal(
            settings,
            f"with a changing number of machines ({cause}) all processes restart.",
            "Use --num_machines, or leave --survive out.",
        )
    if spread := _spread_models(settings):
        raise _refusal(
            settings,
            f"{spread[0]} ({settings.origin(spread[0])}) spreads a model in a way that it cannot replace.",
            "Use DDP, or FSDP on a mesh of dp_replicate and dp_shard, or leave --survive out.",
        )


def _spread_models(settings: LaunchSettings) -> list[str]:
    values = {name: item.value for name, item in settings.resolved.items()}
    found = [name for name in _SPREAD_MODELS if values[name]]
    if values["use_parallelism_config"]:
        sizes = [f"parallelism_config_{axis}_size" for axis in _AXES]
        found += [name for name in sizes if (values[name] or 1) != 1]
    return found


def _refusal(settings: LaunchSettings, reason: str, remedy: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(f"survive ({settings.origin('survive')})", reason, remedy)
