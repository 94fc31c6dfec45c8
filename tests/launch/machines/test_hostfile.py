"""A hostfile of DeepSpeed: the machines of a launch, and the rank of each."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import LaunchError
from meshwright.launch.machines.hostfile import cluster_from_hostfile, remarks_on_machines
from meshwright.launch.plan import make_plan

HERE = socket.gethostname()


def settings_of(tmp_path: Path, text: str, **flags: Any) -> LaunchSettings:
    (tmp_path / "hosts").write_text(text)
    return LaunchSettings.resolve({"deepspeed_hostfile": str(tmp_path / "hosts"), "cpu": True, **flags}, None)


def test_machines_slots_and_the_own_place(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f"# two of them\nfirst slots=4\n\n{HERE} slots=4  # here\n")
    plan = make_plan(settings, ("train.py",), cluster_from_hostfile(settings))
    assert (plan.num_machines, plan.machine_rank, plan.processes_here, plan.address) == (2, 1, 4, "first")


def test_filters(tmp_path: Path) -> None:
    text = f"first slots=2\n{HERE} slots=2\nlast slots=2\n"
    without = cluster_from_hostfile(settings_of(tmp_path, text, deepspeed_exclusion_filter="first"))
    only = cluster_from_hostfile(settings_of(tmp_path, text, deepspeed_inclusion_filter=f"{HERE}@last"))
    assert without == only
    assert without is not None
    assert (without.num_machines, without.machine_rank, without.address) == (2, 0, HERE)


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("first\n", {}, r"line 1: 'first' cannot be read: write `name slots=8`"),
        ("a slots=1\na slots=1\n", {}, "is named twice"),
        ("# nobody\n", {}, "names no machine"),
        ("a\x1b[2J slots=1\n", {}, r"line 1: 'a·\[2J slots=1' cannot be read"),
        ("-x slots=1\n", {}, "cannot be read"),
        ("a slots=1\nb slots=2\n", {}, "different slots"),
        ("a slots=1\nb slots=1\n", {}, "is not among the machines of .*: give --machine_rank"),
        ("a slots=1\n", {"deepspeed_inclusion_filter": "c"}, "names 'c', which is not in the hostfile"),
        ("a slots=1\n", {"deepspeed_exclusion_filter": "a"}, "leaves no machine"),
        ("a slots=4\n", {"deepspeed_inclusion_filter": "a:0,1"}, "chooses devices"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str, flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LaunchError, match=complaint):
        cluster_from_hostfile(settings_of(tmp_path, text, **flags))


def test_another_launcher_is_remarked(tmp_path: Path) -> None:
    assert "has no effect" in remarks_on_machines(settings_of(tmp_path, "", deepspeed_multinode_launcher="pdsh"))[0]
    assert remarks_on_machines(settings_of(tmp_path, "", deepspeed_multinode_launcher="standard")) == []
