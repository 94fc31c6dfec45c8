"""The runtime: one per process, its process group opened or adopted, waiting and going first."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.config.enums import DistributedType
from meshwright.config.plugins.handlers import InitProcessGroupKwargs
from meshwright.errors import RuntimeConflictError
from meshwright.runtime.group.runtime import Runtime
from meshwright.runtime.process import ProcessInfo
from tests.ranks import ranks, run_on_ranks
from tests.ranks.pool import free_port


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total.item())


def drop_launcher_variables() -> tuple[int, int, str]:
    """Take torchrun's variables away; return rank, world size and the address they named."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return rank, world_size, address


def test_there_is_none_until_it_is_asked_for() -> None:
    assert Runtime.existing() is None
    runtime = Runtime.current()
    assert Runtime.existing() is Runtime.current() is Runtime.start() is runtime
    Runtime.reset()
    assert Runtime.existing() is None
    assert Runtime.current() is not runtime
    Runtime.reset()
    Runtime.reset()


def test_a_single_process_has_no_group_and_waits_for_nobody() -> None:
    runtime = Runtime.start(cpu=True)
    assert (runtime.process_index, runtime.local_process_index, runtime.num_processes) == (0, 0, 1)
    assert runtime.is_main_process
    assert runtime.is_local_main_process
    assert runtime.is_last_process
    assert runtime.distributed_type == DistributedType.NO
    assert (runtime.backend, runtime.device, runtime.owns_group) == (None, torch.device("cpu"), False)
    runtime.barrier()
    with runtime.main_process_first(False):
        pass
    assert not dist.is_initialized()


def test_the_environment_chooses_cpu_debug_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    runtime = Runtime.start()
    assert (runtime.cpu, runtime.debug, runtime.fork_launched) == (True, True, True)
    assert runtime.device == torch.device("meta")


def test_a_process_that_has_a_device_cannot_be_asked_for_another() -> None:
    Runtime.start().device = torch.device("meta")
    with pytest.raises(RuntimeConflictError, match=r"Rank 0 already runs on meta; cpu=True came later.*_reset_state"):
        Runtime.start(cpu=True)


@ranks(2, 4)
def test_a_launched_process_knows_its_place_and_reaches_the_others(world_size: int) -> None:
    runtime = Runtime.start()
    assert runtime.num_processes == world_size
    assert runtime.process_index == runtime.local_process_index == int(os.environ["RANK"])
    assert runtime.is_main_process == (runtime.process_index == 0)
    assert runtime.is_last_process == (runtime.process_index == world_size - 1)
    assert (runtime.distributed_type, runtime.backend) == (DistributedType.MULTI_CPU, "gloo")
    assert runtime.owns_group
    assert sum_of_ranks() == sum(range(world_size))


@ranks(2)
def test_each_host_has_a_main_process_of_its_own() -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as if the two ranks were on two hosts
    runtime = Runtime.start()
    assert runtime.is_local_main_process
    assert runtime.is_main_process == (runtime.process_index == 0)


@ranks(2)
def test_reset_closes_the_group_that_was_opened_and_another_can_be_opened() -> None:
    first = Runtime.start()
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    Runtime.reset()
    assert not dist.is_initialized()
    assert not first.owns_group
    os.environ["MASTER_PORT"] = str(ports[0])
    assert Runtime.start() is not first
    assert sum_of_ranks() == 1


@ranks(2)
def test_forgetting_leaves_the_group_open_and_the_next_runtime_owns_it() -> None:
    first, group = Runtime.start(), dist.group.WORLD
    Runtime.detach()
    second = Runtime.start()
    assert second is not first
    assert dist.group.WORLD is group
    assert (second.owns_group, second.backend) == (True, "gloo")
    assert sum_of_ranks() == 1
    Runtime.reset()
    assert not dist.is_initialized()


@ranks(2)
def test_a_group_that_the_user_opened_is_adopted_and_left_open() -> None:
    rank, world_size, address = drop_launcher_variables()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    runtime = Runtime.start()
    assert (runtime.process_index, runtime.num_processes, runtime.local_process_index) == (rank, 2, rank)
    assert (runtime.process.launcher, runtime.backend, runtime.owns_group) == ("user", "gloo", False)
    runtime.barrier()
    Runtime.reset()
    assert dist.is_initialized()
    assert sum_of_ranks() == 1


@ranks(2)
def test_a_group_that_the_user_opened_is_trusted_more_than_the_launcher() -> None:
    rank, world_size, address = drop_launcher_variables()
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    assert ProcessInfo.from_environment().world_size == 1, "an interactive step in which the user spawned processes"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    runtime = Runtime.start()
    assert (runtime.process_index, runtime.num_processes) == (rank, world_size)
    assert runtime.is_main_process == (rank == 0)


@ranks(2)
def test_a_group_that_the_user_opened_needs_no_rendezvous_address() -> None:
    rank, world_size, address = drop_launcher_variables()
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world_size)}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # two hosts, no MASTER_ADDR
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    runtime = Runtime.start()
    assert (runtime.process_index, runtime.local_process_index, runtime.process.launcher) == (rank, 0, "OpenMPI")


@ranks(2)
def test_the_users_init_method_is_where_the_processes_meet(tmp_path: Path) -> None:
    forget = drop_launcher_variables()
    os.environ |= {"RANK": str(forget[0]), "WORLD_SIZE": str(forget[1])}
    Runtime.start(init_handler=InitProcessGroupKwargs(init_method=f"file://{tmp_path}/store"))
    assert sum_of_ranks() == 1


@ranks(2)
def test_the_users_timeout_reaches_the_process_group() -> None:
    Runtime.start(init_handler=InitProcessGroupKwargs(timeout=timedelta(seconds=77)))
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


@ranks(2)
def test_options_for_a_group_that_is_open_already_are_warned_about() -> None:
    options = InitProcessGroupKwargs(timeout=timedelta(seconds=50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime = Runtime.start(init_handler=options)
        Runtime.start(init_handler=InitProcessGroupKwargs(timeout=timedelta(seconds=50)))
        Runtime.start()
    with pytest.warns(UserWarning, match=rf"Rank {runtime.process_index}: the process group was open.*seconds=99"):
        Runtime.start(init_handler=InitProcessGroupKwargs(timeout=timedelta(seconds=99)))
    Runtime._current = Runtime._opened = None  # as a library that opens the group before the script asks for options
    with pytest.warns(UserWarning, match="have no effect"):
        Runtime.start(init_handler=options)


def launcher_variables(launcher: str, rank: int, world_size: int, job: int) -> dict[str, str]:
    place = {"rank": rank, "size": world_size, "local_rank": rank, "local_size": world_size}
    if launcher == "Slurm":
        values = {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": world_size,
            "SLURM_STEP_TASKS_PER_NODE": world_size,
            "SLURM_NODEID": 0,
            "SLURM_LOCALID": rank,
            "SLURM_STEP_NODELIST": "localhost",
        }
    elif launcher == "OpenMPI":
        values = {f"OMPI_COMM_WORLD_{name.upper()}": value for name, value in place.items()}
        values["OMPI_MCA_ess_base_jobid"] = job
    elif launcher == "MVAPICH":
        values = {f"MV2_COMM_WORLD_{name.upper()}": value for name, value in place.items()}
        values["PBS_JOBID"] = job
    else:
        values = {"PMI_RANK": rank, "PMI_SIZE": world_size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": world_size}
        values["PBS_JOBID"] = job
    return {name: str(value) for name, value in values.items()}


def start_as(launcher: str, job: int) -> tuple[str | None, int, int, int]:
    rank, world_size, _ = drop_launcher_variables()
    os.environ |= launcher_variables(launcher, rank, world_size, job)
    runtime = Runtime.start()
    runtime.barrier()
    return runtime.process.launcher, runtime.process_index, runtime.num_processes, sum_of_ranks()


def job_with_a_free_port(launcher: str, patch: pytest.MonkeyPatch) -> int:
    """Return a job number whose port nobody on this host has open."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    for job in range(os.getpid(), os.getpid() + 100):
        for name, value in launcher_variables(launcher, 0, 2, job).items():
            patch.setenv(name, value)
        place = ProcessInfo.from_environment().rendezvous_address()
        assert place is not None
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", int(place.rpartition(":")[2])))
            except OSError:
                continue
        return job
    raise AssertionError("a hundred ports in a row are taken")


@pytest.mark.parametrize("launcher", ["Slurm", "OpenMPI", "MVAPICH", "MPICH"])
def test_processes_find_each_other_by_the_variables_of(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        job = job_with_a_free_port(launcher, patch)
    results = run_on_ranks(2, start_as, launcher=launcher, job=job)
    assert results == [(launcher, 0, 2, 1), (launcher, 1, 2, 1)]


@ranks(2)
def test_a_barrier_waits_for_the_last() -> None:
    runtime = Runtime.start()
    if runtime.process_index == 1:
        time.sleep(0.4)
    arrived = time.monotonic()
    runtime.barrier()
    left = time.monotonic()
    times: list[tuple[float, float]] = [(0.0, 0.0)] * 2
    dist.all_gather_object(times, (arrived, left))
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def entered_and_left(runtime: Runtime, goes_first: bool, block: Callable[[], None]) -> list[tuple[float, float]]:
    with runtime.main_process_first(goes_first):
        entered = time.monotonic()
        block()
        left = time.monotonic()
    times: list[tuple[float, float]] = [(0.0, 0.0)] * runtime.num_processes
    dist.all_gather_object(times, (entered, left))
    return times


@ranks(3)
def test_who_goes_first_is_through_before_the_others_enter() -> None:
    runtime = Runtime.start()
    runtime.barrier()
    times = entered_and_left(runtime, runtime.process_index == 1, lambda: time.sleep(0.2))
    assert all(entered >= times[1][1] for rank, (entered, _) in enumerate(times) if rank != 1)


def fail() -> None:
    raise KeyError("the reason")


@ranks(3)
def test_an_error_of_who_goes_first_releases_the_others() -> None:
    runtime = Runtime.start()
    if runtime.is_main_process:
        with pytest.raises(KeyError, match="the reason"), runtime.main_process_first(True):
            fail()
    else:
        with runtime.main_process_first(False):
            pass
    assert sum_of_ranks() == 3, "the ranks are still in step"


@ranks(3)
def test_an_error_of_who_goes_second_concerns_nobody_else() -> None:
    runtime = Runtime.start()
    if runtime.process_index == 2:
        with pytest.raises(KeyError, match="the reason"), runtime.main_process_first(False):
            fail()
    else:
        with runtime.main_process_first(runtime.is_main_process):
            pass
    assert sum_of_ranks() == 3


@ranks(2)
def test_an_impossible_rank_stops_the_process_before_it_waits_for_anybody() -> None:
    os.environ["RANK"] = "7"
    with pytest.raises(ValueError, match="rank 7 of 2 processes; ranks go from 0 to 1"):
        Runtime.start()
    assert Runtime.existing() is None
