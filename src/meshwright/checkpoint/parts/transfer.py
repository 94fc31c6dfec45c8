"""The state of a run as bytes, for a process that takes it from another one instead of from a checkpoint.

Both hold the same parameters, or the same shards of them: a shard is sent as it is, and nothing is gathered.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel.base import params_of
from ...parallel.modules.dtensors import dtensor_like, mesh_of
from ...runtime.loop.random import set_seed
from .states import ModelPart, OptimizerPart, Part, RandomPart

GRADIENTS = "gradients"


@dataclass(frozen=True)
class _Shard:
    """The part of a DTensor on the sender."""

    own: Tensor


def pack(parts: Iterable[Part], gradients: Sequence[Tensor | None] = ()) -> bytes:
    """Return the states of parts, and gradients if there are any."""
    buffer = io.BytesIO()
    states = {part.name: _captured(part) for part in parts}
    torch.save({**states, GRADIENTS: _in_shards(list(gradients))}, buffer)
    return buffer.getvalue()


class DerivedRandomPart(RandomPart):
    """Generators of a rank that has none of its own, derived from those of another one."""

    @classmethod
    def like(cls, part: Part) -> DerivedRandomPart:
        """Return a part that derives the generators of another part."""
        assert isinstance(part, RandomPart)
        return cls(part.file, part.runtime, part.window)

    def restore(self, state: Any) -> None:
        """Seed every generator from rank 0's state, the step and the rank; the order of the data comes from rank 0."""
        if self.runtime.is_main_process:
            super().restore(state)
            return
        self.window.step = state["step"]
        text = bytes(state["torch_manual_seed"].tolist()) + f"{state['step']},{self.runtime.process_index}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
        set_seed(seed)


def unpack(content: bytes, parts: Iterable[Part], parameters: Sequence[Tensor], rank: int) -> None:
    """Restore the parts that `pack` was given, and the gradients of parameters if there are any.

    The generators of this rank are derived from those of the sender: equal ones would drop the same activations. With
    gradients, what is restored is one step: learning rates stay those of this rank, whose script changes them itself.
    """
    # The sender is a process of the same run, and registered objects may have any state.
    states: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=False)
    gradients = states.pop(GRADIENTS)
    for part in parts:
        if part.name not in states:
            continue
        if isinstance(part, RandomPart):
            part.window.step = states[part.name]["step"]
            text = bytes(states[part.name]["torch_manual_seed"].tolist()) + str(rank).encode()
            set_seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))
        elif isinstance(part, ModelPart):
            own = part.model.state_dict(keep_vars=True)
            part.restore({name: _spread(value, own.get(name)) for name, value in states[part.name].items()})
        elif isinstance(part, OptimizerPart):
            part.restore(_of_optimizer(states[part.name], part.owner, is_one_step=bool(gradients)))
        else:
            _require_same(part, states[part.name], rank)
            part.restore(states[part.name])
    for param, gradient in zip(parameters, gradients, strict=False):
        param.grad = _spread(gradient, param)


def _require_same(part: Part, state: Any, rank: int) -> None:
    difference = part.objection(state)
    if difference is not None:
        raise ValueError(
            f"Rank {rank} cannot take the state of another replica: {part.name}: {difference}. Prepare and register "
            "the same objects on every process before resume()."
        )


def _captured(part: Part) -> Any:
    if isinstance(part, ModelPart):
        return _in_shards(part.model.state_dict())
    if isinstance(part, OptimizerPart):
        return _in_shards(part.owner.state_dict())
    return part.capture()


def _in_shards(tree: Any) -> Any:
    """Replace the DTensors in dicts and lists by this process's part of them."""
    if isinstance(tree, dict):
        return {key: _in_shards(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_in_shards(value) for value in tree]
    spread: Any = tree
    return _Shard(spread._local_tensor) if isinstance(tree, Tensor) and mesh_of(tree) is not None else tree


def _spread(value: Any, like: Tensor | None) -> Any:
    """Return a DTensor like another one for a part of one; anything else is as it was."""
    return dtensor_like(like, value.own) if isinstance(value, _Shard) and like is not None else value


def _of_optimizer(state: dict[str, Any], owner: Any, *, is_one_step: bool) -> dict[str, Any]:
    """Return the state of an optimizer with DTensors like its parameters.

    With one step only, the groups stay those of this process: its own script and schedulers change learning rates.
    """
    params = params_of(owner)
    moments = {
        index: {name: _spread(value, params[index]) for name, value in of_one.items()}
        for index, of_one in state["state"].items()
    }
    groups = owner.state_dict()["param_groups"] if is_one_step else state["param_groups"]
    return {**state, "state": moments, "param_groups": groups}
