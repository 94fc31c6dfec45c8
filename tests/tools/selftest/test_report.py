"""`meshwright test --report`: everything is tried, and one file says what was found, without anything private."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.environment import patch_environment
from meshwright.tools.selftest.checks import CHECKS
from meshwright.tools.selftest.meshes import mesh_checks
from meshwright.tools.selftest.report import PANEL, Drill, as_markdown, scrub
from meshwright.tools.selftest.script import Bench, CheckOutcome, run
from meshwright.tools.selftest.speed import COMPARISONS, MEASUREMENTS
from meshwright.tools.selftest.state import state_checks
from tests.launching import run_accelerate
from tests.ranks import run_on_ranks
from tests.simulated_accelerator import run_on_a_simulated_accelerator
from tests.simulated_accelerator.faults import without_float64
from tests.sizes import at_night


def rows_of(report: str) -> dict[str, list[str]]:
    """Return the cells of every row of the report's tables, by the first one."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in report.splitlines() if line[:1] == "|"]
    return {name: rest for name, *rest in rows}


def test_a_report_of_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    launched = run_accelerate("test", "--report", file, "--cpu", "--num_processes", 2, directory=tmp_path)
    assert launched.code == 0, launched.printed + launched.complaints
    report = file.read_text()
    found = rows_of(report)
    for name in {**CHECKS, **mesh_checks(2), **state_checks(2), **MEASUREMENTS, **COMPARISONS}:
        assert found[name][0] == "passed", report
    assert "as one process" in found["FSDP2"][2]
    assert "rank 1 was slowed down, and named" in found["straggler"][2]
    assert "torch alone" in found["steps"][2]
    assert "## Hang drill\n\nrank 1 made a call alone, and was named after" in report
    assert "gather() was called on rank 1 only (hang_drill.py:" in report
    assert PANEL in report
    assert "Traceback" not in report
    assert "PyTorch" in report
    for private in (str(tmp_path), socket.gethostname(), f"/{getpass.getuser()}", str(Path(__file__).parents[3])):
        assert private not in report
    assert list(tmp_path.iterdir()) == [file], "nothing else is left behind"


def test_a_report_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    launched = run_accelerate("test", "--report", file, "--cpu", "--num_processes", 1, directory=tmp_path)
    assert launched.code == 0, launched.printed + launched.complaints
    found = rows_of(file.read_text())
    assert {found[name][0] for name in (*CHECKS, *state_checks(1))} == {"passed"}
    assert not {"straggler", "FSDP2"} & found.keys()


def test_a_report_needs_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "report.md"
    launched = run_accelerate("test", "--report", file, "--cpu", directory=tmp_path)
    assert launched.code == 1
    assert "there is no folder" in launched.complaints


def everything() -> dict[str, Any]:
    """Run all checks and measurements on this rank; return what failed, and what the background save said."""
    with patch_environment(MESHWRIGHT_HANG_SECONDS="0"):
        bench = Bench()
        results = run(bench, in_full=True)
        bench.shut_down()
    failed = reasons({**results.checks, **results.measurements})
    return {"failed": failed, "save": results.checks["background save"][bench.rank].text}


def all_meshes() -> dict[str, list[str]]:
    """Run the checks of meshes on this rank, and return what failed."""
    with patch_environment(MESHWRIGHT_HANG_SECONDS="0"):
        bench = Bench()
        found = {name: bench.run(name, check) for name, check in mesh_checks(bench.world_size).items()}
        bench.shut_down()
    return reasons(found)


def reasons(found: dict[str, list[CheckOutcome]]) -> dict[str, list[str]]:
    return {name: [each.text for each in outcomes if not each.passed] for name, outcomes in found.items()
            if not all(each.passed for each in outcomes)}  # fmt: skip


def everything_without_float64() -> dict[str, Any]:
    with without_float64():  # as on MPS
        return everything()


def test_everything_passes_on_simulated_accelerators() -> None:
    for found in run_on_a_simulated_accelerator(
        everything_without_float64, world_size=2, in_new_processes=True, time_limit=300
    ):
        assert found["failed"] == {}
        assert found["save"].endswith("; 1 context")


@pytest.mark.parametrize("world_size", [at_night(size) for size in (3, 4, 6, 8)])
def test_every_mesh_that_fits_is_tried(world_size: int) -> None:
    for failed in run_on_ranks(world_size, all_meshes, time_limit=400):
        assert failed == {}


def test_what_is_private_is_replaced() -> None:
    text = (
        f"{socket.gethostname()} gpu-17 10.0.3.4:29500 [fe80::1c2d] 127.0.0.1 2.13.0 at 12:30:45 /home/ann/x/train.py:3"
    )
    replaced = "<host> <host> <address>:29500 [<address>] 127.0.0.1 2.13.0 at 12:30:45 …/train.py:3"
    assert scrub(text, ["gpu-17"]) == replaced


def test_a_failure_is_in_the_first_line_with_its_reason() -> None:
    bad = {"rank": 1, "passed": False, "text": "OSError: the cable is loose", "seconds": 1.0, "ended": 2.0}
    good = bad | {"rank": 0, "passed": True, "text": "fine"}
    outcomes = {
        "checks": {"gather": [good, bad]},
        "measurements": {},
        "num_not_run": 3,
        "hosts": ["a1", "b1"],
        "processes": 2,
        "device": "cuda with nccl",
        "settings": "mixed_precision=no",
        "seconds": 3.0,
    }
    report = as_markdown("PyTorch  2.13.0", outcomes, Drill(False, 120.0, "the run had not ended", "..."))
    assert "**Failed**: gather, hang drill. 3 checks were not run" in report
    assert "2 process(es) on 2 machine(s), cuda with nccl" in report
    assert "| gather | failed on rank 1 | 1.00 |" in report
    assert "- gather, rank 1: OSError: the cable is loose" in report
    assert "did not run the checks" in as_markdown("PyTorch  2.13.0", None, None)
