"""The self-test: healthy machines pass, and a fault on one rank is found, named, and does not stop the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from meshwright.tools.selftest.checks import CHECKS
from meshwright.tools.selftest.speed import MEASUREMENTS
from tests import warm
from tests.launching import run_accelerate
from tests.ranks.pool import free_port
from tests.timing import limit

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(world_size: int, *program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable]
    if world_size > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size)]
        launcher += ["--master_port", str(free_port())]
    environment = {**os.environ, **_ENVIRONMENT, **variables}
    return warm.run([*launcher, *program], env=environment, capture_output=True, text=True, timeout=100)


def rows(printed: str) -> dict[str, tuple[str, str]]:
    """Return the mark and the evidence of every check, by its name."""
    found = re.findall(r"^([✓✗·]) (.{20}) *\d+ ms  (.*)$", printed, flags=re.MULTILINE)
    return {name.strip(): (mark, evidence) for mark, name, evidence in found}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_healthy_machine_passes(world_size: int) -> None:
    ran = run(world_size, "-m", "meshwright.tools.selftest.script")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    marks = {name: mark for name, (mark, _) in rows(ran.stdout).items()}
    assert marks == dict.fromkeys(CHECKS, "✓") | dict.fromkeys(MEASUREMENTS, "·")
    assert len(rows(ran.stdout)) == ran.stdout.count(" ms  "), "rank 0 alone prints"
    processes = "2 processes" if world_size == 2 else "1 process"
    (seconds,) = re.findall(rf"^passed: {len(CHECKS)} checks on {processes} in ([\d.]+) s$", ran.stdout, re.MULTILINE)
    assert float(seconds) < 20, "5 s on a machine that does nothing else"
    assert re.search(r"^versions +meshwright 0\S+, PyTorch 2\S+, Python 3\S+$", ran.stdout, re.MULTILINE)
    evidence = {name: text for name, (_, text) in rows(ran.stdout).items()}
    num_samples = 3 * 4 * world_size + 3
    assert evidence["shuffled data"] == f"{num_samples} of {num_samples} samples, each once"
    assert re.search(r"GFLOP/s", evidence["matmul"])
    assert "MB/s" in evidence["all-reduce"] or world_size == 1


def test_the_configured_precision_is_what_is_tested() -> None:
    ran = run(2, "-m", "meshwright.tools.selftest.script", ACCELERATE_MIXED_PRECISION="bf16")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "mixed_precision=bf16" in ran.stdout
    assert rows(ran.stdout)["mixed precision"][1].startswith("bf16: loss ")


def run_with(fault: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the self-test on 2 processes of a machine with a fault."""
    script = tmp_path / "faulty_machine.py"
    head = "import meshwright.accelerator, datetime, time\n"
    head += "from meshwright.tools.selftest import checks, script as selftest\n"
    script.write_text(head + textwrap.dedent(fault) + "\nselftest.main()\n")
    return run(2, str(script))


@pytest.mark.parametrize("moment", ["before the collective", "after the collective"])
def test_a_fault_on_one_rank_is_named_and_the_rest_still_runs(moment: str, tmp_path: Path) -> None:
    fault = f"""
        def faulty(bench, healthy=checks.CHECKS["reduce"]):
            if bench.rank == 1 and {moment.startswith("before")}:
                raise OSError("the cable is loose")
            healthy(bench)
            if bench.rank == 1:
                raise OSError("the cable is loose")
            return "fine here"

        checks.CHECKS["reduce"] = faulty
    """
    ran = run_with(fault, tmp_path)
    assert ran.returncode == 1
    marks = {name: mark for name, (mark, _) in rows(ran.stdout).items()}
    assert marks == dict.fromkeys(CHECKS, "✓") | dict.fromkeys(MEASUREMENTS, "·") | {"reduce": "✗"}
    assert rows(ran.stdout)["reduce"][1].startswith("failed on rank 1")
    reasons = re.findall(r"^    rank (\d): (.*)$", ran.stdout, re.MULTILINE)
    assert reasons[0][0] == "1"
    assert reasons[0][1].startswith("OSError: the cable is loose (faulty_machine.py, line ")
    if moment.startswith("after"):
        assert len(reasons) == 1, "rank 0 saw nothing wrong"
    assert re.search(rf"^failed: reduce; {len(CHECKS)} checks on 2 processes in", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("fault", "check", "reason"),
    [
        (
            "meshwright.Accelerator.gather = lambda self, tensor: tensor",
            "gather",
            r"gathered: expected \[0, 0, 1, -1\], got \[0, 0\]",
        ),
        (
            "meshwright.accelerator.Accelerator.backward = lambda self, loss: (2 * loss).backward()",
            "training",
            r"weights differ by \S+ from those of one process",
        ),
        (
            "meshwright.state.PartialState.wait_for_everyone = lambda self: None",
            "wait for everyone",
            "processes that had arrived: expected 2, got 1",
        ),
    ],
    ids=["every rank is alone", "gradients are doubled", "nobody waits"],
)
def test_a_wrong_result_is_found(fault: str, check: str, reason: str, tmp_path: Path) -> None:
    ran = run_with(fault, tmp_path)
    assert ran.returncode == 1
    assert rows(ran.stdout).get(check, ("nothing",))[0] == "✗", ran.stdout + ran.stderr
    assert re.search(rf"^    rank 0: {reason}", ran.stdout, re.MULTILINE), ran.stdout


def test_a_rank_that_hangs_ends_the_test(tmp_path: Path) -> None:
    fault = """
        def hanging(bench, healthy=checks.CHECKS["gather"]):
            time.sleep(300 * bench.rank)
            return healthy(bench)

        checks.CHECKS["gather"] = hanging
        selftest.TIME_LIMIT = datetime.timedelta(seconds=3)
        selftest._STORE_TIMEOUT = datetime.timedelta(seconds=4)
    """
    start = time.monotonic()
    ran = run_with(fault, tmp_path)
    assert time.monotonic() - start < limit(60)
    assert ran.returncode == 1
    assert rows(ran.stdout)["gather"][1].startswith("failed on rank 0, 1")
    assert "    rank 1: no answer" in ran.stdout
    assert f"the other {len(CHECKS) - 2} checks were not run" in ran.stdout


def test_processes_that_cannot_meet_say_so() -> None:
    nobody = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "no port"}
    ran = run(1, "-m", "meshwright.tools.selftest.script", **nobody)
    assert ran.returncode == 1
    assert "rank 1 could not join the others: ValueError" in ran.stderr


def test_launching_imports_no_torch() -> None:
    program = "import sys, accelerate.launchers, meshwright.tools.selftest.script; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0


def test_the_verb_starts_it_with_the_flags_of_a_launch(tmp_path: Path) -> None:
    launched = run_accelerate("test", "--cpu", "--num_processes", 2, "--mixed_precision", "bf16", directory=tmp_path)
    assert launched.code == 0, launched.complaints
    assert "mixed_precision=bf16" in launched.printed
    assert "on 2 processes" in launched.printed.splitlines()[-1]
