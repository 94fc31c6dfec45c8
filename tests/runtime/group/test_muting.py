"""Muted collectives: a rank gets results of its own data without meeting the others, and meets them afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright import PartialState
from meshwright.runtime.group.muting import collectives_muted
from tests.ranks import ranks


@ranks(2)
def test_a_rank_alone_gets_results_of_the_right_shape() -> None:
    state = PartialState()
    mine = torch.tensor([1.0, 2.0]) * (state.process_index + 1)
    with collectives_muted():
        if state.is_main_process:  # the other rank takes no part
            summed, gathered, parts = mine.clone(), torch.empty(4), [torch.empty(2), torch.empty(2)]
            dist.all_reduce(summed)
            dist.all_gather_into_tensor(gathered, mine)
            dist.all_gather(parts, mine)
            dist.broadcast(mine, 1)
            dist.barrier()
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, "mine")
            assert summed.tolist() == mine.tolist() == [1.0, 2.0]
            assert gathered.tolist() == [1.0, 2.0, 1.0, 2.0]
            assert objects == ["mine", "mine"]
    dist.all_reduce(mine)
    assert mine.tolist() == [3.0, 6.0]


@ranks(2)
def test_the_groups_are_as_before_also_after_an_error_and_a_second_time() -> None:
    state = PartialState()
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    for _ in range(2):
        with pytest.raises(KeyError), collectives_muted():
            raise KeyError
    model(torch.ones(1, 1) * state.process_index).sum().backward()
    assert model.module.weight.grad is not None
    assert model.module.weight.grad.item() == 0.5


@ranks(2)
def test_what_rank_0_tells_and_groups_that_are_left_apart_are_real() -> None:
    state = PartialState()
    apart = dist.new_group([0, 1])
    with collectives_muted([apart]):
        told = [state.process_index]
        dist.broadcast_object_list(told, src=0)
        together = torch.ones(1)
        dist.all_reduce(together, group=apart)
    assert told == [0]
    assert together.item() == 2


def test_without_a_process_group_nothing_happens() -> None:
    with collectives_muted():
        assert not dist.is_initialized()
