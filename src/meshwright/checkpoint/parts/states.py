"""The parts of a checkpoint. A part captures its state, reports why a state does not match, and restores it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.order.position import Position, PositionError
from ...errors import InvalidDataError, UnsupportedSettingError
from ...parallel.base import EngineState, full_steps_of, params_of
from ...parallel.modules.dtensors import any_dtensor, distribute_like, gathered, num_shards
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from ...untrusted import build
from ..formats import codec
from ..formats.saving import deduplicate_storage, storage_key
from ..group import CheckpointGroup
from ..layout import PROGRESS_FILE
from .fitting import objection_to_optimizer, objection_to_state, objection_to_tensors

if TYPE_CHECKING:
    from ...tracking.trackers import Trackers

_MOST_STEPS = 1 << 62
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
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            return "the checkpoint holds no weights by their names"
        own, is_strict = self.model.state_dict(keep_vars=True), self.load_options["strict"]
        complete = with_ties(state, own)
        missing = sorted(own.keys() - complete.keys()) if is_strict else []
        extra = sorted(complete.keys() - own.keys()) if is_strict and self.is_whole else []
        problems = []
        if missing:
            problems.append(f"the checkpoint lacks {_some(missing)}")
        if extra:
            problems.append(f"the checkpoint has {_some(extra)}, which the model does not have")
        unfit = objection_to_tensors(complete, own, may_lack_values=not is_strict)
        return "; ".join([*problems, *([unfit] if unfit else [])]) or None

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

    def objection(self, state: Any) -> str | None:
        """Compare the values with those of the object, if it is one of torch."""
        return objection_to_state(state, self.owner)

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
        """Compare the parameter groups, and the values of parameters."""
        if not self.is_whole:
            missing = [name for name in self._own_names() if name not in state.get("names", ())]
            if missing:
                return f"the checkpoint lacks the names of the parameters, or {_some(missing)}"
            there, here = len(state["param_groups"]), len(self.owner.param_groups)
            if there != here:
                return f"{here} parameter groups here and {there} in the checkpoint"
            state = self._of_own_stages(state)
        return objection_to_optimizer(state, self._optimizer)

    @property
    def _optimizer(self) -> Any:
        """The optimizer itself."""
        return getattr(self.owner, "optimizer", self.owner)

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
        optimizer = self._optimizer
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
        optimizer = self._optimizer
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

    def objection(self, state: Any) -> str | None:
        """Try the states on generators of no use: NumPy's own reads memory at any position that it is given."""
        try:
            position = state["numpy_random_seed"][2]
            is_state = type(position) is int and 0 <= position <= 624
            if not is_state or type(state["step"]) is not int or not 0 <= state["step"] < _MOST_STEPS:
                return "the state of the generators is none"
            np.random.RandomState().set_state(state["numpy_random_seed"])
            random.Random().setstate(state["random_state"])
            _require_generator_state(state["torch_manual_seed"])
            of_device = state.get(f"torch_{self.runtime.device.type}_manual_seed", [])
            for each in of_device if isinstance(of_device, list) else [of_device]:
                is_bytes = isinstance(each, Tensor) and each.dtype == torch.uint8 and each.dim() == 1
                is_seed = isinstance(each, Tensor) and each.dtype == torch.int64 and each.numel() == 1  # XLA's
                if not (is_seed if devices.is_xla(self.runtime.device) else is_bytes):
                    return "the state of the device's generator is none"
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            return f"the state of the generators is none: {error}"
        return None

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


@dataclass(frozen=True)
class _Runs:
    """The runs of trackers in a file of progress."""

    next_step: int = 0
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Progress:
    """What a file of progress holds."""

    loaders: list[Mapping[str, Any]]
    steps: list[int] = field(default_factory=list)
    trackers: _Runs = field(default_factory=_Runs)

    def __post_init__(self) -> None:
        if not all(0 <= number < _MOST_STEPS for number in (*self.steps, self.trackers.next_step)):
            raise ValueError("a number of steps is out of range")


def _position_of(state: Any) -> Position:
    position = build(Position, state, "it")
    numbers = position.epoch, position.batches, (position.batch_size or 1) - 1, position.num_processes - 1
    if not all(0 <= number < _MOST_STEPS for number in numbers):
        raise InvalidDataError("a number of it is out of range")
    for name, value in position.order.items():
        is_own = name == "generator" and isinstance(value, Tensor) and value.shape != torch.get_rng_state().shape
        if name in ("rng", "generator") and not is_own:  # one of a device, by the sampler's owner
            _require_generator_state(value)
        elif name in ("seed", "initial_seed") and not (value is None or (type(value) is int and abs(value) < 1 << 64)):
            raise InvalidDataError(f"the {name} of its order is none")
    return position


def _require_generator_state(state: Any) -> None:
    """Try the state of a generator of torch on one of no use."""
    try:
        torch.Generator().set_state(state)
    except (TypeError, RuntimeError) as error:
        raise InvalidDataError(f"the state of a generator is none: {error}") from None


def steps_in(progress: Any) -> list[int]:
    """Return the steps of the optimizers in a file of progress; raise InvalidDataError if it is none."""
    return build(_Progress, progress, "the progress").steps


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
        try:
            build(_Progress, state, "it")
        except InvalidDataError as error:
            return str(error)
        there, here = len(state["loaders"]), len(self.loaders)
        if there != here:
            return f"{here} loaders are prepared here, and the checkpoint has the positions of {there}"
        for loader, position in zip(self.loaders, state["loaders"], strict=True):
            try:
                if "batches" in position:  # loaders of torchdata have their own state
                    _position_of(position).batches_of(loader.base_batch_size)
            except (PositionError, InvalidDataError) as error:
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
