"""Where the tensors of a prepared model are: the only place that knows the strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..checkpoint.formats.saving import storage_key
from ..errors import UnsupportedSettingError
from ..inference.offload.offloaded import offloaded_tensors
from ..parallel.base import Strategy
from ..parallel.modules.dtensors import mesh_of
from ..parallel.modules.unwrapping import extract_model_from_parallel, own_name
from ..parallel.modules.wrapping import is_inside
from ..parallel.pipeline.schedules import pipeline_of
from ..precision.quantized import quantized_parameters, refuse_quantized
from .forms import Held, Rows, held
from .gathering import Stages


class Source:
    """The tensors of a model on this process, by their names in the user's own model."""

    def __init__(self, model: nn.Module, names: list[str] | None, *, adapter_only: bool) -> None:
        self.model = model
        self._left_out: tuple[str, ...] = ()
        if adapter_only:  # packed weights of the base, and their scales
            self._left_out = tuple(own_name(name) for name in quantized_parameters(model))
        else:
            refuse_quantized(
                model,
                "accelerator.weights()",
                "its packed numbers are no weights that an engine takes.",
                "Hand over the adapter alone (adapter='only'), and let the engine load the base.",
            )
        self._values = self._current()
        self.names = names or list(self._values)
        """The names of all tensors, also those of other stages, in the order of the model."""

    def _current(self) -> dict[str, Tensor]:
        state = self.model.state_dict(keep_vars=True)  # FSDP2 shards again what it has left gathered
        offloaded: Callable[[str], Tensor] | None = None
        found: dict[str, Tensor] = {}
        for name, value in state.items():
            clean = own_name(name)
            if is_inside(clean, self._left_out):
                continue
            if not isinstance(value, Tensor):
                raise UnsupportedSettingError(
                    f"accelerator.weights() with {clean}, a {type(value).__name__}",
                    "only tensors are handed over.",
                    "Remove it from the model's state_dict().",
                )
            if value.is_meta and not hasattr(value, "ds_id"):
                offloaded = offloaded or offloaded_tensors(self.model)
                value = offloaded(name)
            found[clean] = value
        return found

    def held(self) -> dict[str, Held]:
        """Return how this process holds each of its tensors."""
        rows: Rows = {}
        return {name: held(name, value, rows) for name, value in self._values.items()}

    def tied(self) -> list[list[str]]:
        """Return the groups of names that share a tensor."""
        groups: dict[Any, list[str]] = {}
        for name, value in self._values.items():
            is_spread = mesh_of(value) is not None or hasattr(value, "ds_id") or not value.numel()
            groups.setdefault(id(value) if is_spread else storage_key(value), []).append(name)
        return [names for names in groups.values() if len(names) > 1]


def source_of(model: nn.Module, *, adapter_only: bool = False) -> Source:
    """Return where the tensors of a prepared model are."""
    _refuse_engines(model)
    own = extract_model_from_parallel(model, keep_torch_compile=False)
    pipeline = pipeline_of(own)
    names = None if pipeline is None else [own_name(name) for name in pipeline.names]
    return Source(own, names, adapter_only=adapter_only)


def stages_of(strategy: Strategy, model: nn.Module) -> Stages | None:
    """Return the processes of the stages of a pipeline; None for a model that is not cut."""
    pipeline = pipeline_of(extract_model_from_parallel(model, keep_torch_compile=False))
    if pipeline is None:
        return None
    mesh = strategy.mesh.device_mesh
    axis = mesh.mesh_dim_names.index("pp")
    rows = mesh.mesh.movedim(axis, 0).reshape(mesh.mesh.shape[axis], -1)
    return Stages(tuple(map(tuple, rows.tolist())), pipeline.group)


def _refuse_engines(model: nn.Module) -> None:
    """Refuse what DeepSpeed divides in ways of its own."""
    engine: Any = model
    if getattr(engine, "has_moe_layers", False) is True:
        raise UnsupportedSettingError(
            "accelerator.weights() with experts of DeepSpeed",
            "every process names its own experts from zero.",
            "Spread the experts of the model itself: ParallelismConfig(ep_size=...).",
        )
    size = getattr(engine, "autotp_size", None)
    if callable(size) and size() > 1:
        raise UnsupportedSettingError(
            f"accelerator.weights() with autotp_size={size()} of DeepSpeed",
            "its layers are split without a record of how.",
            "Split them by ParallelismConfig(tp_size=...).",
        )
