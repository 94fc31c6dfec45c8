"""Collectives of the simulated accelerator that have not completed are recorded, in the format of NCCL's recorder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright import PartialState
from meshwright.watch.recorder import Outstanding, outstanding_collectives
from tests.simulated_accelerator import run_on_a_simulated_accelerator


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def describe(outstanding: Outstanding) -> dict[str, Any]:
    place = outstanding.place()
    return {
        "name": outstanding.name,
        "number": outstanding.number,
        "ranks": outstanding.ranks(),
        "operation": outstanding.operation(),
        "file": None if place is None else Path(place.file).name,
        "source": None if place is None else place.source,
    }


def reduce_with_a_late_peer() -> dict[str, Any]:
    """Let rank 0 start a collective, and rank 1 only when rank 0 has seen what is outstanding."""
    state = PartialState()
    mine = torch.ones(3, device=state.device)
    dist.all_reduce(mine)
    torch.gpu.synchronize()
    assert outstanding_collectives() == []
    found = {}
    if state.process_index == 0:
        dist.all_reduce(mine)
        [outstanding] = outstanding_collectives()
        found = describe(outstanding)
        [without_frames] = outstanding_collectives(with_frames=False)
        assert without_frames.place() is None
        store().set("seen", "")
    else:
        store().wait(["seen"])
        dist.all_reduce(mine)
    torch.gpu.synchronize()
    assert outstanding_collectives() == []
    return found


def test_a_collective_is_outstanding_until_its_peer_has_come_on_simulated_accelerators() -> None:
    found, _ = run_on_a_simulated_accelerator(reduce_with_a_late_peer, world_size=2)
    assert found == {
        "name": "all_reduce",
        "number": 2,
        "ranks": None,
        "operation": "all_reduce(Float[3])",
        "file": "test_recorder.py",
        "source": "dist.all_reduce(mine)",
    }


def gather_in_a_subgroup() -> dict[str, Any]:
    state = PartialState()
    group = dist.new_group([0, 2])
    mine, whole = torch.ones(2, device=state.device), torch.empty(4, device=state.device)
    found = {}
    if state.process_index == 2:
        store().wait(["seen"])
    if state.process_index != 1:
        dist.all_gather_into_tensor(whole, mine, group=group)
    if state.process_index == 0:
        [outstanding] = outstanding_collectives()
        found = describe(outstanding)
        store().set("seen", "")
    torch.gpu.synchronize()
    assert outstanding_collectives() == []
    return found


def test_a_collective_of_a_subgroup_has_its_ranks_and_a_number_of_its_own_on_simulated_accelerators() -> None:
    found, *_ = run_on_a_simulated_accelerator(gather_in_a_subgroup, world_size=3)
    assert found["name"] == "all_gather_into_tensor"
    assert found["ranks"] == [0, 2]
    assert found["number"] == 1
    assert found["source"] == "dist.all_gather_into_tensor(whole, mine, group=group)"


def train_with_a_late_peer() -> dict[str, Any]:
    state = PartialState()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).to(state.device))
    torch.gpu.synchronize()
    found = {}
    if state.process_index == 1:
        store().wait(["seen"])
    model(torch.ones(1, 4, device=state.device)).sum().backward()
    if state.process_index == 0:
        [outstanding] = outstanding_collectives()
        found = describe(outstanding)
        store().set("seen", "")
    torch.gpu.synchronize()
    return found


def test_a_collective_of_autograds_thread_has_no_line_on_simulated_accelerators() -> None:
    found, _ = run_on_a_simulated_accelerator(train_with_a_late_peer, world_size=2)
    assert found["operation"] == "all_reduce(Float[10])"
    assert found["source"] is None


def send_to_a_late_peer() -> list[Any]:
    state = PartialState()
    mine = torch.ones(2, device=state.device)
    if state.process_index == 0:
        work = dist.irecv(mine, 1)
        entries = [each.entry for each in outstanding_collectives()]
        store().set("seen", "")
        work.wait()
    else:
        store().wait(["seen"])
        dist.send(mine, 0)
        entries = []
    torch.gpu.synchronize()
    return [(entry["profiling_name"], entry["is_p2p"], entry["p2p_seq_id"]) for entry in entries]


def test_messages_are_recorded_with_their_ranks_on_simulated_accelerators() -> None:
    found, _ = run_on_a_simulated_accelerator(send_to_a_late_peer, world_size=2)
    assert found == [("simulated:recv 0<-1", True, 1)]


def abort_alone() -> tuple[int, int]:
    state = PartialState()
    dist.all_reduce(torch.ones(1, device=state.device))
    torch.gpu.synchronize()
    if state.process_index == 1:
        store().wait(["aborted"])
        return 0, 0
    dist.all_reduce(torch.ones(1, device=state.device))
    before = len(outstanding_collectives())
    dist.distributed_c10d._get_default_group().abort()
    torch.gpu.synchronize()
    after = len(outstanding_collectives())
    store().set("aborted", "")
    return before, after


def test_an_aborted_group_lets_its_streams_go_on_on_simulated_accelerators() -> None:
    found = run_on_a_simulated_accelerator(abort_alone, world_size=2, in_new_processes=True)
    assert found == [(1, 0), (0, 0)]


def dumps_of_both() -> tuple[dict[str, Any], dict[str, Any]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # lets gloo record, too
    state = PartialState()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, device=state.device))
    c10d: Any = torch._C._distributed_c10d
    ours, torchs = (
        pickle.loads(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
        for dump in (c10d._dump_nccl_trace, c10d._dump_fr_trace)
    )
    torch.gpu.synchronize()
    return ours["entries"][-1], torchs["entries"][-1]


def test_the_format_is_that_of_torchs_recorders_on_simulated_accelerators() -> None:
    found = run_on_a_simulated_accelerator(dumps_of_both, world_size=2, in_new_processes=True)
    for ours, torchs in found:
        assert ours.keys() <= torchs.keys()
        assert {key: type(value) for key, value in ours.items()} == {key: type(torchs[key]) for key in ours}
        assert (ours["input_sizes"], ours["input_dtypes"]) == (torchs["input_sizes"], torchs["input_dtypes"])
        assert ours["process_group"] == torchs["process_group"]
        lines = [{key: frame[key] for key in ("name", "filename")} for frame in ours["frames"]]
        assert lines == [{key: frame[key] for key in ("name", "filename")} for frame in torchs["frames"]]
