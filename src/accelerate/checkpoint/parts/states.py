"""What a checkpoint is made of. A part captures its state, says why a state does not fit, and restores it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.order.position import Position, PositionError
from ...parallel.base import EngineState, params_of
from ...parallel.modules.dtensors import any_dtensor, distribute_like, gathered
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from ..formats import codec
from ..formats.saving import each_memory_once, memory_of
from ..group import Crew
from ..layout import PROGRESS_FILE

if TYPE_CHECKING:
    from ...tracking.trackers import Trackers


class Part(ABC):
    """One thing that is saved and restored."""

    per_rank = False
    """Every process has its own, in a file of its own."""
    is_collective = False
    """Capturing it takes all processes, though one of them writes it."""
    is_folder = False
    """It is a folder that all processes write and read together, each its part."""
    is_users_own = False
    """Its state comes from the user's own code, and may hold anything."""

    def __init__(self, name: str, file: str) -> None:
        self.name = name
        self.file = file

    @abstractmethod
    def capture(self) -> Any:
        """Return the state as it is now; the tensors in it may still be the live ones."""

    def write(self, state: Any, path: Path, crew: Crew) -> None:
        """Write a state to its file."""
        codec.write(each_memory_once(state) if path.suffix == ".safetensors" else state, path)

    def written_here(self, path: Path, crew: Crew) -> list[Path]:
        """Return the files that this process wrote."""
        return [path]

    def read(self, path: Path, crew: Crew, **load_options: Any) -> Any:
        """Read a state from its file."""
        return codec.read(path, **load_options)

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Take a state that fits."""

    def objection(self, state: Any) -> str | None:
        """Say why a state does not fit, before anything is changed."""
        return None


class ModelPart(Part):
    """The weights and buffers of a model, under the names of the user's own module."""

    def __init__(self, name: str, file: str, model: nn.Module, *, is_whole: bool = True) -> None:
        super().__init__(name, file)
        self.model = model
        self.is_whole = is_whole
        """False for a stage of a pipeline: the checkpoint holds the other stages too."""
        self.load_options: dict[str, Any] = {"strict": True}

    @property
    def is_collective(self) -> bool:  # type: ignore[override]
        """Tell whether the tensors are spread over processes, and one of them is to write whole ones."""
        return not self.is_folder and any_dtensor(self.model.parameters())

    def capture(self) -> dict[str, Any]:
        """Return the whole state."""
        return gathered(self.model.state_dict())

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state under the names that its file has."""
        return state

    def objection(self, state: Any) -> str | None:
        """Compare names and shapes; a tied weight may be stored under any one of its names."""
        if not self.load_options["strict"]:
            return None
        own = self.model.state_dict(keep_vars=True)
        complete = with_ties(state, own)
        missing = sorted(own.keys() - complete.keys())
        extra = sorted(complete.keys() - own.keys()) if self.is_whole else []
        reshaped = [
            f"{name} has shape {tuple(own[name].shape)} here and {tuple(complete[name].shape)} in the checkpoint"
            for name in sorted(own.keys() & complete.keys())
            if isinstance(own[name], Tensor) and complete[name].shape != own[name].shape
        ]
        said = []
        if missing:
            said.append(f"the checkpoint lacks {_some(missing)}")
        if extra:
            said.append(f"the checkpoint has {_some(extra)}, which the model does not have")
        return "; ".join([*said, *reshaped[:3]]) or None

    def restore(self, state: Any) -> None:
        """Load the weights."""
        own = self.model.state_dict(keep_vars=True)
        fitting = {name: value for name, value in with_ties(state, own).items() if self.is_whole or name in own}
        spread = {
            name: distribute_like(value, own[name]) if isinstance(own.get(name), Tensor) else value
            for name, value in fitting.items()
            if not (isinstance(value, Tensor) and value.is_meta and not self.load_options["strict"])
        }
        self.model.load_state_dict(spread, **self.load_options)


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

    def __init__(self, name: str, file: str, owner: Any, models: Sequence[nn.Module], *, is_whole: bool = True) -> None:
        super().__init__(name, file, owner)
        self.names = names_of_parameters(models)
        self.is_whole = is_whole
        """False where the models are stages of a pipeline: the checkpoint holds the moments of the other stages too."""

    def objection(self, state: Any) -> str | None:
        """Compare the groups."""
        if not self.is_whole:
            missing = [name for name in self._own_names() if name not in state.get("names", ())]
            return f"the checkpoint lacks the names of the parameters, or {_some(missing)}" if missing else None
        there = [len(group["params"]) for group in state["param_groups"]]
        here = [len(group["params"]) for group in self.owner.param_groups]
        return None if there == here else f"the groups have {here} parameters here and {there} in the checkpoint"

    @property
    def is_collective(self) -> bool:  # type: ignore[override]
        """Tell whether moments are spread over processes, and one of them is to write whole ones."""
        return not self.is_folder and any_dtensor(self._parameters())

    def _parameters(self) -> list[Tensor]:
        return params_of(self.owner)

    def _own_names(self) -> list[str]:
        return [self.names.get(id(param), str(index)) for index, param in enumerate(self._parameters())]

    def capture(self) -> Any:
        """Return the whole state, and the names of the parameters by which a pipeline finds its own."""
        state = {**self.owner.state_dict(), "names": self._own_names()}
        return {**state, "state": gathered(state["state"])} if self.is_collective else state

    def _of_own_stages(self, state: Any) -> Any:
        """Return the moments of this process's parameters, numbered as they are here."""
        there = {name: index for index, name in enumerate(state["names"])}
        moments = {
            here: state["state"][there[name]]
            for here, name in enumerate(self._own_names())
            if there[name] in state["state"]
        }
        own = self.owner.state_dict()["param_groups"]
        groups = [{**saved, "params": group["params"]} for group, saved in zip(own, state["param_groups"], strict=True)]
        return {"state": moments, "param_groups": groups}

    def restore(self, state: Any) -> None:
        """Give every parameter its moments, spread as it is."""
        params = self._parameters()
        state = state if self.is_whole else self._of_own_stages(state)
        if self.is_collective:
            moments = {
                index: {
                    name: distribute_like(value, params[index])
                    if isinstance(value, Tensor) and value.shape == params[index].shape
                    else value
                    for name, value in of_one.items()
                }
                for index, of_one in state["state"].items()
            }
            state = {**state, "state": moments}
        self.owner.load_state_dict(state)


class EnginePart(Part):
    """A model and its optimizer that an engine owns: a folder of the engine's files, each written by one process."""

    per_rank = True
    is_folder = True

    def __init__(self, name: str, file: str, engine: EngineState) -> None:
        super().__init__(name, file)
        self.engine = engine
        self._files: list[str] = []

    def capture(self) -> dict[str, Any]:
        """Ask the engine for what this process saves."""
        return self.engine.capture()

    def write(self, state: Any, path: Path, crew: Crew) -> None:
        """Write this process's files, and beside the folder what the engine's tools look for."""
        path.mkdir(exist_ok=True)
        self._files = list(state)
        for file, tree in state.items():
            codec.write(tree, path / file)
        if crew.leads:
            for file, text in self.engine.companions().items():
                (path.parent / file).write_text(text, encoding="utf-8")

    def written_here(self, path: Path, crew: Crew) -> list[Path]:
        """Return the files that this process wrote."""
        return [path / file for file in self._files]

    def read(self, path: Path, crew: Crew, **load_options: Any) -> Any:
        """Read what this process needs."""
        files = self.engine.wanted(sorted(file.name for file in path.iterdir()))
        with torch.serialization.safe_globals(self.engine.classes):
            return path, {file: codec.read(path / file, **load_options) for file in files}

    def objection(self, state: Any) -> str | None:
        """Ask the engine."""
        return self.engine.objection(state[1])

    def restore(self, state: Any) -> None:
        """Give the engine what was read."""
        path, states = state
        self.engine.restore(states, path)


def names_of_parameters(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of every parameter; those of a second model have its number in front."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, param in model.named_parameters():
            names.setdefault(id(param), f"model_{index}.{name}" if index else name)
    return names


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
    """Where the run is: the positions of its loaders, the steps of its optimizers, the runs of its trackers."""

    def __init__(
        self, loaders: Sequence[Any], optimizers: Sequence[Any] = (), trackers: Trackers | None = None
    ) -> None:
        super().__init__("progress", PROGRESS_FILE)
        self.loaders = loaders
        self.optimizers = optimizers
        self.trackers = trackers
        self.step: int | None = None
        """The step of the checkpoint, once it is restored: that of the optimizer that stepped most often."""
        self.seeks = True
        """Whether loaders go on at the batch where they were, or begin that epoch again."""

    def capture(self) -> dict[str, Any]:
        """Return plain data that means the same on any number of processes."""
        return {
            "loaders": [loader.state_dict() for loader in self.loaders],
            "steps": [optimizer.steps_taken for optimizer in self.optimizers],
            "trackers": {} if self.trackers is None else self.trackers.runs(),
        }

    def objection(self, state: Any) -> str | None:
        """Compare the number of loaders, and ask each whether it can begin where it was."""
        there, here = len(state["loaders"]), len(self.loaders)
        if there != here:
            return f"{here} loaders are prepared here, and the checkpoint has the positions of {there}"
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            try:
                if "batches" in position:  # torchdata's loaders keep a state of their own
                    Position.from_dict(position).batches_of(loader.base_batch_size)
            except PositionError as error:
                return f"a loader cannot continue at its position: {error}".rstrip(".")
        return None

    def restore(self, state: Any) -> None:
        """Let every loader go on where it was, or at the beginning of that epoch; with `seeks` the trackers too."""
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(position)
            if not self.seeks:
                loader.rewind()
        steps = state.get("steps", [])
        for optimizer, taken in zip(self.optimizers, steps, strict=False):
            optimizer.steps_taken = taken
        self.step = max(steps, default=None)
        if self.seeks and self.trackers is not None:  # `load_state` may load into another run
            self.trackers.go_on(state.get("trackers", {}))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
