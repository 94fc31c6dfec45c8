"""The bench itself: it must fail when a rank fails, and never hang."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from meshwright import PartialState
from tests.ranks import RankFailure, new_pool, ranks, run_on_ranks, shared_pool
from tests.ranks.pool import MOST_THREADS
from tests.timing import limit


@ranks(2, 3)
def test_every_rank_runs_the_body_in_its_own_world(world_size: int) -> None:
    state = PartialState()
    assert state.num_processes == world_size
    total = torch.tensor(state.process_index)
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))


def who_am_i() -> tuple[int, int]:
    return PartialState().process_index, os.getpid()


def test_results_come_back_in_rank_order_and_workers_are_reused() -> None:
    pool = new_pool()  # whose workers have not run other tests, and are not due to be replaced
    first = pool.run(2, who_am_i, {})
    second = pool.run(2, who_am_i, {})
    pool.close()
    assert [rank for rank, _ in first] == [0, 1]
    assert first == second


def keep_threads() -> int:
    for _ in range(MOST_THREADS):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return os.getpid()


def test_workers_that_keep_many_threads_are_replaced() -> None:
    pids = run_on_ranks(2, keep_threads)
    assert not set(pids) & {pid for _, pid in run_on_ranks(2, who_am_i)}


def fail_on_rank_one() -> None:
    if PartialState().process_index == 1:
        raise ValueError("the reason")
    dist.barrier()  # rank 0 would wait here for ever


def test_a_failing_rank_is_the_failure_and_the_others_are_ended() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 ---\n(.|\n)*ValueError: the reason"):
        run_on_ranks(2, fail_on_rank_one)
    assert time.monotonic() - started < limit(30)
    assert run_on_ranks(2, who_am_i)[1][0] == 1, "the pool is usable again"


def hang_on_rank_zero() -> None:
    if PartialState().process_index == 0:
        time.sleep(3600)


def test_a_world_over_its_time_limit_is_ended_and_shows_where_it_was() -> None:
    with pytest.raises(RankFailure, match="not finished after 3 s") as failure:
        run_on_ranks(2, hang_on_rank_zero, time_limit=3)
    assert "in hang_on_rank_zero" in str(failure.value)


def die() -> None:
    if PartialState().process_index == 1:
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="exit code 7"):
        run_on_ranks(2, die)
    assert shared_pool().workers == []
