"""The state of an engine as named trees of data: DeepSpeed's files, which our checkpoint engine writes and commits.

[Note: in-memory files] DeepSpeed writes and reads checkpoints through its class `CheckpointEngine`, file by file. We
replace it by one that keeps the files in memory when saving, and returns the loaded files when loading. Names and
contents are DeepSpeed's, so its tools can read them. Writing, flushing, verifying, committing and safe loading are done
by our checkpoint engine, as for all other state.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...temporary import new_folder, remove_folder, temporary_folder
from ...untrusted import printable
from ..base import EngineState

_TAG = "state"
_RANK = re.compile(r"zero_pp_rank_(\d+)_")


class DeepSpeedState(EngineState):
    """The state of one engine: weights, optimizer, and scheduler if it has one."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def capture(self) -> dict[str, Any]:
        """Return the files that this process saves, by name. Collective."""
        with temporary_folder("deepspeed") as folder, _using_checkpoint_engine(self.engine, _files_in_memory()) as kept:
            self.engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        return dict(kept.files)

    def wanted(self, files: Sequence[str]) -> list[str]:
        """Select the model's file and those of this rank; all files if the world size changed."""
        ranks = {int(found[1]) for file in files if (found := _RANK.search(file))}
        if ranks and len(ranks) != self._world_size:
            return list(files)
        rank = dist.get_rank()
        return [file for file in files if (found := _RANK.search(file)) is None or int(found[1]) == rank]

    @property
    def _world_size(self) -> int:
        return int(self.engine.seq_dp_world_size)

    @cached_property
    def classes(self) -> list[Any]:
        """The classes that the files hold besides plain data."""
        from deepspeed.runtime.fp16 import loss_scaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        scalers = [value for value in vars(loss_scaler).values() if isinstance(value, type)]
        return [*scalers, ZeroStageEnum, fragment_address, torch.Size]

    def objection(self, states: Mapping[str, Any]) -> str | None:
        """Compare the ZeRO stage and the names and shapes of the parameters."""
        if (damage := _damage(states)) is not None:
            return damage
        model_state = next(state for state in states.values() if "module" in state)
        there = model_state["ds_config"].get("zero_optimization", {}).get("stage", 0)
        here = self.engine.zero_optimization_stage()
        if there != here:
            return f"ZeRO-{int(here)} here and ZeRO-{int(there)} in the checkpoint"
        if self._has_other_world_size(model_state) and (reason := self._reason_against_resharding(states)):
            return f"the checkpoint was saved on {model_state['dp_world_size']} ranks, and {reason}"
        own, saved = self._own_shapes(), _shapes(model_state["param_shapes"], model_state["module"])
        if own != saved:
            differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            return f"the parameters differ: {', '.join(differing[:4])}"
        return None

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        zero = self.engine.zero_optimization() and self.engine.optimizer is not None
        return _shapes(self.engine._get_zero_param_shapes() if zero else None, self.engine.module.state_dict())

    def _has_other_world_size(self, model_state: Mapping[str, Any]) -> bool:
        return bool(self.engine.zero_optimization() and model_state["dp_world_size"] != self._world_size)

    def _reason_against_resharding(self, states: Mapping[str, Any]) -> str | None:
        """Return why states cannot be resharded for another world size, or None."""
        if self.engine.has_moe_layers or self.engine.mp_world_size > 1:
            return "DeepSpeed's experts and tensor parallelism must be loaded on the number of ranks that saved them"
        if self.engine.zero_nvme_offload_optimizer():
            return "states offloaded to nvme must be loaded on the number of ranks that saved them"
        if any("optimizer_state_dict" in state and not state["optimizer_state_dict"] for state in states.values()):
            return "its optimizer had no state"
        return None

    def restore(self, states: Mapping[str, Any], folder: Path) -> None:
        """Restore the loaded states. Collective."""
        model_state = next(state for state in states.values() if "module" in state)
        if self._has_other_world_size(model_state):
            self._restore_universal(states)
            return
        with _using_checkpoint_engine(self.engine, _files_in_memory(states)):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if path is None:
            raise ValueError(f"DeepSpeed found nothing to load in {folder}")

    def _restore_universal(self, states: Mapping[str, Any]) -> None:
        """Load on another world size, through a temporary checkpoint in DeepSpeed's universal format.

        Its converter loads pickles, so it gets files of our own with what was loaded as data.
        """
        from deepspeed.checkpoint import ds_to_universal

        places: list[Path | None] = [None] * self._world_size
        dist.all_gather_object(places, new_folder("deepspeed") if self.engine.local_rank == 0 else None)
        place = next(filter(None, reversed(places[: dist.get_rank() + 1])))  # one per host, whose first rank made it
        plain, universal, failure = place / "plain", place / _TAG, None
        try:
            if self.engine.local_rank == 0:
                try:
                    plain.mkdir(parents=True, mode=0o700)
                    for file, state in states.items():
                        torch.save(state, plain / file)
                    ds_to_universal.main(
                        Namespace(
                            input_folder=str(plain),
                            output_folder=str(universal),
                            num_extract_workers=1,
                            num_merge_workers=1,
                            keep_temp_folder=False,
                            strict=True,
                            inject_missing_state=True,
                        )
                    )
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
            failures: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure)
            if any(failures):
                reason = next(filter(None, failures))
                raise ValueError(f"DeepSpeed could not convert it for another number of ranks ({reason})")
            self.engine._config.load_universal_checkpoint = True
            self._load(universal)
        finally:
            self.engine._config.load_universal_checkpoint = False
            dist.barrier()
            if self.engine.local_rank == 0:
                remove_folder(place)

    def companions(self) -> dict[str, str]:
        """Return DeepSpeed's script that consolidates a checkpoint into full weights; DeepSpeed saves it too."""
        from deepspeed.utils import zero_to_fp32

        return {"zero_to_fp32.py": Path(zero_to_fp32.__file__).read_text(encoding="utf-8")}


def _damage(states: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the facts that are read here and by DeepSpeed's own reader, or None."""
    nameless = next((file for file, state in states.items() if not _has_names(state)), None)
    if nameless is not None:
        return f"{nameless} holds no facts by their names"
    found = [(file, state) for file, state in states.items() if "module" in state]
    if not found:
        return "the checkpoint has no file of DeepSpeed's model states"
    file, state = found[0]
    config, groups, ranks = (state.get(key) for key in ("ds_config", "param_shapes", "dp_world_size"))
    if not _is_configuration(config):
        return f"{file} has no configuration of DeepSpeed"
    if type(ranks) is not int or ranks < 1:
        return f"{file} is of {printable(str(ranks), 20)} ranks"
    if groups is None:
        return None if _are_weights(state["module"]) else f"{file} holds no weights by their names"
    are_shapes = isinstance(groups, list) and all(map(_are_shapes, groups))
    return None if are_shapes else f"{file} has no shapes of parameters"


def _has_names(state: Any) -> bool:
    return isinstance(state, dict) and all(type(key) is str for key in state)


def _is_configuration(config: Any) -> bool:
    section = config.get("zero_optimization", {}) if isinstance(config, dict) else None
    return isinstance(section, dict) and isinstance(section.get("stage", 0), int)


def _are_weights(whole: Any) -> bool:
    return isinstance(whole, dict) and all(isinstance(value, Tensor) for value in whole.values())


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(
        type(name) is str and isinstance(shape, torch.Size) for name, shape in group.items()
    )


def _shapes(groups: Any, whole: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters from ZeRO's groups, or from a full state if there are none."""
    if groups is None:
        return {name: tuple(value.shape) for name, value in whole.items()}
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _files_in_memory(files: Mapping[str, Any] | None = None) -> Any:
    """Return a checkpoint engine for DeepSpeed that keeps files in memory."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class FilesInMemory(CheckpointEngine):  # type: ignore[misc]
        def __init__(self) -> None:
            self.name = "accelerate"
            self.files: dict[str, Any] = dict(files or {})

        def create(self, info: Any) -> None:
            pass

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

        def save(self, state_dict: Any, path: str) -> None:
            self.files[Path(path).name] = state_dict

        def load(self, path: str, map_location: Any = None) -> Any:
            return self.files[Path(path).name]

        def commit(self, info: Any) -> bool:
            return True

    return FilesInMemory()


@contextmanager
def _using_checkpoint_engine(engine: Any, files: Any) -> Iterator[Any]:
    before, engine.checkpoint_engine = engine.checkpoint_engine, files
    try:
        yield files
    finally:
        engine.checkpoint_engine = before
