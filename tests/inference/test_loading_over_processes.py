"""A checkpoint that one process reads reaches all of them, whole or in shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright import Accelerator, load_checkpoint_in_model
from meshwright.checkpoint.formats.model_files import save_model_files
from tests.ranks import ranks


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    save_model_files(network(0).state_dict(), tmp_path / "saved", max_shard_size="200B", safe_serialization=True)
    return str(tmp_path / "saved")


def assert_is_what_was_saved(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, network(0).state_dict()[name]), name


@ranks(2)
def test_only_the_first_process_needs_the_files(checkpoint: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = network(1 + accelerator.process_index)
    path = checkpoint if accelerator.is_main_process else "/a/folder/that/only/the/first/one/has"
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    assert_is_what_was_saved(model)


@pytest.mark.parametrize("from_first", [False, True])
@ranks(2)
def test_shards_take_their_part_of_it(from_first: bool, checkpoint: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = fully_shard(network(1), mesh=init_device_mesh("cpu", (2,)))
    path = checkpoint if accelerator.is_main_process or not from_first else "nowhere"
    load_checkpoint_in_model(model, path, broadcast_from_rank0=from_first)
    assert_is_what_was_saved(model)


def test_one_process_reads_for_itself(checkpoint: str) -> None:
    model = network(1)
    load_checkpoint_in_model(model, checkpoint, broadcast_from_rank0=True)
    assert_is_what_was_saved(model)
