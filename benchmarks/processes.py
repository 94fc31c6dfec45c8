"""Run a benchmark on processes of this machine that share a process group."""

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
    return getattr(current(), "run_on_two", run_on)(benchmark, rounds)


def run_on(benchmark: Benchmark, rounds: int, world_size: int = WORLD_SIZE) -> list[Comparison]:
    """Run the benchmark in processes that are started here, and return what rank 0 measured."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    arguments = (benchmark, rounds, world_size, store.port, results)
    mp.spawn(_rank, args=arguments, nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
    measured: list[Comparison] = results.get()
    return measured


def _rank(rank: int, benchmark: Benchmark, rounds: int, world_size: int, port: int, results: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    measured = benchmark(rounds)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()
