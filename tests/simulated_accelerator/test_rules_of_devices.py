"""Streams, captures, threads and memory of the simulated accelerator obey the rules of CUDA; see rulebook.py."""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.simulated_accelerator import (
    on_a_simulated_accelerator,
    run_on_a_simulated_accelerator,
    test_collectives,
    test_instrument,
    test_rules_of_collectives,
)
from tests.simulated_accelerator.build import extension
from tests.simulated_accelerator.counting import counted
from tests.simulated_accelerator.faults import delays
from tests.simulated_accelerator.rulebook import RULES, shows

MEBIBYTE = 1 << 20


def in_another_thread(call: Callable[[], object]) -> str:
    """Return what a call raises in another thread; "" for nothing."""
    raised = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return "".join(raised)


def recorded_event() -> torch.Event:
    event = torch.Event("gpu")
    event.record()
    return event


def capture(mode: str, call: Callable[[], object]) -> tuple[str, bool]:
    """Call something in another thread while a graph is captured; return its error, and whether the capture holds."""
    error = ""
    try:
        with torch.gpu.graph(mode):
            error = in_another_thread(call)
    except RuntimeError:
        return error, False
    return error, True


@shows(78, 79, 76)
@on_a_simulated_accelerator
def test_calls_of_other_threads_break_a_global_capture_on_a_simulated_accelerator() -> None:
    event = recorded_event()
    calls: list[Callable[[], object]] = [
        event.query,
        event.synchronize,
        torch.accelerator.synchronize,
        lambda: torch.empty(3 * MEBIBYTE, device="gpu"),
        lambda: torch.empty(5 * MEBIBYTE, pin_memory=True),
    ]
    for call in calls:
        error, holds = capture("global", call)
        assert "cudaErrorStreamCaptureUnsupported" in error
        assert not holds
        assert capture("thread_local", call) == ("", True)
        assert capture("relaxed", call) == ("", True)


@shows(80)
@on_a_simulated_accelerator
def test_a_captured_event_is_never_asked_on_a_simulated_accelerator() -> None:
    errors = []

    def ask_during_capture(mode: str) -> None:
        with torch.gpu.graph(mode):
            event = recorded_event()
            errors.append(in_another_thread(event.query))

    for mode in ("thread_local", "relaxed"):
        with pytest.raises(RuntimeError, match="Invalidated"):
            ask_during_capture(mode)
        assert "cudaErrorCapturedEvent" in errors[-1]


@shows(81)
@on_a_simulated_accelerator
def test_a_relaxed_thread_harms_no_capture_on_a_simulated_accelerator() -> None:
    event = recorded_event()

    def query() -> None:
        extension().set_thread_is_relaxed(True)
        event.query()

    assert capture("global", query) == ("", True)


@shows(82)
@on_a_simulated_accelerator
def test_queries_break_every_capture_on_rocm_on_a_simulated_accelerator() -> None:
    event = recorded_event()
    extension().set_queries_break_local_captures(True)
    assert not capture("thread_local", event.query)[1]
    assert capture("thread_local", event.synchronize)[1]


@shows(83)
@on_a_simulated_accelerator
def test_a_loader_that_pins_memory_breaks_a_capture_on_a_simulated_accelerator() -> None:
    rows = torch.zeros(4, MEBIBYTE, dtype=torch.uint8)
    error, holds = capture("global", lambda: list(DataLoader(rows, batch_size=4, pin_memory=True)))  # type: ignore[arg-type]
    assert "cudaHostAlloc" in error
    assert not holds


@shows(88)
@on_a_simulated_accelerator
def test_a_capture_begins_with_empty_caches_and_ends_in_its_thread_on_a_simulated_accelerator() -> None:
    torch.zeros(MEBIBYTE, pin_memory=True)
    before = extension().pinned_statistics()[1]
    with counted() as counts, torch.gpu.graph():
        assert extension().pinned_statistics()[1] < before
    assert counts["sync"] >= 1
    extension().begin_capture("global")
    assert "WrongThread" in in_another_thread(extension().end_capture)
    extension().end_capture()


@shows(89)
@on_a_simulated_accelerator
def test_a_query_holds_pythons_lock_on_a_simulated_accelerator() -> None:
    value = torch.ones(2, device="gpu")

    def longest_pause(call: Callable[[], object]) -> float:
        pauses, stop = [0.0], threading.Event()

        def tick() -> None:
            before = time.monotonic()
            while not stop.is_set():
                now = time.monotonic()
                pauses.append(now - before)
                before = now
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        time.sleep(0.05)
        call()
        stop.set()
        thread.join()
        return max(pauses)

    event = recorded_event()
    extension().set_query_time(1.0)
    assert longest_pause(event.query) > 0.8
    extension().set_query_time(0.0)
    with delays(kernel_time=1.0):
        value += 1
        event.record()
        assert longest_pause(event.synchronize) < 0.8


@shows(90)
@on_a_simulated_accelerator
def test_time_between_events_needs_both_on_a_simulated_accelerator() -> None:
    first, last = (torch.Event("gpu", enable_timing=True) for _ in range(2))
    value = torch.ones(2, device="gpu")
    first.record()
    with delays(kernel_time=0.2):
        value += 1
        last.record()
    with pytest.raises(RuntimeError, match="completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0


@shows(91)
@on_a_simulated_accelerator
def test_a_thread_begins_on_the_first_device_on_a_simulated_accelerator() -> None:
    torch.gpu.set_device(1)
    found: list[object] = []
    stream = torch.Stream("gpu:0")
    with stream:
        in_another_thread(
            lambda: found.extend([torch.gpu.current_device(), torch.accelerator.current_stream().stream_id])
        )
    assert found == [0, 0]


def use_in_a_child() -> str:
    torch.ones(2, device="gpu")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.ones(2, device="gpu")
            said = ""
        except RuntimeError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    return os.read(reader, 1000).decode()


@shows(92)
def test_a_forked_child_cannot_use_the_device_on_a_simulated_accelerator() -> None:
    assert "in a forked subprocess" in run_on_a_simulated_accelerator(use_in_a_child, in_new_processes=True)[0]


# --- streams and memory


@shows(67)
@on_a_simulated_accelerator
def test_the_pool_of_streams_wraps_on_a_simulated_accelerator() -> None:
    numbers = [torch.Stream("gpu").stream_id for _ in range(33)]
    assert len(set(numbers)) == 32
    assert numbers[0] == numbers[-1]


@shows(70)
@on_a_simulated_accelerator
def test_memory_is_reused_by_its_own_stream_on_a_simulated_accelerator() -> None:
    def place() -> int:
        return torch.empty(MEBIBYTE, device="gpu").data_ptr()

    stream = torch.Stream("gpu")
    first = place()
    assert place() == first
    with stream:
        other = place()
    assert other != first
    assert place() == first


@shows(72, 73)
@on_a_simulated_accelerator
def test_pinned_memory_is_rounded_and_kept_on_a_simulated_accelerator() -> None:
    set_settings: Any = torch._C._accelerator_setAllocatorSettings  # type: ignore[attr-defined]
    everything = "pinned_max_round_threshold_mb:1000000,pinned_max_cached_size_mb:1000000"
    set_settings(everything)
    torch.accelerator.empty_host_cache()

    def taken() -> tuple[int, int]:
        asked, from_system, *_ = extension().pinned_statistics()
        return asked, from_system

    def pin() -> torch.Tensor:
        return torch.empty(5 * MEBIBYTE, dtype=torch.uint8, pin_memory=True)

    asked, before = taken()
    pinned = pin()
    assert taken() == (asked + 5 * MEBIBYTE, before + 8 * MEBIBYTE)
    del pinned
    assert taken() == (asked, before + 8 * MEBIBYTE)
    pinned = pin()
    assert taken()[1] == before + 8 * MEBIBYTE, "the same memory"
    del pinned
    torch.accelerator.empty_host_cache()
    assert taken() == (asked, before)
    for settings, size, kept in (
        ("pinned_max_round_threshold_mb:1", 5, 5),
        ("pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:4", 5, 0),
    ):
        set_settings(settings)
        try:
            pinned = pin()
            assert taken()[1] == before + size * MEBIBYTE
            del pinned
            assert taken()[1] == before + kept * MEBIBYTE
        finally:
            set_settings(everything)
        torch.accelerator.empty_host_cache()


@shows(74)
@on_a_simulated_accelerator
def test_pinned_memory_of_a_pending_copy_is_not_used_again_on_a_simulated_accelerator() -> None:
    target = torch.zeros(1024, device="gpu")
    torch.accelerator.synchronize()
    source = torch.ones(1024).pin_memory()
    place = source.data_ptr()
    with delays(copy_latency=0.3):
        target.copy_(source, non_blocking=True)
    del source
    assert torch.empty(1024, pin_memory=True).data_ptr() != place
    assert target.tolist() == [1.0] * 1024


@shows(77)
@on_a_simulated_accelerator
def test_what_waits_for_the_device_is_counted_on_a_simulated_accelerator() -> None:
    value, host = torch.ones(4, device="gpu"), torch.ones(4)
    mask, pinned = value > 0, host.pin_memory()
    waiting: list[Callable[[], object]] = [
        value.sum().item,
        lambda: value.nonzero(),
        lambda: value[mask],
        lambda: value.copy_(host),
        lambda: host.copy_(value),
        lambda: torch.tensor(1.0, device="gpu"),
        torch.accelerator.synchronize,
    ]
    for call in waiting:
        with counted() as counts:
            call()
        assert counts.waits > 0, call
    going_on: list[Callable[[], object]] = [
        lambda: value + 1,
        lambda: value.copy_(pinned, non_blocking=True),
        lambda: pinned.copy_(value, non_blocking=True),
        lambda: value.copy_(host, non_blocking=True),
        lambda: torch.full((), 1.0, device="gpu"),
    ]
    for call in going_on:
        with counted() as counts:
            call()
        assert counts.waits == 0, call


shows(66, 68)(test_collectives.test_a_collective_keeps_its_tensors_on_simulated_accelerators)
shows(66)(test_collectives.test_collectives_without_waiting_show_on_simulated_accelerators)


# --- the list


def test_every_rule_is_shown_and_listed() -> None:
    shown: set[int] = set()
    for module in (test_collectives, test_instrument, test_rules_of_collectives):
        for _, function in inspect.getmembers(module, inspect.isfunction):
            shown.update(getattr(function, "rules", ()))
    for function in globals().values():
        shown.update(getattr(function, "rules", ()))
    assert shown == RULES.keys()
    assert len(RULES) >= 60
    page = (Path(__file__).parents[2] / "docs/testing.md").read_text()
    for number, (text, source) in RULES.items():
        assert re.search(rf"^\| {number} \| {re.escape(text)} \| {re.escape(source)} \|$", page, re.MULTILINE), number
