"""`PartialState` and `AcceleratorState`: views of the one runtime, guards, shares and order among processes."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright import AcceleratorState, DistributedType, GradientState, PartialState
from meshwright.state import do_nothing, is_initialized
from tests.ranks import ranks, run_on_ranks

PUBLISHED_ATTRIBUTES = {
    "_cpu",
    "backend",
    "device",
    "debug",
    "distributed_type",
    "num_processes",
    "process_index",
    "local_process_index",
    "fork_launched",
}


# --- views --------------------------------------------------------------------------------------------------------


def test_every_state_is_a_view_of_the_same_process() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first is not second
    assert first.initialized
    assert second.initialized
    first.device = torch.device("meta")
    assert second.device == AcceleratorState().device == torch.device("meta")
    first.distributed_type = DistributedType.FSDP  # as libraries do
    assert AcceleratorState().distributed_type == second.distributed_type == DistributedType.FSDP


def test_what_a_single_process_says_of_itself() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert not state.use_distributed
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert (state.distributed_type, state.backend) == (DistributedType.NO, None)
    assert (state.device, state.default_device) == (torch.device("cpu"), torch.device("cpu"))
    assert (state.debug, state.fork_launched, state._cpu) == (False, False, True)
    state.wait_for_everyone()
    state.set_device()
    state.destroy_process_group()
    assert repr(state) == (
        "Distributed environment: DistributedType.NO\n"
        "Num processes: 1\nProcess index: 0\nLocal process index: 0\nDevice: cpu\n"
    )


@ranks(2)
def test_what_one_of_several_processes_says_of_itself() -> None:
    state, rank = PartialState(), int(os.environ["RANK"])
    assert state.use_distributed
    assert (state.num_processes, state.process_index, state.local_process_index) == (2, rank, rank)
    assert repr(state).splitlines()[:3] == [
        "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo",
        "Num processes: 2",
        f"Process index: {rank}",
    ]
    state.destroy_process_group()
    assert not dist.is_initialized()


@ranks(2)
def test_a_group_of_the_users_own_can_be_closed_alone() -> None:
    state = PartialState()
    pair = dist.new_group([0, 1])
    state.destroy_process_group(pair)
    state.wait_for_everyone()


def test_the_shared_state_is_empty_until_there_is_a_state() -> None:
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    state = PartialState(cpu=True)
    assert set(PartialState._shared_state) == PUBLISHED_ATTRIBUTES
    assert PartialState._shared_state == {name: getattr(state, name) for name in PUBLISHED_ATTRIBUTES}
    assert state._shared_state == PartialState._shared_state
    assert AcceleratorState._shared_state == {}, "there is no Accelerator yet"


def test_reset_forgets_the_process() -> None:
    state = PartialState(cpu=True)
    PartialState._reset_state()
    assert not state.initialized
    assert PartialState._shared_state == {}
    assert PartialState().initialized
    assert not state.initialized, "an old view does not come back to life"


def test_an_accelerator_state_also_knows_what_was_asked_for() -> None:
    assert not is_initialized()
    PartialState(cpu=True)
    assert not is_initialized()
    state = AcceleratorState(mixed_precision="bf16", fsdp_plugin="a plugin")
    assert is_initialized()
    assert state.initialized
    assert isinstance(state, PartialState)
    assert state.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert (state.fsdp_plugin, state.deepspeed_plugin, state.parallelism_config) == ("a plugin", None, None)
    assert (state.device_mesh, state.is_fsdp2) == (None, False)
    shared = AcceleratorState._shared_state
    assert set(shared) >= PUBLISHED_ATTRIBUTES
    assert (shared["_mixed_precision"], shared["fsdp_plugin"]) == ("bf16", "a plugin")
    assert repr(state).endswith("Mixed precision type: bf16\n")


def test_what_libraries_write_on_an_accelerator_state_every_view_sees() -> None:
    AcceleratorState(cpu=True).is_fsdp2 = True
    AcceleratorState().device_mesh = "a mesh"
    state = AcceleratorState()
    assert (state.is_fsdp2, state.device_mesh) == (True, "a mesh")


def test_what_is_set_on_one_state_of_the_process_all_of_them_have() -> None:
    state = PartialState(cpu=True)
    state.debug = True
    assert PartialState().debug
    assert AcceleratorState(cpu=True).debug
    AcceleratorState().debug = False
    assert not state.debug
    AcceleratorState().device = torch.device("meta")
    assert state.device.type == "meta"


def test_a_second_request_opens_a_record_of_its_own() -> None:
    first = AcceleratorState(mixed_precision="bf16")
    second = AcceleratorState(mixed_precision="fp16")
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "fp16")
    assert AcceleratorState().mixed_precision == "fp16", "without arguments the newest is meant"


def test_reset_of_the_accelerator_state_keeps_the_process_unless_asked() -> None:
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()
    assert not state.initialized
    assert PartialState._shared_state != {}
    assert AcceleratorState().mixed_precision == "no"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    for name in ("num_processes", "mixed_precision"):
        with pytest.raises(AttributeError, match=rf"`{name}`\. .*_reset_state\(\)` was called"):
            getattr(state, name)


def test_the_gradient_state_is_at_its_published_path() -> None:
    assert GradientState().sync_gradients
    assert do_nothing(1, two=2) is None


def test_unknown_options_are_refused_and_known_ones_taken() -> None:
    with pytest.raises(TypeError, match="does not know pg_timeout, retries"):
        PartialState(cpu=True, pg_timeout=3, retries=2)
    assert PartialState._shared_state == {}
    PartialState(cpu=True, timeout=timedelta(seconds=9), backend="gloo", _use_sagemaker_dp=False)


@ranks(2)
def test_a_timeout_in_the_constructor_reaches_the_process_group() -> None:
    PartialState(timeout=timedelta(seconds=77))
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


# --- guards -------------------------------------------------------------------------------------------------------


def who_runs() -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}  # two hosts of two
    state = PartialState()

    @state.on_main_process
    def on_main(value: int, *, more: int) -> int:
        """Add."""
        return value + more

    assert (on_main.__name__, on_main.__doc__) == ("on_main", "Add.")
    guarded = {
        "main": lambda: on_main(1, more=2),
        "main, called": state.on_main_process()(lambda: "ran"),
        "local main": state.on_local_main_process(lambda: "ran"),
        "last": state.on_last_process(lambda: "ran"),
        "rank 1": state.on_process(lambda: "ran", process_index=1),
        "rank 2": state.on_process(process_index=2)(lambda: "ran"),
        "local rank 1": state.on_local_process(lambda: "ran", local_process_index=1),
        "local rank 0": state.on_local_process(local_process_index=0)(lambda: "ran"),
    }
    return {name: function() for name, function in guarded.items()}


def test_guarded_functions_run_where_they_are_meant_to() -> None:
    results = run_on_ranks(4, who_runs)
    ran = {name: [rank for rank, result in enumerate(results) if result[name] is not None] for name in results[0]}
    assert ran == {
        "main": [0],
        "main, called": [0],
        "local main": [0, 2],
        "last": [3],
        "rank 1": [1],
        "rank 2": [2],
        "local rank 1": [1, 3],
        "local rank 0": [0, 2],
    }
    assert results[0]["main"] == 3


def test_a_single_process_runs_everything_that_is_guarded() -> None:
    state = PartialState(cpu=True)
    assert state.on_process(lambda: "ran", process_index=3)() == "ran"
    assert state.on_local_process(local_process_index=3)(lambda: "ran")() == "ran"
    assert state.on_last_process(lambda: "ran")() == "ran"


def test_a_guard_must_say_which_process() -> None:
    state = PartialState(cpu=True)
    with pytest.raises(
        ValueError, match=r"on_process\(\) needs to know which process: @state.on_process\(process_index"
    ):
        state.on_process(do_nothing)
    with pytest.raises(ValueError, match=r"local_process_index=1"):
        state.on_local_process()


def print_hello(capture: str) -> None:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    state = PartialState()
    with open(f"{capture}-{state.process_index}", "w") as file:
        state.print("hello", 3, sep="-", end="!", file=file)


def test_print_speaks_once_per_host(tmp_path: Any) -> None:
    run_on_ranks(4, print_hello, capture=str(tmp_path / "said"))
    assert [(tmp_path / f"said-{rank}").read_text() for rank in range(4)] == ["hello-3!", "", "hello-3!", ""]


# --- order --------------------------------------------------------------------------------------------------------


def times_in(context: AbstractContextManager[None]) -> list[tuple[float, float]]:
    with context:
        entered = time.monotonic()
        time.sleep(0.15)
        left = time.monotonic()
    times: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(times, (entered, left))
    return times


@ranks(4)
def test_main_processes_go_first_and_the_others_together() -> None:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    state = PartialState()
    for context, first in ((state.main_process_first, [0]), (state.local_main_process_first, [0, 2])):
        state.wait_for_everyone()
        times = times_in(context())
        done = max(times[rank][1] for rank in first)
        later = [times[rank] for rank in range(4) if rank not in first]
        assert all(entered >= done for entered, _ in later)
        assert max(entered for entered, _ in later) < min(left for _, left in later) + 0.15


def fail() -> None:
    raise KeyError("the download failed")


def fail_ahead_of_the_others() -> None:
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            fail()


@ranks(3)
def test_an_error_of_the_main_process_does_not_hang_the_others() -> None:
    state = PartialState()
    if state.is_main_process:
        with pytest.raises(KeyError, match="the download failed"):
            fail_ahead_of_the_others()
    else:
        fail_ahead_of_the_others()
    state.wait_for_everyone()


# --- shares -------------------------------------------------------------------------------------------------------


def shares(inputs: Any, apply_padding: bool) -> Any:
    with PartialState().split_between_processes(inputs, apply_padding=apply_padding) as share:
        return share


def split(cases: list[Any], apply_padding: bool) -> list[Any]:
    return [shares(case, apply_padding) for case in cases]


# Observed of accelerate 1.15: what each of four processes receives of a list of this length.
SHARES = {
    0: [[], [], [], []],
    1: [[0], [], [], []],
    2: [[0], [1], [], []],
    3: [[0], [1], [2], []],
    4: [[0], [1], [2], [3]],
    5: [[0, 1], [2], [3], [4]],
    7: [[0, 1], [2, 3], [4, 5], [6]],
    10: [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]],
}
PADDED_SHARES = {
    0: [[], [], [], []],
    1: [[0], [0], [0], [0]],
    2: [[0], [1], [1], [1]],
    3: [[0], [1], [2], [2]],
    4: [[0], [1], [2], [3]],
    5: [[0, 1], [2, 4], [3, 4], [4, 4]],
    7: [[0, 1], [2, 3], [4, 5], [6, 6]],
    10: [[0, 1, 2], [3, 4, 5], [6, 7, 9], [8, 9, 9]],
}


@pytest.mark.parametrize(("apply_padding", "expected"), [(False, SHARES), (True, PADDED_SHARES)])
def test_inputs_are_shared_out_as_published(apply_padding: bool, expected: dict[int, list[list[int]]]) -> None:
    lists = [list(range(length)) for length in expected]
    results = run_on_ranks(4, split, cases=lists, apply_padding=apply_padding)
    assert {length: [result[i] for result in results] for i, length in enumerate(expected)} == expected

    others: list[Any] = [kind(values) for values in lists for kind in (tuple, torch.tensor, np.array)]
    for rank, result in enumerate(run_on_ranks(4, split, cases=others, apply_padding=apply_padding)):
        for case, share, length in zip(others, result, [n for n in expected for _ in range(3)], strict=True):
            assert type(share) is type(case)
            assert [int(value) for value in share] == expected[length][rank]


@ranks(2)
def test_rows_of_a_tensor_stay_whole() -> None:
    rows = torch.arange(6).view(3, 2)
    rank = PartialState().process_index
    assert shares(rows, False).tolist() == [[[0, 1], [2, 3]], [[4, 5]]][rank]
    assert shares(rows, True).tolist() == [[[0, 1], [2, 3]], [[4, 5], [4, 5]]][rank]


@ranks(2)
def test_the_values_of_a_dict_are_shared_alike() -> None:
    rank = PartialState().process_index
    inputs = {"prompts": ["a", "b", "c"], "ids": torch.arange(3), "more": {"seeds": (7, 8, 9)}}
    with pytest.raises(ValueError, match=r"needs values of one length in a dict, and got .*'more': 1"):
        shares(inputs, False)
    inputs = {"prompts": ["a", "b", "c"], "ids": torch.arange(3)}
    share = shares(inputs, True)
    assert share["prompts"] == [["a", "b"], ["c", "c"]][rank]
    assert share["ids"].tolist() == [[0, 1], [2, 2]][rank]
    assert shares({}, False) == {}


@ranks(2)
def test_a_string_is_one_input_and_not_a_list_of_letters() -> None:
    assert shares("a prompt", True) == "a prompt"


class TwoColumns:
    """A data set with the `select` of Hugging Face's."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: list[int]) -> TwoColumns:
        return TwoColumns([self.rows[index] for index in indices])


@ranks(2)
def test_a_data_set_selects_its_share() -> None:
    rank = PartialState().process_index
    assert shares(TwoColumns([5, 6, 7]), False).rows == [[5, 6], [7]][rank]
    assert shares(TwoColumns([5, 6, 7]), True).rows == [[5, 6], [7, 7]][rank]


def test_a_single_process_gets_everything() -> None:
    inputs = [1, 2, 3]
    assert shares(inputs, True) is inputs
