"""Sharded states in the format of torch's DCP: every rank writes its shards, and any number of ranks can read them.

A part of this form is a folder, `pytorch_model_fsdp_0` or `optimizer_0` as published. Tensors go into DCP's files under
their names. Other values go into a separate file, because DCP would pickle them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import UnsupportedSettingError
from ...parallel.base import full_steps_of
from ...parallel.modules.dtensors import dtensor_like, local
from ...precision.quantized import is_composed
from ..formats import codec
from ..formats.dcp import SafeReader, TensorPlanner
from ..group import CheckpointGroup
from .fitting import objection_to_optimizer
from .states import ModelPart, OptimizerPart

PLAIN_FILE = "plain.bin"


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, group: CheckpointGroup) -> None:
    """Write the shards of this rank; all ranks call it."""
    folder.mkdir(exist_ok=True)
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
    with _as_plain_error():
        save(dict(tensors), storage_writer=writer, process_group=group.process_group, no_dist=group.world_size == 1)


@contextmanager
def _as_plain_error() -> Iterator[None]:
    """Raise the error of a rank as ValueError: DCP's own exception is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ValueError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause


def read_tensors(into: dict[str, Tensor], reader: SafeReader) -> None:
    """Fill tensors with the shards of this rank, however the tensors were sharded when they were written.

    Each rank plans and reads by itself, so that no rank waits for one that fails.
    """
    if into:
        with warnings.catch_warnings(), _as_plain_error():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
            load(into, storage_reader=reader, planner=TensorPlanner(), no_dist=True)


def _files_of_this_rank(folder: Path, group: CheckpointGroup) -> list[Path]:
    """Return the files of a folder that DCP wrote on this rank; rank 0 also writes the common ones."""
    files = list(folder.iterdir())
    common = [file for file in files if not file.name.startswith("__")] if group.rank == 0 else []
    return [file for file in files if file.name.startswith(f"__{group.rank}_")] + common


class ShardedModelPart(ModelPart):
    """A model of which every rank saves its shards."""

    per_rank = True
    is_folder = True

    def capture(self) -> dict[str, Tensor]:
        """Return the shards of this rank, under the names of the whole model."""
        return self.named(self.model.state_dict())

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a model under the names in its folder."""
        return {f"model.{name}": value for name, value in state.items() if isinstance(value, Tensor)}

    def write(self, state: Any, path: Path, group: CheckpointGroup) -> None:
        """Write the shards; all ranks call it."""
        write_tensors(state, path, group)

    def written_here(self, path: Path, group: CheckpointGroup) -> list[Path]:
        """Return the files that this rank wrote."""
        return _files_of_this_rank(path, group)

    def read(self, path: Path, group: CheckpointGroup, **load_options: Any) -> dict[str, Tensor]:
        """Read the shards of this rank whose shapes match; `objection` reports the others."""
        reader = SafeReader(path)
        there = reader.tensors
        own = _tensors_of(self.model)
        into = {
            f"model.{name}": _on_host(tensor, tensor.dtype)
            for name, tensor in own.items()
            if f"model.{name}" in there and there[f"model.{name}"].size == tensor.shape
        }
        read_tensors(into, reader)
        found = {name.removeprefix("model."): tensor for name, tensor in into.items()}
        for name, facts in there.items():  # `objection` compares these shapes and names
            found.setdefault(name.removeprefix("model."), torch.empty(facts.size, device="meta"))
        return found


def _on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor with the same shards in host memory; the device would hold everything twice."""
    return dtensor_like(tensor.detach(), torch.empty(local(tensor.detach()).shape, dtype=dtype))


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


class ShardedOptimizerPart(OptimizerPart):
    """An optimizer of which every rank saves its shards, by the names of the parameters."""

    per_rank = True
    is_folder = True
    is_collective = True

    def __init__(self, name: str, file: str, owner: Any, models: Sequence[nn.Module], group: CheckpointGroup) -> None:
        super().__init__(name, file, owner, models)
        self.group = group

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for number, group in enumerate(self.owner.param_groups):
            for index, param in enumerate(group["params"]):
                yield self.names.get(id(param), f"group_{number}.{index}"), param

    def capture(self) -> dict[str, Any]:
        """Return the state tensors by name, and separately the other values."""
        tensors: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        self._require_plain_moments()
        for name, param in self._named_parameters():
            for key, value in self.owner.state.get(param, {}).items():
                (tensors if isinstance(value, Tensor) else others)[f"optimizer.state.{name}.{key}"] = value
        merged = {name: value for part in self.group.gather(others) for name, value in part.items()}
        return {"tensors": tensors, "plain": {"groups": _options(self.owner.param_groups), "others": merged}}

    def _require_plain_moments(self) -> None:
        """Refuse moments in a few bits: DCP would read them as full numbers."""
        for state in self.owner.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and is_composed(local(value)):
                    raise UnsupportedSettingError(
                        f"SHARDED_STATE_DICT with {type(local(value)).__name__} in the optimizer's state",
                        "torch's sharded files hold plain numbers.",
                        'Use FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT").',
                    )

    def write(self, state: Any, path: Path, group: CheckpointGroup) -> None:
        """Write the shards; all ranks call it."""
        write_tensors(state["tensors"], path, group)
        if group.is_coordinator:
            codec.write(state["plain"], path / PLAIN_FILE)

    def written_here(self, path: Path, group: CheckpointGroup) -> list[Path]:
        """Return the files that this rank wrote."""
        return _files_of_this_rank(path, group)

    def read(self, path: Path, group: CheckpointGroup, **load_options: Any) -> dict[str, Any]:
        """Read the shards of this rank."""
        reader, steps = SafeReader(path), full_steps_of(self.owner)
        there = reader.tensors
        into: dict[str, Tensor] = {}
        for name, param in self._named_parameters():
            is_whole = steps is not None and steps.takes(param)
            if is_whole and not steps.owns(param):
                continue
            stem = f"optimizer.state.{name}."
            for full_name, facts in there.items():
                if full_name.startswith(stem) and "." not in full_name.removeprefix(stem):
                    like = facts.size == param.shape and not is_whole
                    into[full_name] = (
                        _on_host(param, facts.properties.dtype)
                        if like
                        else torch.empty(facts.size, dtype=facts.properties.dtype)
                    )
        read_tensors(into, reader)
        plain_file = path / PLAIN_FILE  # accelerate 1.x writes none: the options of the script apply
        plain = codec.read(plain_file, **load_options) if plain_file.is_file() else None
        return {"tensors": into, "plain": plain, "names": sorted(there)}

    def objection(self, state: Any) -> str | None:
        """Compare the number of parameter groups, and check that the parameters have their state."""
        groups = state["plain"]["groups"] if state["plain"] is not None else None
        if groups is not None and not all(isinstance(group, Mapping) for group in groups):
            return f"{PLAIN_FILE} holds no options of parameter groups"
        if groups is not None and len(groups) != len(self.owner.param_groups):
            return f"{len(self.owner.param_groups)} parameter groups here and {len(groups)} in the checkpoint"
        if not state["names"]:
            return None  # it had not stepped
        missing = [
            name
            for name, param in self._named_parameters()
            if param.requires_grad and not any(key.startswith(f"optimizer.state.{name}.") for key in state["names"])
        ]
        has_some = len(missing) < sum(1 for _ in self._named_parameters())
        if missing and not has_some:
            return f"the checkpoint lacks the state of {', '.join(missing[:4])}"
        return objection_to_optimizer(self._assembled(state), self._optimizer)

    def restore(self, state: Any) -> None:
        """Restore the state of every parameter and the options of every group."""
        assembled = self._assembled(state)
        self.owner.state.clear()  # the device need not hold the old moments beside the new ones
        self.owner.load_state_dict(assembled)

    def _assembled(self, state: Any) -> dict[str, Any]:
        """Return what was read in the form that the optimizer loads."""
        tensors, plain = state["tensors"], state["plain"] or {"groups": None, "others": {}}
        per_index: dict[int, dict[str, Any]] = {}
        for index, (name, _) in enumerate(self._named_parameters()):
            stem = f"optimizer.state.{name}."
            found = {key.removeprefix(stem): value for key, value in tensors.items() if key.startswith(stem)}
            found |= {key.removeprefix(stem): value for key, value in plain["others"].items() if key.startswith(stem)}
            found = {key: value for key, value in found.items() if "." not in key}
            if found:
                per_index[index] = found
        own = self.owner.state_dict()["param_groups"]
        options = plain["groups"] or [{} for _ in own]
        groups = [{**group, **saved} for group, saved in zip(own, options, strict=True)]
        return {"state": per_index, "param_groups": groups}


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]
