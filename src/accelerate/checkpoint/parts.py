"""What a checkpoint is made of. A part captures its state, says why a state does not fit, and restores it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.position import Position, PositionError
from ..runtime import device as devices
from ..runtime.runtime import Runtime
from ..saving import clean_state_dict_for_safetensors, memory_of
from .layout import PROGRESS_FILE


class Part(ABC):
    """One thing that is saved and restored."""

    per_rank = False
    """Every process has its own, in a file of its own."""
    is_collective = False
    """Capturing it takes all processes, though one of them writes it."""
    is_users_own = False
    """Its state comes from the user's own code, and may hold anything."""

    def __init__(self, name: str, file: str) -> None:
        self.name = name
        self.file = file

    @abstractmethod
    def capture(self) -> Any:
        """Return the state as it is now; the tensors in it may still be the live ones."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Take a state that fits."""

    def objection(self, state: Any) -> str | None:
        """Say why a state does not fit, before anything is changed."""
        return None


class ModelPart(Part):
    """The weights and buffers of a model, under the names of the user's own module."""

    def __init__(self, name: str, file: str, model: nn.Module, load_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, file)
        self.model = model
        self.load_options = {"strict": True, **(load_options or {})}

    def capture(self) -> dict[str, Any]:
        """Return the whole state."""
        return self.model.state_dict()

    def objection(self, state: Any) -> str | None:
        """Compare names and shapes; a tied weight may be stored under any one of its names."""
        if not self.load_options["strict"]:
            return None
        own = self.model.state_dict()
        complete = with_ties(state, own)
        missing, extra = sorted(own.keys() - complete.keys()), sorted(complete.keys() - own.keys())
        reshaped = [
            f"{name} is {tuple(complete[name].shape)} there and {tuple(own[name].shape)} here"
            for name in sorted(own.keys() & complete.keys())
            if isinstance(own[name], Tensor) and complete[name].shape != own[name].shape
        ]
        said = []
        if missing:
            said.append(f"without {_some(missing)}")
        if extra:
            said.append(f"with {_some(extra)}, which the model does not have")
        return "; ".join([*said, *reshaped[:3]]) or None

    def restore(self, state: Any) -> None:
        """Load the weights."""
        own = self.model.state_dict()
        self.model.load_state_dict(with_ties(state, own), **self.load_options)


def with_ties(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Add the names that a file leaves out because their memory is stored under another name."""
    by_place: dict[tuple[Any, ...], str] = {}
    for name in state:
        if isinstance(own.get(name), Tensor) and own[name].numel():
            by_place.setdefault(memory_of(own[name]), name)
    complete = dict(state)
    for name, tensor in own.items():
        if name not in complete and isinstance(tensor, Tensor):
            twin = by_place.get(memory_of(tensor))
            if twin is not None:
                complete[name] = state[twin]
    return complete


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: optimizers, schedulers, the scaler, registered objects."""

    is_users_own = True

    def __init__(self, name: str, file: str, owner: Any) -> None:
        super().__init__(name, file)
        self.owner = owner

    def capture(self) -> Any:
        """Ask the object."""
        return self.owner.state_dict()

    def restore(self, state: Any) -> None:
        """Tell the object."""
        self.owner.load_state_dict(state)


class OptimizerPart(StatefulPart):
    """An optimizer, whose groups must be those that were saved."""

    is_users_own = False

    def objection(self, state: Any) -> str | None:
        """Compare the groups."""
        there = [len(group["params"]) for group in state["param_groups"]]
        here = [len(group["params"]) for group in self.owner.param_groups]
        return None if there == here else f"with parameter groups of {there} parameters; here they have {here}"


class RandomPart(Part):
    """The generators of this process: Python's, NumPy's, torch's and the device's."""

    per_rank = True

    def __init__(self, file: str, runtime: Runtime, window: Any) -> None:
        super().__init__("generators", file)
        self.runtime = runtime
        self.window = window

    def capture(self) -> dict[str, Any]:
        """Return the states under their published names."""
        state: dict[str, Any] = {
            "step": self.window.step,  # published there, and read by whoever resumes in the middle of a window
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        if not devices.is_cpu(self.runtime.device):
            state[f"torch_{self.runtime.device.type}_manual_seed"] = devices.get_device_rng_state(self.runtime.device)
        return state

    def restore(self, state: Any) -> None:
        """Set the generators, and the micro-batch of the window."""
        self.window.step = state["step"]
        random.setstate(state["random_state"])
        np.random.set_state(state["numpy_random_seed"])
        torch.set_rng_state(state["torch_manual_seed"])
        device_state = state.get(f"torch_{self.runtime.device.type}_manual_seed")
        if device_state is not None and not devices.is_cpu(self.runtime.device):
            if isinstance(device_state, list):  # accelerate 1.x keeps one per device of the host
                device_state = device_state[self.runtime.device.index or 0]
            devices.set_device_rng_state(device_state, self.runtime.device)


class ProgressPart(Part):
    """Where the run is in its data: the positions of its loaders."""

    is_collective = True  # torchdata's loaders ask each other

    def __init__(self, loaders: Sequence[Any]) -> None:
        super().__init__("progress", PROGRESS_FILE)
        self.loaders = loaders

    def capture(self) -> dict[str, Any]:
        """Return plain data that means the same on any number of processes."""
        return {"loaders": [loader.state_dict() for loader in self.loaders]}

    def objection(self, state: Any) -> str | None:
        """Compare the number of loaders, and ask each whether it can begin where it was."""
        there, here = len(state["loaders"]), len(self.loaders)
        if there != here:
            return f"with the positions of {there} loaders; {here} are prepared here"
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            try:
                if "batches" in position:  # torchdata's loaders keep a state of their own
                    Position.from_dict(position).batches_of(loader.base_batch_size)
            except PositionError as error:
                return f"at a position that cannot be kept: {error}".rstrip(".")
        return None

    def restore(self, state: Any) -> None:
        """Let every loader go on where it was."""
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(position)


def storable(part: Part, state: Any) -> Any:
    """Return a state in the form its file takes."""
    return clean_state_dict_for_safetensors(state) if part.file.endswith(".safetensors") else state


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
