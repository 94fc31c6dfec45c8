"""The group inside of a replica stays when the default group is formed again for other members."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshwright.config.environment import INCARNATION, MEMBERSHIP_STORE
from meshwright.runtime.group.runtime import Runtime
from meshwright.runtime.membership.events import whole_replicas
from tests.ranks import run_on_ranks


def sum_over(group: object) -> float:
    numbers = torch.tensor(float(Runtime.current().process.rank))
    dist.all_reduce(numbers, group=group)  # type: ignore[arg-type]
    return numbers.item()


def train_while_members_change(address: str) -> list[object]:
    os.environ |= {MEMBERSHIP_STORE: address, INCARNATION: "0"}
    runtime = Runtime.start(cpu=True)
    member = runtime.member
    assert member is not None
    groups = runtime.spread_replica(2)
    assert groups is runtime.spread_replica(2), "a second Accelerator uses the same groups"
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=DeviceMesh.from_group(groups.inside, "cpu"))

    def norm() -> float:
        model.zero_grad()
        model(torch.full((1, 3), float(member.rank))).sum().backward()
        return float(torch.nn.utils.get_total_norm([model.weight.grad]).full_tensor())

    seen: list[object] = [norm(), sum_over(groups.inside), sum_over(groups.counterparts)]
    if member.rank == 0:
        member.events.publish("left", [0, 1], "it ends")
    if member.rank < 2:
        runtime.leave_members(is_pending=False)
        return seen
    member.hears_of_loss()
    for _ in range(2):  # twice: what was put back can be taken out again
        runtime.leave_members(is_pending=False)
        runtime.form_group({})
        ranks = dist.get_process_group_ranks(groups.inside)
        seen += [norm(), sum_over(groups.inside), sum_over(groups.counterparts), ranks]
        if member.rank == 2:
            member.events.publish("broken", [], "once more")
        member.hears_of_loss()
    return seen


def test_the_group_inside_of_a_replica_outlives_the_default_group() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = run_on_ranks(4, train_while_members_change, address=f"127.0.0.1:{server.port}")
    root = 6**0.5  # of a gradient of six equal numbers
    torch.testing.assert_close([first[0] for first in seen], [0.5 * root] * 2 + [2.5 * root] * 2)
    assert [first[1:3] for first in seen] == [[1, 2], [1, 4], [5, 2], [5, 4]]
    for rank in (2, 3):
        assert len(seen[rank]) == 11
        for later in (seen[rank][3:7], seen[rank][7:]):
            assert later == [seen[rank][0], 5, rank, [0, 1]], "numbered anew, and the same numbers"


def form_after_a_failed_attempt(address: str) -> list[object]:
    os.environ |= {MEMBERSHIP_STORE: address, INCARNATION: "0"}
    runtime = Runtime.start(cpu=True)
    member = runtime.member
    assert member is not None
    runtime.spread_replica(1)
    if member.rank == 0:
        member.events.publish("broken", [], "once")
    member.hears_of_loss()
    runtime.leave_members(is_pending=False)
    if member.rank == 0:  # the other rank had connected, or was not there yet
        store, timeout = dist.PrefixStore("attempt", member.store), timedelta(seconds=0.5)
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timeout)
    member.learn_of_loss = partial(pytest.fail, "could not connect")  # instead of another attempt
    runtime.form_group({})
    return [member.epoch, sum_over(None)]


def test_members_of_which_one_failed_to_connect_form_the_next_group() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, form_after_a_failed_attempt, address=f"127.0.0.1:{server.port}") == [[1, 1.0]] * 2


def test_a_replica_is_named_by_any_of_its_ranks() -> None:
    assert whole_replicas([5, 0], 2) == (0, 1, 4, 5)
    assert whole_replicas([3, 1], 1) == (1, 3)
