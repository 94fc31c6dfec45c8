"""Run a benchmark on two processes of this machine that share a process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .contenders import current
from .interleave import Comparison

WORLD_SIZE = 2

Benchmark = Callable[[int], list[Comparison]]
"""Measure on every rank, this many rounds; the ranks' rounds run side by side."""


def run_on_two(benchmark: Benchmark, rounds: int) -> list[Comparison]:
    """Run the benchmark in two processes, started as the contender wants it, and return what rank 0 measured."""
    return getattr(current(), "run_on_two", _spawned)(benchmark, rounds)


def _spawned(benchmark: Benchmark, rounds: int) -> list[Comparison]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    arguments = (benchmark, rounds, store.port, results)
    mp.spawn(_rank, args=arguments, nprocs=WORLD_SIZE)  # type: ignore[attr-defined, no-untyped-call]
    measured: list[Comparison] = results.get()
    return measured


def _rank(rank: int, benchmark: Benchmark, rounds: int, port: int, results: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    measured = benchmark(rounds)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()
