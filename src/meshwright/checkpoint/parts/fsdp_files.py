"""Save and load one model or optimizer of a sharded run. Trainers of other libraries call these functions."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...parallel.modules.unwrapping import extract_model_from_parallel, own_name
from ..formats import codec
from ..formats.dcp import SafeReader
from ..formats.model_files import save_model_files
from ..group import CheckpointGroup
from ..layout import engine_folder, model_folder, numbered, optimizer_folder
from .shards import ShardedModelPart, ShardedOptimizerPart, read_tensors
from .states import ModelPart, OptimizerPart, with_ties

PathLike = str | os.PathLike[str]
"""Of a folder."""


def _model_part(model: nn.Module, index: int, *, sharded: bool) -> ModelPart:
    own = extract_model_from_parallel(model, keep_torch_compile=False)
    if sharded:
        return ShardedModelPart("model", model_folder(index), own)
    return ModelPart("model", numbered("pytorch_model_fsdp", index, ".bin"), own)


def _optimizer_part(
    optimizer: Any, model: nn.Module, index: int, group: CheckpointGroup, *, sharded: bool
) -> OptimizerPart:
    own = extract_model_from_parallel(model, keep_torch_compile=False)
    if sharded:
        return ShardedOptimizerPart("optimizer", optimizer_folder(index), optimizer, [own], group)
    return OptimizerPart("optimizer", numbered("optimizer", index, ".bin"), optimizer, [own])


# Both keep their published names, because other libraries monkeypatch them.


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    """Return the state of a model in torch's form; with `adapter_only`, only the trained parameters."""
    state = get_model_state_dict(model, options=sd_options)
    if not adapter_only:
        return state
    trained = {own_name(name) for name, param in model.named_parameters() if param.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def _set_model_state_dict(
    model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Load a state in torch's form into a model; with `adapter_only` the state may be incomplete."""
    if adapter_only:
        sd_options = replace(sd_options or StateDictOptions(), strict=False)
    return set_model_state_dict(model, state_dict, options=sd_options)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    output_dir: PathLike,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model: a folder of shards, or one file `pytorch_model_fsdp.bin`, as the plugin says. All ranks call it."""
    part = _model_part(model, model_index, sharded=fsdp_plugin.saves_shards)
    options = StateDictOptions(full_state_dict=not part.is_folder, cpu_offload=not part.is_folder)
    state = _get_model_state_dict(part.model, adapter_only=adapter_only, sd_options=options)
    _save(part, part.named(state), Path(output_dir), accelerator)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: PathLike,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer: a folder of shards, or one file `optimizer.bin`, as the plugin says. All ranks call it."""
    group = accelerator.checkpointer.engine.group
    part = _optimizer_part(optimizer, model, optimizer_index, group, sharded=fsdp_plugin.saves_shards)
    _save(part, part.capture(), Path(output_dir), accelerator)


def _save(part: ModelPart | OptimizerPart, state: Any, folder: Path, accelerator: Any) -> None:
    group = accelerator.checkpointer.engine.group
    if group.is_coordinator:
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    if part.is_folder or group.is_coordinator:
        part.write(state, folder / part.file, group)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    input_dir: PathLike,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` saved, in either form and on any number of processes."""
    sharded = (Path(input_dir) / model_folder(model_index)).is_dir()
    part = _model_part(model, model_index, sharded=sharded)
    part.load_options["strict"] = not adapter_only
    state = _read(part, Path(input_dir), accelerator)
    fitting = {name: value for name, value in state.items() if not (isinstance(value, Tensor) and value.is_meta)}
    complete = with_ties(fitting, part.model.state_dict(keep_vars=True))
    options = StateDictOptions(full_state_dict=not sharded)
    _set_model_state_dict(part.model, complete, adapter_only=adapter_only, sd_options=options)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: PathLike,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` saved, in either form and on any number of processes."""
    sharded = (Path(input_dir) / optimizer_folder(optimizer_index)).is_dir()
    group = accelerator.checkpointer.engine.group
    part = _optimizer_part(optimizer, model, optimizer_index, group, sharded=sharded)
    part.restore(_read(part, Path(input_dir), accelerator))


def _read(part: ModelPart | OptimizerPart, folder: Path, accelerator: Any) -> Any:
    """Read a part, or raise if it does not match."""
    path = folder / part.file
    if not path.exists():
        raise FileNotFoundError(f"There is no {part.file} in {folder}.")
    state = part.read(path, accelerator.checkpointer.engine.group)
    objection = part.objection(state)
    if objection is not None:
        raise ValueError(f"{path} does not match the {part.name}: {objection}.")
    return state


def merge_fsdp_weights(
    checkpoint_dir: PathLike,
    output_path: PathLike,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> list[str]:
    """Write the models of a checkpoint as the usual files, on one process, without the code of the models.

    Return the names of the files. Further models are numbered as in a checkpoint: `model_1.safetensors`.
    """
    if remove_checkpoint_dir and Path(output_path).resolve().is_relative_to(Path(checkpoint_dir).resolve()):
        raise ValueError(f"{output_path} would be deleted with the checkpoint {checkpoint_dir}: give another folder.")
    written: list[str] = []
    for index, source in enumerate(_models_in(Path(checkpoint_dir))):
        written += save_model_files(
            _whole_state(source),
            Path(output_path),
            max_shard_size="10GB",
            safe_serialization=safe_serialization,
            index=index,
        )
    if remove_checkpoint_dir:
        shutil.rmtree(checkpoint_dir)
    return written


def _whole_state(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        return codec.read_state(source)
    reader = SafeReader(source)
    tensors = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in reader.tensors.items()}
    read_tensors(tensors, reader)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _models_in(folder: Path) -> list[Path]:
    """Return the folder of shards or the file of every model in a checkpoint; the checkpoint may be one such folder."""
    if (folder / ".metadata").is_file():
        return [folder]
    models: list[Path] = []
    while (model := _model_in(folder, len(models))) is not None:
        models.append(model)
    if not models:
        raise FileNotFoundError(
            f"{folder} holds no shards: expected .metadata and *.distcp files in it, or in its folder "
            f"{model_folder(0)}, or whole models such as model.safetensors."
        )
    return models


def _model_in(folder: Path, index: int) -> Path | None:
    if (folder / engine_folder(index)).is_dir():
        raise ValueError(
            f"{folder / engine_folder(index)} holds the files of DeepSpeed's engine. Load the checkpoint with "
            "load_state, and write the model with save_model; or convert the folder with DeepSpeed's zero_to_fp32."
        )
    if (folder / model_folder(index) / ".metadata").is_file():
        return folder / model_folder(index)
    files = (
        numbered(stem, index, suffix)
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"), ("pytorch_model_fsdp", ".bin"))
    )
    return next((folder / file for file in files if (folder / file).is_file()), None)
