"""Collectives that have not completed are read from torch's flight recorders, NCCL's among them."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from meshwright.watch import reports
from meshwright.watch.place import BACKWARD, COLLECTIVE, Place
from meshwright.watch.recorder import outstanding_collectives
from meshwright.watch.reports import SECONDS_TO_COUNT_AS_WAITING, Observer
from tests.ranks import ranks
from tests.ranks.pool import free_port

SCRIPT = """
for batch in loader:
    if accelerator.is_main_process:
        accelerator.gather(loss)
"""
BELOW_THE_SCRIPT = [
    ("all_gather_into_tensor", f"{Path(torch.__file__).parent}/distributed/distributed_c10d.py", 3913),
    ("wrapper", f"{Path(torch.__file__).parent}/distributed/c10d_logger.py", 83),
    ("gather", str(Path(reports.__file__).parents[1] / "accelerator" / "__init__.py"), 700),
]


class Recorder:
    """A stand-in for NCCL's recorder: what is outstanding, in the format of torch 2.13."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.reads = 0

    def __call__(self, includeStackTraces: bool, onlyActive: bool) -> bytes:
        self.reads += 1
        entries = [entry if includeStackTraces else {**entry, "frames": []} for entry in self.entries]
        return pickle.dumps({"version": "2.10", "entries": entries} if entries else {"version": "2.10"})

    def add(self, name: str, number: int, *, state: str = "started", script: Path | None = None) -> None:
        frames = [{"name": name, "filename": file, "line": line} for name, file, line in BELOW_THE_SCRIPT]
        frames += [{"name": "<module>", "filename": str(script), "line": 4}]
        self.entries.append(
            {
                "frames": [] if script is None else frames,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": f"nccl:{name}",
                "input_sizes": [[4, 3]],
                "input_dtypes": ["Float"],
                "state": state,
                "retired": False,
            }
        )


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """One process whose backend is said to be NCCL."""
    recorder = Recorder()
    monkeypatch.setattr(c10d, "_dump_nccl_trace", recorder, raising=False)
    monkeypatch.setattr(reports, "_backend_is_async", lambda: True)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield recorder
    dist.destroy_process_group()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def waiting_observer() -> Observer:
    observer = Observer(0, threading.current_thread())
    observer.sample()
    observer._last_progress = time.monotonic() - 2 * SECONDS_TO_COUNT_AS_WAITING
    return observer


def test_an_outstanding_collective_is_where_a_rank_waits_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder, script: Path
) -> None:
    nccl.add("_all_gather_base", 7, script=script)
    nccl.add("all_reduce", 8, state="scheduled", script=script)
    report = waiting_observer().report()
    assert report.is_waiting
    assert report.outstanding == "0:7"
    assert report.place.describe() == (
        "train.py:4, in gather() [all_gather_into_tensor(Float[4, 3])]: `accelerator.gather(loss)`"
    )
    assert report.place.guard == "`if accelerator.is_main_process:` (line 3)"
    assert report.flight_record == "nccl:all_reduce number 8(Float[4, 3]), scheduled from train.py:4"


def test_a_collective_of_autograds_thread_has_the_line_of_the_host_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder,
) -> None:
    nccl.add("all_reduce", 3)
    place = waiting_observer().report().place
    assert place.operation == "all_reduce(Float[4, 3])"
    assert place.location().startswith("test_recorder.py:")


def test_the_condition_at_a_later_line_did_not_start_a_collective_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder,
) -> None:
    nccl.add("all_reduce", 3)
    is_main_process = True
    if is_main_process:
        place = waiting_observer().report().place
    assert (place.phase, place.call, place.guard) == (BACKWARD, "", "")


def test_collectives_of_gloo_are_on_the_hosts_stack_with_a_stand_in_for_nccls_recorder(nccl: Recorder) -> None:
    nccl.add("barrier", 3)
    nccl.entries[0]["profiling_name"] = "gloo:barrier"
    assert waiting_observer().report().outstanding is None
    nccl.add("all_reduce", 5)
    assert waiting_observer().report().outstanding == "0:5"


def test_an_exception_that_is_handled_around_a_collective_is_kept_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder, script: Path
) -> None:
    nccl.add("all_reduce", 3, script=script)
    handled = Place(COLLECTIVE, file=str(script), line=4, handling="ValueError: bad sample")
    [outstanding] = outstanding_collectives()
    assert reports._place_of(outstanding, handled).handling == "ValueError: bad sample"
    assert reports._place_of(outstanding, replace(handled, line=5)).handling == ""


def test_who_stands_still_without_an_outstanding_collective_does_not_wait_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder,
) -> None:
    """A rank that compiles for minutes, or reads a value that its own device computes."""
    nccl.add("all_reduce", 3, state="completed")
    assert not waiting_observer().is_waiting()


def test_a_host_that_stands_still_moves_with_its_device_with_a_stand_in_for_nccls_recorder(nccl: Recorder) -> None:
    nccl.add("all_reduce", 3)
    end = threading.Event()
    host = threading.Thread(target=end.wait)
    host.start()
    observer = Observer(0, host)
    while observer.has_progressed():
        pass
    assert not observer.has_progressed()
    nccl.entries[0]["collective_seq_id"] = 4
    assert observer.has_progressed()
    assert not observer.has_progressed()
    end.set()
    host.join()


def test_the_recorder_of_a_device_is_not_read_while_the_host_moves_with_a_stand_in_for_nccls_recorder(
    nccl: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl.add("all_reduce", 3)
    moves = iter(range(100))
    monkeypatch.setattr(reports, "signature_of", lambda thread: next(moves))
    observer = Observer(0, threading.current_thread())
    for _ in range(5):
        observer.sample()
    assert nccl.reads == 0


@pytest.mark.parametrize(("backend", "is_async"), [("gloo", False), ("cpu:gloo,cuda:gloo", False)])
def test_gloo_is_not_asynchronous_on_any_device(backend: str, is_async: bool) -> None:
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        assert reports._backend_is_async() is is_async
    finally:
        dist.destroy_process_group()


@ranks(2)
def test_gloos_own_recorder_tells_what_is_outstanding_and_who_started_it() -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    earlier = len(outstanding_collectives())  # of groups that tests before this one left in this process
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    deadline = time.monotonic() + 60
    while len(outstanding_collectives()) > earlier:  # gloo notes the end after the result is there
        assert time.monotonic() < deadline, outstanding_collectives()
        time.sleep(0.01)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        [outstanding] = outstanding_collectives()[earlier:]
        assert (outstanding.name, outstanding.number, outstanding.ranks()) == ("all_reduce", 2, None)
        assert outstanding.operation() == "all_reduce(Float[5])"
        place = outstanding.place()
        assert place is not None
        assert place.phase == COLLECTIVE
        assert place.source == "work = dist.all_reduce(torch.ones(5), async_op=True)"
        dist.distributed_c10d._get_default_store().set("seen", "")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["seen"])
        dist.all_reduce(torch.ones(5))


def test_the_recorder_of_xpus_is_read_with_a_stand_in_for_xccls_recorder(
    nccl: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(c10d, "_dump_xccl_trace", recorder, raising=False)  # of a torch that was built with xccl
    recorder.add("all_reduce", 3)
    recorder.entries[0]["profiling_name"] = "xccl:all_reduce"
    assert waiting_observer().report().outstanding == "0:3"
