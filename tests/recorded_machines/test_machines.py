"""What the library makes of every recorded machine: the plan, devices, cores, and what `meshwright env` prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.commands.env import env_command, env_command_parser
from meshwright.config.launch.settings import LaunchSettings
from meshwright.launch.devices import count_accelerators
from meshwright.launch.machines.cluster import find_cluster
from meshwright.launch.plan import LaunchPlan, make_plan
from meshwright.runtime.devices import affinity, device
from meshwright.runtime.devices.hardware import check_cuda_p2p_ib_support, get_gpu_info
from meshwright.runtime.devices.machine import parse_cpu_list
from meshwright.runtime.process import ProcessInfo
from tests.recorded_machines import NAMES, RecordedMachine, expand_braces, on_machine

NCCL_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
WITH_CORES = [name for name in NAMES if "shares" in RecordedMachine.load(name).expected]


@pytest.fixture(params=NAMES)
def recorded(request: pytest.FixtureRequest) -> Iterator[RecordedMachine]:
    """A machine as its launcher sees it."""
    with on_machine(request.param) as machine:
        yield machine


def plan(**flags: Any) -> LaunchPlan:
    return make_plan(LaunchSettings.resolve(flags, None), ["train.py"], find_cluster())


def device_of_this_rank() -> str:
    process = ProcessInfo.from_environment()
    try:
        chosen = device.device_for(
            local_rank=process.local_rank,
            world_size=process.world_size,
            cpu=False,
            requested=None,
            launcher=process.launcher,
        )
    except RuntimeError as error:
        return "error" if f"Local rank {process.local_rank} on host" in str(error) else str(error)
    return str(chosen)


def test_accelerators_are_counted_of_recorded_machines(recorded: RecordedMachine) -> None:
    assert count_accelerators() == recorded.expected["accelerators"]
    assert get_gpu_info()[1] == recorded.expected["accelerators"]


def test_the_plan_of_a_launch_of_recorded_machines(recorded: RecordedMachine) -> None:
    made = plan()
    assert made.processes_here == recorded.expected["processes"]
    assert made.threads == recorded.expected["threads"]
    chosen = {name: made.variables[name] for name in NCCL_VARIABLES if name in made.variables}
    assert chosen == recorded.expected.get("variables", {})
    remarks = recorded.expected.get("remarks", [])
    assert len(made.notes) == len(remarks)
    assert all(expected in note for expected, note in zip(remarks, made.notes, strict=True))
    assert check_cuda_p2p_ib_support() == ("variables" not in recorded.expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_of_every_rank_of_recorded_machines(name: str) -> None:
    expected = RecordedMachine.load(name).expected["devices"]
    chosen = []
    for rank in range(len(expected)):
        with on_machine(name, local_rank=rank):
            chosen.append(device_of_this_rank())
    assert chosen == expected


@pytest.mark.parametrize("name", WITH_CORES)
def test_the_cores_of_every_rank_of_recorded_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(cores))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for rank in RecordedMachine.load(name).local_ranks:
        with on_machine(name, local_rank=rank) as recorded:
            assert affinity.set_numa_affinity(ProcessInfo.from_environment().local_rank) == pinned[rank]
    assert pinned == [parse_cpu_list_sorted(share) for share in recorded.expected["shares"]]
    for core in range(max(map(max, pinned)) + 1):
        assert sum(core in share for share in pinned) <= 1, f"core {core} belongs to two ranks"


def parse_cpu_list_sorted(text: str) -> list[int]:
    return sorted(parse_cpu_list(text))


def test_env_describes_recorded_machines(recorded: RecordedMachine, capsys: pytest.CaptureFixture[str]) -> None:
    env_command(env_command_parser().parse_args([]))
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    printed = {name.strip(): value.strip() for name, value in lines.items()}
    for name, value in recorded.expected["env"].items():
        assert printed[name] == value
    assert ("NVIDIA driver" in printed) == ("nvidia" in recorded.facts or "nvidia_smi" in recorded.facts)


def test_fp8_is_known_of_recorded_machines(recorded: RecordedMachine) -> None:
    assert device.supports_fp8(device.default_device()) == recorded.expected["fp8"]


def test_every_file_says_what_the_machine_is_and_where_it_is_from() -> None:
    assert len(NAMES) >= 12
    for name in NAMES:
        facts = RecordedMachine.load(name).facts
        assert facts["about"]
        assert facts["source"]
        assert facts.keys() >= {"expected"}


def test_braces_stand_for_numbers() -> None:
    assert expand_braces("a b{1..3}c d{0..4..2}") == ["a", "b1c", "b2c", "b3c", "d0", "d2", "d4"]
