"""The collectives of the simulated accelerator obey the rules of NCCL; see rulebook.py."""

from __future__ import annotations

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import PartialState
from tests import warm
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.simulated_accelerator.build import compiled, extension, why_not
from tests.simulated_accelerator.faults import delays
from tests.simulated_accelerator.rulebook import shows
from tests.simulated_accelerator.rules import use_rules
from tests.sizes import at_night

QUICK = timedelta(seconds=0.1)
LONG = timedelta(seconds=120)


def error_of(call: Callable[[], object]) -> str:
    """Return the name and text of what a call raises; "" for nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Pair:
    """One rank of two, whose groups obey the rules of a vendor."""

    def __init__(self, vendor: str = "nccl", **options: Any) -> None:
        use_rules(vendor, **options)
        self.state = PartialState()
        self.rank = self.state.process_index
        self.device = self.state.device
        self.store = dist.PrefixStore("pair", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    def group(self, timeout: timedelta = LONG, *, connected: bool = True) -> Any:
        group = dist.new_group(timeout=timeout)
        if connected:
            dist.all_reduce(self.ones(), group=group)
            torch.accelerator.synchronize()
        dist.barrier()
        return group

    def ones(self) -> torch.Tensor:
        return torch.ones(2, device=self.device)

    def backend(self, group: Any) -> Any:
        return group._get_backend(self.device)

    def meet(self) -> None:
        """Wait for the other rank, without the device."""
        dist.barrier()


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: error_of(call), daemon=True)
    thread.start()
    return thread


# --- health


def in_health() -> dict[str, Any]:
    """Let rank 1 come late to a collective of rank 0, and look at it."""
    pair, found = Pair(), {}
    group = pair.group()
    value = pair.ones()
    if pair.rank == 0:
        work = dist.all_reduce(value, group=group, async_op=True)
        found["seconds to wait"] = seconds_of(work.wait)
        found["seconds to synchronize"] = seconds_of(work.synchronize)
        found["completed"] = [work.is_completed() for _ in range(3)]
        found["future is done"] = work.get_future().done()
        found["success"] = error_of(work.is_success)
        threading.Timer(0.5, lambda: pair.store.set("go", "1")).start()
        found["seconds to wait with a timeout"] = seconds_of(lambda: work.wait(timedelta(seconds=30)))
        found["completed then"] = work.is_completed()
        found["error"] = pair.backend(group).get_error().name if hasattr(pair.backend(group), "get_error") else ""
    else:
        pair.store.wait(["go"])
        dist.all_reduce(value, group=group)
    found["value"] = value.tolist()

    options = dist.AllreduceOptions()
    options.asyncOp = False
    waited: list[object] = []
    before, dist.Work.wait = dist.Work.wait, lambda work, *args: waited.append(work)  # type: ignore[method-assign, assignment]
    found["sync gives a work"] = pair.backend(group).allreduce([value], options) is not None
    dist.all_reduce(value, group=group)
    dist.Work.wait = before  # type: ignore[method-assign]
    found["waits in Python"] = len(waited)

    of_device = dist.new_group(backend="simulated")
    late = pair.ones()
    with delays(kernel_time=0.3):
        late += 1
        found["seconds of a barrier"] = seconds_of(lambda: dist.barrier(group=of_device, device_ids=[pair.rank]))
    objects: list[Any] = [None, None]
    kernels = dict(extension().counted_calls()).get("kernel", 0)
    dist.all_gather_object(objects, pair.rank)
    found["objects"] = objects
    found["kernels for objects"] = dict(extension().counted_calls()).get("kernel", 0) - kernels
    found["monitored barrier"] = error_of(lambda: dist.monitored_barrier(group=of_device))
    pair.meet()
    return found


@functools.cache
def health() -> list[dict[str, Any]]:
    return run_on_a_simulated_accelerator(in_health, world_size=2)


@shows(1, 2, 6, 8, 14)
def test_waiting_enqueues_and_waiting_with_a_timeout_blocks_on_simulated_accelerators() -> None:
    first, _ = health()
    assert max(first["seconds to wait"], first["seconds to synchronize"]) < 0.3
    assert first["completed"] == [False] * 3
    assert first["future is done"]
    assert "is deprecated" in first["success"]
    assert first["seconds to wait with a timeout"] > 0.3
    assert first["completed then"]
    assert first["value"] == [2.0, 2.0]


@shows(9, 16, 57, 58)
def test_collectives_that_are_not_asynchronous_give_no_work_on_simulated_accelerators() -> None:
    for found in health():
        assert not found["sync gives a work"]
        assert found["waits in Python"] == 0
        assert found["seconds of a barrier"] > 0.05, "it waits for the kernel before it"
        assert found["objects"] == [0, 1]
        assert found["kernels for objects"] == 0
        assert "monitored_barrier is only implemented for GLOO" in found["monitored barrier"]


# --- timeouts and aborts


def in_trouble() -> dict[str, Any]:
    """Start collectives that rank 1 never joins."""
    pair, found = Pair(), {}
    group, other, third = pair.group(), pair.group(), pair.group()
    if pair.rank == 1:
        pair.meet()
        for each in (group, other, third):
            pair.backend(each).abort()
        return found
    value = pair.ones()
    work = dist.all_reduce(value, group=group, async_op=True)
    time.sleep(0.3)
    began = time.monotonic()
    found["error"] = error_of(lambda: work.wait(QUICK))
    found["seconds"] = time.monotonic() - began
    found["completed"] = work.is_completed()
    found["again"] = error_of(work.wait)
    found["host waits"] = error_of(torch.accelerator.synchronize)
    found["value"] = value.tolist()
    found["later call"] = error_of(lambda: dist.all_reduce(pair.ones(), group=group))
    found["abort again"] = error_of(pair.backend(group).abort)
    found["seconds to destroy"] = seconds_of(lambda: dist.destroy_process_group(group))

    second, last = pair.ones(), pair.ones()
    dist.all_reduce(second, group=other)  # on the current stream
    dist.all_reduce(last, group=third)
    blocked = in_thread(lambda: torch.accelerator.synchronize(pair.device))
    blocked.join(0.5)
    found["blocked by a lost peer"] = blocked.is_alive()
    serial = in_thread(pair.backend(other).abort)
    serial.join(0.5)
    found["one abort waits for the other group"] = serial.is_alive()
    found["still blocked"] = blocked.is_alive()
    backend = pair.backend(third)
    backend._group_start()
    pair.backend(other).abort()
    backend.abort()
    found["seconds together"] = seconds_of(backend._group_end)
    blocked.join(5)
    serial.join(5)
    found["freed"] = not blocked.is_alive() and not serial.is_alive()
    host = dist.new_group([0], backend="gloo", use_local_synchronization=True)
    host.abort()
    number = torch.ones(1)
    dist.all_reduce(number, group=host)
    found["gloo after abort"] = number.item()
    pair.meet()
    return found


@functools.cache
def trouble() -> dict[str, Any]:
    found: dict[str, Any] = run_on_a_simulated_accelerator(in_trouble, world_size=2, in_new_processes=True)[0]
    return found


@shows(3, 4, 5)
def test_a_timeout_counts_from_the_start_and_aborts_on_simulated_accelerators() -> None:
    found = trouble()
    assert found["error"].startswith("DistBackendError")
    assert found["seconds"] < 0.09, "0.3 s have passed before the call"
    assert found["completed"]
    assert found["again"].startswith("DistBackendError")


@shows(10, 11)
def test_an_aborted_collective_leaves_poison_and_no_error_on_simulated_accelerators() -> None:
    found = trouble()
    assert found["blocked by a lost peer"]
    assert found["freed"]
    assert found["host waits"] == ""
    assert all(math.isnan(value) for value in found["value"])


@shows(34, 35, 106)
def test_an_aborted_group_refuses_calls_and_can_be_destroyed_on_simulated_accelerators() -> None:
    found = trouble()
    assert "aborted" in found["later call"]
    assert found["abort again"] == ""
    assert found["seconds to destroy"] < 2
    assert found["gloo after abort"] == 1.0


@shows(33)
def test_aborts_of_several_groups_belong_together_on_simulated_accelerators() -> None:
    found = trouble()
    assert found["one abort waits for the other group"]
    assert found["still blocked"]
    assert found["seconds together"] < 2


# --- ends of processes

SCRIPT = """
import os, sys, threading, time
os.environ.update(VARIABLES)
from datetime import timedelta
from tests.simulated_accelerator import register, use_rules
register()
import torch, torch.distributed as dist
from tests.simulated_accelerator.build import extension

rank = int(os.environ["RANK"])
use_rules("nccl", **OPTIONS)
torch.gpu.set_device(rank)
store = dist.FileStore(sys.argv[1], 2)

def join():
    limit = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,gpu:simulated", store=store, rank=rank, world_size=2, timeout=limit)
    global backend
    backend = dist.group.WORLD._get_backend(torch.device("gpu"))
    return torch.ones(2, device="gpu")

def open_world(timeout=60):
    value = join()
    dist.all_reduce(value)
    torch.accelerator.synchronize()
    dist.barrier()
    backend.set_timeout(timedelta(seconds=timeout))  # of later works
    return value

def lasts(call, seconds=1.0):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread.is_alive()

def say(*words):
    print(*words, flush=True)

BODY
"""


def run_pair(tmp_path: Path, body: str, *, options: str = "{}", **variables: str) -> list[tuple[int, str, float]]:
    """Run a script on two ranks in new processes; return of each how it ended, what it said, and after how long."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    compiled()
    script = tmp_path / "script.py"
    text = SCRIPT.replace("BODY", textwrap.dedent(body)).replace("OPTIONS", options)
    script.write_text(text.replace("VARIABLES", repr(variables)))
    here = str(Path(__file__).parents[2])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    begun = time.monotonic()
    processes = [
        warm.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text, time.monotonic() - begun) for process, text in zip(processes, said, strict=True)]


STUCK = """
    import signal
    value = open_world(timeout=0.5)
    if rank == 0:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # too late
        dist.all_reduce(value, async_op=True)
    said = time.monotonic()
    time.sleep(8)
    say("lives", time.monotonic() - said)
    os._exit(0)
"""


@shows(18, 19, 20, 21, 22, 23)
def test_the_watchdog_ends_the_process_by_default_on_simulated_accelerators(tmp_path: Path) -> None:
    (code, text, _), (other, _, _) = run_pair(tmp_path, STUCK, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="200")
    assert code == -signal.SIGABRT, text
    assert "Watchdog caught collective operation timeout" in text
    assert "lives" not in text
    assert other == 0


LIVES = """
    value = open_world(timeout=0.5)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        time.sleep(0.4)
        say("early", backend.get_error().name)
        time.sleep(1.0)
        say("then", backend.get_error().name)
        time.sleep(1.5)
        say("blocked", lasts(torch.accelerator.synchronize))
        backend.abort()
        began = time.monotonic()
        dist.destroy_process_group()
        say("destroyed", time.monotonic() - began)
    else:
        time.sleep(6)
    os._exit(0)
"""


@pytest.mark.parametrize(("mode", "blocked"), [("0", True), at_night("2", False)])
@shows(13, 22)
def test_in_other_modes_the_process_lives_on_simulated_accelerators(mode: str, blocked: bool, tmp_path: Path) -> None:
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": mode,
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    (code, text, _), _ = run_pair(tmp_path, LIVES, **variables)
    assert code == 0, text
    assert "early SUCCESS" in text
    assert "then TIMEOUT" in text
    assert f"blocked {blocked}" in text


@pytest.mark.nightly
@shows(24)
def test_the_monitor_ends_the_process_in_any_mode_on_simulated_accelerators(tmp_path: Path) -> None:
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1",
    }
    (code, text, _), _ = run_pair(tmp_path, STUCK, **variables)
    assert code == -signal.SIGABRT, text
    assert "HeartbeatMonitor" in text


ENDS = """
    value = open_world()
    if rank == 0:
        dist.all_reduce(value, async_op=True)
        time.sleep(0.3)
        say("destroying waits", lasts(dist.destroy_process_group))
        say("ends")
    else:
        time.sleep(2)
        os._exit(0)
"""


@shows(31, 36)
def test_destroying_may_wait_and_the_end_of_a_process_does_not_on_simulated_accelerators(tmp_path: Path) -> None:
    (code, text, seconds), _ = run_pair(tmp_path, ENDS)
    assert "destroying waits True" in text
    assert "ends" in text
    assert seconds < 100
    assert code == 0, text


TOLD = """
    import signal
    value = open_world()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    work = dist.all_reduce(value, async_op=True)
    time.sleep(1.0)
    say("completed", work.is_completed(), backend.get_error().name)
    backend.abort()
    began = time.monotonic()
    dist.destroy_process_group()
    say("seconds", round(time.monotonic() - began))
    os._exit(0)
"""


@pytest.mark.parametrize(("told", "said"), [("True", "True COMM_ERROR"), at_night("False", "False SUCCESS")])
@shows(28, 19, 104)
def test_a_lost_peer_is_told_by_the_network_or_not_at_all_on_simulated_accelerators(
    told: str, said: str, tmp_path: Path
) -> None:
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    (code, text, _), _ = run_pair(tmp_path, TOLD, options=f"dict(failures_are_told={told})", **variables)
    assert f"completed {said}" in text
    seconds = int(text.partition("seconds ")[2].split()[0])
    assert (seconds >= 2) == (told == "True"), "destroying waits for the watchdog, which sleeps"
    assert code == 0


BLOCKING = """
    value = open_world(timeout=1.5)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        began = time.monotonic()
        try:
            work.wait()
        except dist.DistBackendError as error:
            say("raised after", round(time.monotonic() - began))
        time.sleep(2)
        say("lives")
        os._exit(0)
    time.sleep(5)
    os._exit(0)
"""


@pytest.mark.nightly
@shows(15)
def test_blocking_waits_raise_and_nothing_ends_the_process_on_simulated_accelerators(tmp_path: Path) -> None:
    variables = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50"}
    (code, text, _), _ = run_pair(tmp_path, BLOCKING, **variables)
    assert "raised after 1" in text or "raised after 2" in text
    assert "lives" in text
    assert code == 0


# --- the beginning of a communicator

BEGINNING = """
    value = join()
    backend.set_timeout(timedelta(seconds=1))
    recorded = lambda: len(extension().recorded_entries(False, False))
    def first():
        try:
            dist.all_reduce(value)
        except Exception as error:
            say(type(error).__name__, error)
    if rank == WAITING:
        say("hangs", lasts(first, 2.5), "recorded", recorded())
        say("error", backend.get_error().name)
    else:
        time.sleep(4)
    os._exit(0)
"""


@shows(38, 45)
def test_nothing_knows_of_a_communicator_that_is_connecting_on_simulated_accelerators(tmp_path: Path) -> None:
    (code, text, _), _ = run_pair(tmp_path, BEGINNING.replace("WAITING", "0"))
    assert "hangs True recorded 0" in text
    assert "error SUCCESS" in text
    assert code == 0


@shows(39)
def test_the_first_rank_is_waited_for_until_the_timeout_on_simulated_accelerators(tmp_path: Path) -> None:
    _, (code, text, _) = run_pair(tmp_path, BEGINNING.replace("WAITING", "1"))
    assert "DistBackendError" in text
    assert "[0]" in text
    assert "hangs False recorded 0" in text
    assert code == 0


@shows(40)
def test_communicators_that_do_not_block_bound_the_beginning_on_simulated_accelerators(tmp_path: Path) -> None:
    variables = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "1"}
    (_, text, _), _ = run_pair(tmp_path, BEGINNING.replace("WAITING", "0"), **variables)
    assert "nonblocking" in text
    assert "hangs False" in text


@shows(64)
@pytest.mark.parametrize(("variable", "hangs"), [("", True), at_night("1", False)])
def test_direct_access_that_does_not_exist_hangs_the_first_collective_on_simulated_accelerators(
    variable: str, hangs: bool, tmp_path: Path
) -> None:
    body = BEGINNING.replace("WAITING", "rank")
    variables = {"SIMULATED_P2P_FAULT": "1"} | ({"NCCL_P2P_DISABLE": variable} if variable else {})
    for _, text, _ in run_pair(tmp_path, body, **variables):
        assert f"hangs {hangs}" in text


# --- order, memory, types


def in_disorder() -> dict[str, Any]:
    """Call different collectives, and those of two groups in different order."""
    pair, found = Pair(), {}
    group, one, other = pair.group(), pair.group(), pair.group()
    value = pair.ones()
    if pair.rank == 0:
        dist.all_reduce(value, group=group, async_op=True)
    else:
        dist.broadcast(value, src=0, group=group, async_op=True)
    blocked = in_thread(lambda: torch.accelerator.synchronize(pair.device))
    blocked.join(1.0)
    found["different calls"] = blocked.is_alive()
    pair.meet()
    pair.backend(group).abort()
    blocked.join(5)
    for each in (one, other) if pair.rank == 0 else (other, one):
        dist.all_reduce(value, group=each, async_op=True)
    blocked = in_thread(lambda: torch.accelerator.synchronize(pair.device))
    blocked.join(1.0)
    found["different order"] = blocked.is_alive()
    pair.meet()
    backend = pair.backend(one)
    backend._group_start()
    backend.abort()
    pair.backend(other).abort()
    backend._group_end()
    blocked.join(5)
    found["freed"] = not blocked.is_alive()
    return found


@shows(50, 51)
def test_disorder_hangs_without_an_error_on_simulated_accelerators() -> None:
    for found in run_on_a_simulated_accelerator(in_disorder, world_size=2, in_new_processes=True):
        assert found == {"different calls": True, "different order": True, "freed": True}


KIND = 1 << 20


def in_small_memory() -> dict[str, Any]:
    pair, found = Pair(bytes_of_first_use=KIND), {}
    group = dist.new_group()
    value = pair.ones()
    torch.accelerator.synchronize()
    module = torch.gpu
    free, allocated = module.mem_get_info()[0], module.memory_allocated()
    taken = []
    for _ in range(2):
        dist.all_reduce(value, group=group)
        taken.append(free - module.mem_get_info()[0])
    dist.broadcast(value, src=0, group=group)
    torch.accelerator.synchronize()
    taken.append(free - module.mem_get_info()[0])
    found["taken"] = taken
    found["allocated"] = module.memory_allocated() - allocated
    with module.memory_limit(module.memory_reserved() + 2 * KIND + KIND // 2):
        found["error"] = error_of(lambda: dist.reduce(value, dst=0, group=group))
    pair.meet()
    return found


@shows(46, 47, 48)
def test_each_kind_of_collective_takes_memory_at_its_first_use_on_simulated_accelerators() -> None:
    for found in run_on_a_simulated_accelerator(in_small_memory, world_size=2, in_new_processes=True):
        assert found["taken"] == [KIND, KIND, 2 * KIND]
        assert found["allocated"] == 0
        assert found["error"].startswith("DistBackendError")
        assert "Failed to CUDA calloc" in found["error"]


def with_types() -> dict[str, str]:
    pair = Pair()
    group = dist.new_group(backend="simulated")
    value, device = pair.ones(), pair.device

    def reduce(dtype: torch.dtype, op: Any = dist.ReduceOp.SUM) -> str:
        return error_of(lambda: dist.all_reduce(torch.ones(2).to(dtype).to(device), op, group=group))

    found = {
        "int16": reduce(torch.int16),
        "uint16": reduce(torch.uint16),
        "uint8": reduce(torch.uint8),
        "float64": reduce(torch.float64),
        "mean of bool": reduce(torch.bool, dist.ReduceOp.AVG),
        "bitwise": reduce(torch.int32, dist.ReduceOp.BAND),
        "any source": error_of(lambda: dist.recv(value, group=group)),
        "sizes": error_of(lambda: dist.all_gather_into_tensor(pair.ones(), value, group=group)),
        "types": error_of(
            lambda: dist.all_gather_into_tensor(torch.ones(4, device=device, dtype=torch.int32), value, group=group)
        ),
    }
    if pair.rank == 0:
        work = group._get_backend(device).send([value], 1, 5)
    else:
        work = group._get_backend(device).recv([value], 0, 6)  # another tag
    found["message"] = "" if work is not None else "no work"
    work.wait()
    torch.accelerator.synchronize()
    pair.meet()
    return found


@shows(54, 59, 60, 61)
def test_what_nccl_does_not_carry_is_refused_on_simulated_accelerators() -> None:
    for found in run_on_a_simulated_accelerator(with_types, world_size=2):
        for name in ("int16", "uint16", "mean of bool", "types"):
            assert found[name].startswith("TypeError"), (name, found[name])
        for name in ("bitwise", "sizes"):
            assert found[name].startswith("ValueError"), (name, found[name])
        assert found["any source"].startswith("NotImplementedError")
        assert [found["uint8"], found["float64"], found["message"]] == ["", "", ""]


def on_one_device() -> str:
    os.environ |= {
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "1",
    }  # the other rank waits
    Pair()
    torch.gpu.set_device(0)
    return error_of(lambda: dist.all_reduce(torch.ones(2, device="gpu:0"), group=dist.new_group(backend="simulated")))


@shows(49)
def test_two_ranks_on_one_device_are_refused_on_simulated_accelerators() -> None:
    first, second = run_on_a_simulated_accelerator(on_one_device, world_size=2, in_new_processes=True)
    assert "Duplicate GPU detected" in first + second


# --- settings


@shows(30)
def test_the_variables_have_their_defaults_on_a_simulated_accelerator() -> None:
    [found] = run_on_a_simulated_accelerator(default_settings)
    assert found == {
        "ASYNC_ERROR_HANDLING": 3,
        "BLOCKING_WAIT": 0,
        "ENABLE_MONITORING": 1,
        "HEARTBEAT_TIMEOUT_SEC": 480,
        "DUMP_ON_TIMEOUT": 1,
        "WAIT_TIMEOUT_DUMP_MILSEC": 15000,
        "ENABLE_TIMING": 0,
        "USE_COMM_NONBLOCKING": 0,
        "NONBLOCKING_TIMEOUT": 1800,
    }


def default_settings() -> dict[str, int]:
    found: dict[str, int] = extension().default_settings()
    return found


def with_timeouts() -> dict[str, Any]:
    pair, found = Pair(), {}
    of_device = dist.new_group(backend="simulated")
    dist.all_reduce(pair.ones(), group=of_device)  # connects
    if pair.rank == 0:
        options = dist.BarrierOptions()
        options.timeout = timedelta(milliseconds=50)
        options.asyncOp = True
        options.device_ids = [0]
        work = pair.backend(of_device).barrier(options)
        time.sleep(0.3)
        found["completed"] = work.is_completed()
        pair.store.set("late", "1")
        found["of a call"] = error_of(work.wait)
    else:
        pair.store.wait(["late"])
        dist.barrier(group=of_device, device_ids=[1])
    pair.meet()
    return found


@shows(17)
def test_timeouts_are_those_of_the_group_on_simulated_accelerators() -> None:
    first, _ = run_on_a_simulated_accelerator(with_timeouts, world_size=2)
    assert not first["completed"]
    assert first["of a call"] == ""


# --- the recorder


def recorded() -> list[dict[str, Any]]:
    pair = Pair()
    group = pair.group()
    value = pair.ones()
    work = None
    if pair.rank == 0:
        work = dist.all_reduce(value, group=group, async_op=True)
        time.sleep(0.2)
    entries = [
        entry
        for entry in pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())["entries"]  # type: ignore[attr-defined]
        if entry["process_group"][0] == group.group_name
    ]
    pair.meet()
    if work is None:
        dist.all_reduce(value, group=group)
    torch.accelerator.synchronize()
    pair.meet()
    return [{name: entry[name] for name in ("state", "collective_seq_id")} for entry in entries]


@shows(94, 95)
def test_the_recorder_does_not_know_what_has_started_on_simulated_accelerators() -> None:
    first, _ = run_on_a_simulated_accelerator(recorded, world_size=2, in_new_processes=True)
    assert [entry["state"] for entry in first] == ["completed", "scheduled"]
    assert [entry["collective_seq_id"] for entry in first] == [1, 2]


# --- other vendors


def of_xccl() -> dict[str, Any]:
    pair, found = Pair("xccl"), {}
    group = pair.group()
    value = pair.ones()
    if pair.rank == 0:
        work = dist.all_reduce(value, group=group, async_op=True)
        found["error"] = error_of(lambda: work.wait(QUICK))
        pair.backend(group).abort()
        blocked = in_thread(lambda: torch.accelerator.synchronize(pair.device))
        blocked.join(0.5)
        found["blocked"] = blocked.is_alive()
        pair.store.set("xccl", "1")
        blocked.join(20)
        found["later"] = error_of(lambda: dist.all_reduce(pair.ones(), group=group))
    else:
        pair.store.wait(["xccl"])
        dist.all_reduce(value, group=group)
        dist.all_reduce(pair.ones(), group=group)
    torch.accelerator.synchronize()
    found["value"] = value.tolist()
    pair.meet()
    return found


@shows(98)
def test_xccl_aborts_nothing_on_simulated_accelerators() -> None:
    first, _ = run_on_a_simulated_accelerator(of_xccl, world_size=2)
    assert first["error"].startswith("DistBackendError")
    assert (first["blocked"], first["later"], first["value"]) == (True, "", [2.0, 2.0])


def of_hccl() -> dict[str, Any]:
    pair, found = Pair("hccl"), {}
    group = pair.group()
    value = pair.ones()
    if pair.rank == 0:
        work = dist.all_reduce(value, group=group, async_op=True)
        found["seconds"] = seconds_of(lambda: work.wait(timedelta(seconds=2)))
        found["completed"] = work.is_completed()
        pair.store.set("hccl", "1")
    else:
        pair.store.wait(["hccl"])
        dist.all_reduce(value, group=group)
    torch.accelerator.synchronize()
    found["float64"] = error_of(lambda: dist.all_reduce(pair.ones().double(), group=group))
    found["mean"] = error_of(lambda: dist.all_reduce(pair.ones(), dist.ReduceOp.AVG, group=group))
    pair.meet()
    return found


@shows(100, 101)
def test_hccl_ignores_timeouts_and_has_no_float64_on_simulated_accelerators() -> None:
    first, _ = run_on_a_simulated_accelerator(of_hccl, world_size=2)
    assert first["seconds"] < 1
    assert not first["completed"]
    assert first["float64"].startswith("TypeError")
    assert first["mean"].startswith("ValueError")
