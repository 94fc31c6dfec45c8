"""A rank's side: wait for jobs, run each in a fresh world, tell how it went."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass
class Job:
    """A function by name, its arguments, and who the worker is for the time of the job."""

    module: str
    qualname: str
    kwargs: dict[str, Any]
    environment: dict[str, str]


@dataclass
class Outcome:
    """What a rank returned, or the traceback it ended with."""

    value: Any = None
    error: str | None = None


def run(job: Job) -> Outcome:
    """Run one job as a member of its world and leave no trace of it."""
    from torch.nn import functional

    before, linear = dict(os.environ), functional.linear
    os.environ.update(job.environment)
    try:
        function: Any = importlib.import_module(job.module)
        for part in job.qualname.split("."):
            function = getattr(function, part)
        outcome = Outcome(value=getattr(function, "rank_body", function)(**job.kwargs))
        leave_together()
        return outcome
    except BaseException:
        return Outcome(error=traceback.format_exc())
    finally:
        groups = open_groups()  # held, because DDP's reducer would free its group with Python's lock, and may hang
        forget_everything()
        # ZeRO-3 replaces it for good. On one of two ranks, gradients arrive in another order than on the other, and
        # ZeRO-1 and ZeRO-2 sum those of different parameters.
        functional.linear = linear
        collect_garbage()
        del groups
        os.environ.clear()
        os.environ.update(before)


def collect_garbage() -> None:
    """Free what the job has left, and leave the rest out of later collections.

    Groups that cycles of a sharded model hold keep threads and connections; what holds them can be garbage itself, and
    is found by the next collection.
    """
    for _ in range(4):
        if not gc.collect():
            break
    gc.freeze()


def leave_together() -> None:
    """Wait for the others: a rank that closes its connections early would break those that are still connecting."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def open_groups() -> list[Any]:
    """Return the process groups of this rank."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)


def forget_everything() -> None:
    """Close process groups and drop the library's state, as if the process were new."""
    import torch.distributed as dist

    from meshwright import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Serve jobs until the parent hangs up."""
    connection = Connection(int(sys.argv[1]))
    faulthandler.enable()  # a segmentation fault says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome = run(job)
        try:  # plain pickle: torch's own would hand tensors over as file descriptors of this process
            message = pickle.dumps(outcome)
        except Exception as error:
            message = pickle.dumps(Outcome(error=f"the rank's result cannot be sent back: {error!r}"))
        connection.send_bytes(message)


if __name__ == "__main__":
    from tests.ranks import worker

    worker.main()  # the classes that travel belong to the importable module, not to __main__
