"""`check_replicas`: one flipped bit in one replica is found, and its rank is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.config.environment import patch_environment
from meshwright.errors import ReplicaMismatchError
from meshwright.parallel.modules.dtensors import local
from meshwright.parallel.replicas.checksums import checksum
from tests.ranks import ranks


def flip_a_bit(parameter: torch.Tensor) -> None:
    """Change the least significant bit of one element."""
    own = local(parameter.detach())
    own.view(torch.int32).view(-1)[0] ^= 1


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@ranks(3)
def test_the_rank_of_a_flipped_bit_is_named_on_every_rank() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(new_model())
    accelerator.check_replicas()
    if accelerator.process_index == 1:
        flip_a_bit(model.module[2].weight)
    with pytest.raises(
        ReplicaMismatchError, match=r"Rank 1 differs from the other 2 replicas in 1 of 4 tensors \(.*2\.weight\)"
    ):
        accelerator.check_replicas()


@ranks(2)
def test_two_replicas_have_no_majority() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(new_model())
    if accelerator.process_index == 0:
        flip_a_bit(model.module[0].bias)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 0, 1 differ, and no majority tells which is right"):
        accelerator.check_replicas()


@ranks(4)
def test_shards_are_compared_along_the_axis_of_replicas_and_all_ranks_learn_of_it() -> None:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    model, _ = accelerator.prepare(new_model(), torch.optim.SGD(new_model().parameters()))
    accelerator.check_replicas()
    if accelerator.process_index == 3:
        flip_a_bit(model[0].weight)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 1, 3 differ"):
        accelerator.check_replicas()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()


@ranks(3)
def test_replicas_are_compared_every_few_steps_without_a_call() -> None:
    accelerator = Accelerator(cpu=True)
    plain = new_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    accelerator.check_replicas(every=100)
    accelerator.check_replicas(every=2)  # takes the place of the other
    for _ in range(3):
        step(model, optimizer, accelerator)
    if accelerator.process_index == 2:
        flip_a_bit(model.module[0].weight)
    with pytest.raises(ReplicaMismatchError, match="Rank 2 differs from the other 2 replicas"):
        step(model, optimizer, accelerator)


@ranks(4)
def test_the_launcher_sets_how_often_replicas_of_a_mesh_are_compared() -> None:
    with patch_environment(MESHWRIGHT_CHECK_REPLICAS_EVERY="2"):
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        )
        plain = new_model()
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    if accelerator.process_index == 3:
        flip_a_bit(model[0].weight)
    step(model, optimizer, accelerator)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 1, 3 differ"):
        step(model, optimizer, accelerator)


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every N optimizer steps, and N is 0"):
        Accelerator(cpu=True).check_replicas(every=0)


def test_one_process_has_nothing_to_compare() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(new_model())
    accelerator.check_replicas()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn]
)
def test_a_checksum_changes_with_any_bit_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=torch.float32).to(dtype)
    before = checksum(tensor)
    tensor.view(torch.uint8).view(-1)[-1] ^= 1
    assert checksum(tensor) != before


def test_a_checksum_does_not_depend_on_where_a_tensor_lies_in_memory() -> None:
    memory = torch.randn(40)
    part = memory[3:16]
    assert checksum(part) == checksum(part.clone())
    assert checksum(memory.reshape(5, 8).t()) == checksum(memory.reshape(5, 8).t().contiguous())
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
