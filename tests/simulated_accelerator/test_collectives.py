"""Collectives of the simulated accelerator: right, in the order of streams, and late."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import PartialState
from tests.simulated_accelerator import run_on_a_simulated_accelerator, synchronization_removed
from tests.simulated_accelerator.faults import delays

LONG = {"copy_latency": 0.03, "kernel_time": 1e-3}


def all_reduce(mine: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(mine, op)
    return mine


def broadcast(mine: Tensor) -> Tensor:
    dist.broadcast(mine, src=1)
    return mine


def reduce_to_one(mine: Tensor) -> Tensor:
    dist.reduce(mine, dst=0)
    return mine if dist.get_rank() == 0 else torch.zeros_like(mine)


def all_gather(mine: Tensor) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def all_gather_into_tensor(mine: Tensor) -> Tensor:
    whole = mine.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(whole, mine)
    return whole


def reduce_scatter(mine: Tensor) -> Tensor:
    part = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter(part, list(mine.chunk(dist.get_world_size())))
    return part


def reduce_scatter_tensor(mine: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    part = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, mine, op)
    return part


def all_to_all(mine: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for part in mine.chunk(dist.get_world_size())]
    dist.all_to_all(parts, list(mine.chunk(dist.get_world_size())))
    return torch.cat(parts)


def all_to_all_single(mine: Tensor) -> Tensor:
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    return received


def scatter_and_gather(mine: Tensor) -> Tensor:
    is_first, size = dist.get_rank() == 0, dist.get_world_size()
    part = mine.new_empty(len(mine) // size)
    dist.scatter(part, list(mine.chunk(size)) if is_first else None, src=0)
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.gather(part + 1, parts if is_first else None, dst=0)
    return torch.cat(parts) if is_first else part


def exchange(mine: Tensor) -> Tensor:
    """Send to the next rank, and receive from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(mine)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    return received


# Each with what it gives to a rank of two, whose tensors are [0, 1, 2, 3] and [10, 11, 12, 13].
FIRST, SECOND = torch.arange(4.0), torch.arange(4.0) + 10
COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "all_reduce": (all_reduce, FIRST + SECOND, FIRST + SECOND),
    "all_reduce, mean": (
        lambda mine: all_reduce(mine, dist.ReduceOp.AVG),
        (FIRST + SECOND) / 2,
        (FIRST + SECOND) / 2,
    ),
    "broadcast": (broadcast, SECOND, SECOND),
    "reduce": (reduce_to_one, FIRST + SECOND, torch.zeros(4)),
    "all_gather": (all_gather, torch.cat([FIRST, SECOND]), torch.cat([FIRST, SECOND])),
    "all_gather_into_tensor": (all_gather_into_tensor, torch.cat([FIRST, SECOND]), torch.cat([FIRST, SECOND])),
    "reduce_scatter": (reduce_scatter, (FIRST + SECOND)[:2], (FIRST + SECOND)[2:]),
    "reduce_scatter_tensor": (reduce_scatter_tensor, (FIRST + SECOND)[:2], (FIRST + SECOND)[2:]),
    "reduce_scatter_tensor, mean": (
        lambda mine: reduce_scatter_tensor(mine, dist.ReduceOp.AVG),
        (FIRST + SECOND)[:2] / 2,
        (FIRST + SECOND)[2:] / 2,
    ),
    "all_to_all": (all_to_all, torch.tensor([0.0, 1, 10, 11]), torch.tensor([2.0, 3, 12, 13])),
    "all_to_all_single": (all_to_all_single, torch.tensor([0.0, 1, 10, 11]), torch.tensor([2.0, 3, 12, 13])),
    "scatter and gather": (scatter_and_gather, FIRST + 1, FIRST[2:]),
    "send and receive": (exchange, SECOND, FIRST),
}


def results_of_all(removed: bool) -> dict[str, Tensor]:
    """Run all collectives on values that are computed late, and read the results at once."""
    state = PartialState()
    found = {}
    for name, (collective, _, _) in COLLECTIVES.items():
        with delays(**LONG), synchronization_removed() if removed else nullcontext():
            result = collective(torch.arange(4.0, device=state.device) + 10 * state.process_index)
            with delays(copy_latency=0):
                found[name] = result.cpu()
        torch.gpu.synchronize()
    return found


def test_collectives_are_right_on_simulated_accelerators() -> None:
    for rank, found in enumerate(run_on_a_simulated_accelerator(results_of_all, world_size=2, removed=False)):
        for name, values in found.items():
            torch.testing.assert_close(values, COLLECTIVES[name][1 + rank], msg=name)


def test_collectives_without_waiting_show_on_simulated_accelerators() -> None:
    first, _ = run_on_a_simulated_accelerator(results_of_all, world_size=2, removed=True)
    wrong = {name for name, values in first.items() if not torch.equal(values, COLLECTIVES[name][1])}
    assert wrong == COLLECTIVES.keys()


def waits() -> tuple[bool, bool, list[float]]:
    state = PartialState()
    mine = torch.ones(2, device=state.device)
    torch.gpu.synchronize()
    with delays(**LONG):
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        at_once = work.is_completed()
        torch.gpu.current_stream().synchronize()
        return at_once, work.is_completed(), mine.tolist()


def test_waiting_for_a_collective_does_not_stop_the_host_on_simulated_accelerators() -> None:
    for at_once, after, values in run_on_a_simulated_accelerator(waits, world_size=2):
        assert (at_once, after, values) == (False, True, [2.0, 2.0])


def lose_a_tensor_under_way() -> list[float]:
    """Free a tensor while it is reduced: the work keeps it until somebody waits."""
    state = PartialState()
    whole = torch.empty(8, device=state.device)
    torch.gpu.synchronize()
    with delays(**LONG):
        work = dist.all_gather_into_tensor(whole, torch.full((4,), 5.0, device=state.device), async_op=True)
        other = [torch.zeros(4, device=state.device) for _ in range(4)]
        work.wait()
        del other
        return whole.tolist()


def test_a_collective_keeps_its_tensors_on_simulated_accelerators() -> None:
    for values in run_on_a_simulated_accelerator(lose_a_tensor_under_way, world_size=2):
        assert values == [5.0] * 8


def barrier_on_the_device() -> tuple[float, float]:
    state = PartialState()
    if state.process_index == 0:
        time.sleep(0.3)
    arrived = time.monotonic()
    dist.barrier()
    return arrived, time.monotonic()


def test_a_barrier_stops_the_host_on_simulated_accelerators() -> None:
    times = run_on_a_simulated_accelerator(barrier_on_the_device, world_size=2)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)
