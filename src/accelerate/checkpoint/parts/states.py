"""The parts of a checkpoint. A part captures its state, reports why a state does not match, and restores it."""

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
from ...errors import UnsupportedSettingError
from ...parallel.base import EngineState, full_steps_of, params_of
from ...parallel.modules.dtensors import any_dtensor, distribute_like, gathered, num_shards
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from ..formats import codec
from ..formats.saving import deduplicate_storage, storage_key
from ..group import CheckpointGroup
from ..layout import PROGRESS_FILE

if TYPE_CHECKING:
    from ...tracking.trackers import Trackers

_MIN_LOW_BIT = 4096
"""The number of elements from which on torchao keeps moments in a few bits."""


class Part(ABC):
    """One object that is saved and restored."""

    per_rank = False
    """Each rank has its own state, in its own file."""
    is_collective = False
    """Capturing is a collective, although one rank writes the state."""
    is_folder = False
    """It is a folder in which each rank writes and reads its files."""
    is_user_state = False
    """Its state comes from user code and may hold any object."""

    def __init__(self, name: str, file: str) -> None:
        self.name = name
        self.file = file

    @abstractmethod
    def capture(self) -> Any:
        """Return the current state; its tensors may be the live ones."""

    def write(self, state: Any, path: Path, group: CheckpointGroup) -> None:
        """Write a state to its file."""
        codec.write(deduplicate_storage(state) if path.suffix == ".safetensors" else state, path)

    def written_here(self, path: Path, group: CheckpointGroup) -> list[Path]:
        """Return the files that this rank wrote."""
        return [path]

    def read(self, path: Path, group: CheckpointGroup, **load_options: Any) -> Any:
        """Read a state from its file."""
        return codec.read(path, **load_options)

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Restore a state that matches."""

    def objection(self, state: Any) -> str | None:
        """Return why a state does not match, or None; nothing is changed."""
        return None


class ModelPart(Part):
    """The weights and buffers of a model, under the names of the unwrapped module."""

    def __init__(self, name: str, file: str, model: nn.Module, *, is_whole: bool = True) -> None:
        super().__init__(name, file)
        self.model = model
        self.is_whole = is_whole
        """False for a pipeline stage: the checkpoint also holds the other stages."""
        self.load_options: dict[str, Any] = {"strict": True}

    @property
    def is_collective(self) -> bool:  # type: ignore[override]
        """Tell whether the tensors are sharded and must be gathered for the rank that writes them."""
        return not self.is_folder and any_dtensor(self.model.parameters())

    def capture(self) -> dict[str, Any]:
        """Return the whole state."""
        return gathered(self.model.state_dict())

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a model under the names in its file."""
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
        problems = []
        if missing:
            problems.append(f"the checkpoint lacks {_some(missing)}")
        if extra:
            problems.append(f"the checkpoint has {_some(extra)}, which the model does not have")
        return "; ".join([*problems, *reshaped[:3]]) or None

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
    """Add the names of tied weights that a file omits because they are stored under another name."""
    by_storage: dict[tuple[Any, ...], str] = {}
    for name in state:
        if isinstance(own.get(name), Tensor) and own[name].numel():
            by_storage.setdefault(storage_key(own[name]), name)
    complete = dict(state)
    for name, tensor in own.items():
        if name not in complete and isinstance(tensor, Tensor):
            tied_name = by_storage.get(storage_key(tensor))
            if tied_name is not None:
                complete[name] = state[tied_name]
    return complete


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: optimizers, schedulers, the scaler, registered objects."""

    is_user_state = True

    def __init__(self, name: str, file: str, owner: Any) -> None:
        super().__init__(name, file)
        self.owner = owner

    def capture(self) -> Any:
        """Return the `state_dict` of the object."""
        return self.owner.state_dict()

    def restore(self, state: Any) -> None:
        """Call `load_state_dict` of the object."""
        self.owner.load_state_dict(state)


class OptimizerPart(StatefulPart):
    """An optimizer, whose parameter groups must match those that were saved."""

    is_user_state = False

    def __init__(self, name: str, file: str, owner: Any, models: Sequence[nn.Module], *, is_whole: bool = True) -> None:
        super().__init__(name, file, owner)
        self.names = names_of_parameters(models)
        self.is_whole = is_whole
        """False if the models are pipeline stages: the checkpoint also holds the state of the other stages."""

    def objection(self, state: Any) -> str | None:
        """Compare the parameter groups."""
        if not self.is_whole:
            missing = [name for name in self._own_names() if name not in state.get("names", ())]
            return f"the checkpoint lacks the names of the parameters, or {_some(missing)}" if missing else None
        there = [len(group["params"]) for group in state["param_groups"]]
        here = [len(group["params"]) for group in self.owner.param_groups]
        return None if there == here else f"the groups have {here} parameters here and {there} in the checkpoint"

    @property
    def is_collective(self) -> bool:  # type: ignore[override]
        """Tell whether the state is sharded and must be gathered for the rank that writes it."""
        return not self.is_folder and any_dtensor(self._parameters())

    def _parameters(self) -> list[Tensor]:
        return params_of(self.owner)

    def _own_names(self) -> list[str]:
        return [self.names.get(id(param), str(index)) for index, param in enumerate(self._parameters())]

    def capture(self) -> Any:
        """Return the whole state, and the names of the parameters, by which pipeline stages find theirs."""
        if self.is_collective:
            self._require_equal_kinds()
        state = {**self.owner.state_dict(), "names": self._own_names()}
        if not self.is_collective:
            return state
        moments, steps = gathered(state["state"]), full_steps_of(self.owner)
        return {**state, "state": moments if steps is None else steps.gathered(self._parameters(), moments)}

    def _require_equal_kinds(self) -> None:
        """Refuse moments of torchao that may have a few bits on one process and be plain on another.

        They would be gathered by different collectives. Every process comes to the same result.
        """
        optimizer = getattr(self.owner, "optimizer", self.owner)
        if not type(optimizer).__module__.startswith("torchao."):
            return
        for name, param in zip(self._own_names(), self._parameters(), strict=True):
            shards = num_shards(param)
            if param.numel() >= _MIN_LOW_BIT and param.shape[0] % shards:
                raise UnsupportedSettingError(
                    f"FULL_STATE_DICT with {type(optimizer).__name__} of torchao and {name}",
                    f"its {param.shape[0]} rows over {shards} processes are not even, and torchao may keep a few bits "
                    "on some of them only.",
                    "Use a number of rows that the processes divide.",
                )

    def _of_own_stages(self, state: Any) -> Any:
        """Return the state of the parameters of this rank, with its own indices."""
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
        """Restore the state of every parameter, sharded like the parameter."""
        params = self._parameters()
        state = state if self.is_whole else self._of_own_stages(state)
        if self.is_collective:
            steps = full_steps_of(self.owner)
            moments = {
                index: moments_of_one
                if steps is not None and steps.takes(params[index])  # its owner keeps it whole, and others drop it
                else {
                    name: distribute_like(value, params[index])
                    if isinstance(value, Tensor) and value.shape == params[index].shape
                    else value
                    for name, value in moments_of_one.items()
                }
                for index, moments_of_one in state["state"].items()
            }
            state = {**state, "state": moments}
        optimizer = getattr(self.owner, "optimizer", self.owner)
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            optimizer.state.clear()  # it is replaced: else the device holds the old moments beside the new ones
        self.owner.load_state_dict(state)


class EnginePart(Part):
    """A model and its optimizer that an engine owns: a folder of files, each written by one rank."""

    per_rank = True
    is_folder = True

    def __init__(self, name: str, file: str, engine: EngineState) -> None:
        super().__init__(name, file)
        self.engine = engine
        self._files: list[str] = []

    def capture(self) -> dict[str, Any]:
        """Return the state that the engine saves on this rank."""
        return self.engine.capture()

    def write(self, state: Any, path: Path, group: CheckpointGroup) -> None:
        """Write the files of this rank, and beside the folder those that the tools of the engine expect."""
        path.mkdir(exist_ok=True)
        self._files = list(state)
        for file, tree in state.items():
            codec.write(tree, path / file)
        if group.is_coordinator:
            for file, text in self.engine.companions().items():
                (path.parent / file).write_text(text, encoding="utf-8")

    def written_here(self, path: Path, group: CheckpointGroup) -> list[Path]:
        """Return the files that this rank wrote."""
        return [path / file for file in self._files]

    def read(self, path: Path, group: CheckpointGroup, **load_options: Any) -> Any:
        """Read the files that this rank needs."""
        files = self.engine.wanted(sorted(file.name for file in path.iterdir()))
        with torch.serialization.safe_globals(self.engine.classes):
            return path, {file: codec.read(path / file, **load_options) for file in files}

    def objection(self, state: Any) -> str | None:
        """Return the objection of the engine."""
        return self.engine.objection(state[1])

    def restore(self, state: Any) -> None:
        """Pass the state to the engine."""
        path, states = state
        self.engine.restore(states, path)


def names_of_parameters(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of every parameter by its id; names of later models are prefixed with the index."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, param in model.named_parameters():
            names.setdefault(id(param), f"model_{index}.{name}" if index else name)
    return names


class RandomPart(Part):
    """The random generators of this rank: of Python, NumPy, torch and the device."""

    per_rank = True

    def __init__(self, file: str, runtime: Runtime, window: Any) -> None:
        super().__init__("generators", file)
        self.runtime = runtime
        self.window = window

    def capture(self) -> dict[str, Any]:
        """Return the states under their published names."""
        state: dict[str, Any] = {
            "step": self.window.step,  # part of the published format, for resuming in the middle of a window
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        if not devices.is_cpu(self.runtime.device):
            state[f"torch_{self.runtime.device.type}_manual_seed"] = devices.get_device_rng_state(self.runtime.device)
        return state

    def restore(self, state: Any) -> None:
        """Set the generators, and the micro-batch in the accumulation window."""
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
    """The progress of a run: the positions of loaders, the steps of optimizers, the runs of trackers."""

    def __init__(
        self, loaders: Sequence[Any], optimizers: Sequence[Any] = (), trackers: Trackers | None = None
    ) -> None:
        super().__init__("progress", PROGRESS_FILE)
        self.loaders = loaders
        self.optimizers = optimizers
        self.trackers = trackers
        self.step: int | None = None
        """The step of the checkpoint, once it is restored: the largest of all optimizers."""
        self.seeks = True
        """Whether loaders continue at their batch, or restart the epoch."""

    def capture(self) -> dict[str, Any]:
        """Return plain data that is valid on any number of processes."""
        return {
            "loaders": [loader.state_dict() for loader in self.loaders],
            "steps": [optimizer.steps_taken for optimizer in self.optimizers],
            "trackers": {} if self.trackers is None else self.trackers.runs(),
        }

    def objection(self, state: Any) -> str | None:
        """Compare the number of loaders, and check that each can continue at its position."""
        there, here = len(state["loaders"]), len(self.loaders)
        if there != here:
            return f"{here} loaders are prepared here, and the checkpoint has the positions of {there}"
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            try:
                if "batches" in position:  # loaders of torchdata have their own state
                    Position.from_dict(position).batches_of(loader.base_batch_size)
            except PositionError as error:
                return f"a loader cannot continue at its position: {error}".rstrip(".")
        return None

    def restore(self, state: Any) -> None:
        """Set every loader to its position, or to the start of that epoch; with `seeks`, resume the trackers too."""
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(position)
            if not self.seeks:
                loader.rewind()
        steps = state.get("steps", [])
        for optimizer, taken in zip(self.optimizers, steps, strict=False):
            optimizer.steps_taken = taken
        self.step = max(steps, default=None)
        if self.seeks and self.trackers is not None:  # `load_state` may load into another run
            self.trackers.resume_runs(state.get("trackers", {}))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
