"""Models and optimizers as one rank holds them: its own shards of what is spread, for a process of the same rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import dtensor_like, local, mesh_of
from .states import ModelPart, OptimizerPart

SPREAD = "spread"


class OwnModelPart(ModelPart):
    """The tensors of a model that this rank holds."""

    is_collective = False

    def capture(self) -> dict[str, Any]:
        """Return the tensors of this rank, under the names of the whole model."""
        return {name: _own(value) for name, value in self.model.state_dict().items()}

    def objection(self, state: Any) -> str | None:
        """Compare names, and the shapes of what this rank holds."""
        return super().objection(self._spread(state))

    def restore(self, state: Any) -> None:
        """Load the tensors."""
        super().restore(self._spread(state))

    def _spread(self, state: Mapping[str, Any]) -> dict[str, Any]:
        own = self.model.state_dict(keep_vars=True)
        return {name: _spread_like(own.get(name), value) for name, value in state.items()}


class OwnOptimizerPart(OptimizerPart):
    """The state of an optimizer that this rank holds."""

    is_collective = False

    def capture(self) -> Any:
        """Return the state of this rank, and which of its tensors are shards."""
        state = super().capture()
        moments = {
            index: {name: _own(value) for name, value in of_one.items()} if isinstance(of_one, Mapping) else of_one
            for index, of_one in state["state"].items()
        }
        spread = [
            (index, name)
            for index, of_one in state["state"].items()
            if isinstance(of_one, Mapping)
            for name, value in of_one.items()
            if isinstance(value, Tensor) and mesh_of(value) is not None
        ]
        return {**state, "state": moments, SPREAD: spread}

    def objection(self, state: Any) -> str | None:
        """Compare the parameter groups, and the shapes of shards."""
        params = self._parameters()
        for index, name in state[SPREAD]:
            if index >= len(params) or state["state"][index][name].shape != local(params[index].detach()).shape:
                return f"the {name} of parameter {index} is of another shape, or the parameter is divided differently"
        return super().objection(self._spread(state))

    def restore(self, state: Any) -> None:
        """Restore the state, with shards as shards of their parameters."""
        super().restore(self._spread(state))

    def _spread(self, state: Mapping[str, Any]) -> dict[str, Any]:
        params = self._parameters()
        moments = {
            index: dict(of_one) if isinstance(of_one, Mapping) else of_one for index, of_one in state["state"].items()
        }
        for index, name in state[SPREAD]:
            moments[index][name] = dtensor_like(params[index].detach(), moments[index][name])
        return {key: value for key, value in state.items() if key != SPREAD} | {"state": moments}


def _own(value: Any) -> Any:
    return local(value.detach()) if isinstance(value, Tensor) else value


def _spread_like(own: Any, value: Any) -> Any:
    """Return a shard as part of the tensor that it belongs to; one of another shape as it is, to be objected to."""
    if not isinstance(own, Tensor) or mesh_of(own) is None or not isinstance(value, Tensor):
        return value
    own = own.detach()
    fits = value.shape == local(own).shape
    return dtensor_like(own, value) if fits else torch.empty(value.shape, device="meta")
