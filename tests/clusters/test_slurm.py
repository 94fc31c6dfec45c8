"""The same script under a real Slurm: srun, sbatch and salloc, without a flag."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import machines, slurm
from tests.clusters.machines import ACCELERATE, until
from tests.clusters.slurm import Slurm
from tests.sizes import at_night

_WHY_NOT = machines.why_not() or slurm.why_not()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))

SUMS = Path(__file__).with_name("sums.py")
LAUNCH = " ".join((*ACCELERATE, "launch"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes, n1 and n2, of 8 CPUs each; the files of the tests are on both."""
    folder = tmp_path_factory.mktemp("slurm")
    with machines.machines(["n1", "n2"], folder) as made:
        try:
            running = slurm.slurm(made, folder / "slurm")
            with running as cluster:
                yield cluster
        except TimeoutError as error:
            pytest.skip(str(error))


def placed(printed: str) -> list[tuple[str, ...]]:
    """Return (rank, of, local rank, machine, sum) of every rank, in order."""
    line = r"rank (\d+) of (\d+), local (\d+), on (\w+), by \w+: sum (\d+)"
    return sorted(re.findall(line, printed))


def test_srun_with_one_launch_per_machine(cluster: Slurm) -> None:
    printed = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *ACCELERATE, "launch", SUMS)
    assert placed(printed) == [("0", "2", "0", "n1", "3"), ("1", "2", "0", "n2", "3")]


def test_srun_with_one_python_per_rank(cluster: Slurm) -> None:
    printed = cluster.run("srun", "--nodes=2", "--ntasks=2", sys.executable, SUMS)
    assert placed(printed) == [("0", "2", "0", "n1", "3"), ("1", "2", "0", "n2", "3")]


@pytest.mark.nightly
def test_srun_with_one_launch_per_rank(cluster: Slurm) -> None:
    printed = cluster.run("srun", "--nodes=2", "--ntasks=3", *ACCELERATE, "launch", SUMS)
    assert placed(printed) == [("0", "3", "0", "n1", "6"), ("1", "3", "1", "n1", "6"), ("2", "3", "0", "n2", "6")]


@pytest.mark.parametrize(("nodes", "ranks"), [at_night(1, 2), (2, 4)])
def test_a_batch_script_need_not_speak_of_its_nodes(cluster: Slurm, tmp_path: Path, nodes: int, ranks: int) -> None:
    script = tmp_path / "who.py"
    script.write_text("import os, socket; print('rank', os.environ['RANK'], 'on', socket.gethostname())")
    job = cluster.submit(f"{LAUNCH} {script}", f"--nodes={nodes}", "--ntasks-per-node=2")
    assert cluster.wait_for(job) == ("COMPLETED", "0"), cluster.printed_by(job)
    placed = sorted(re.findall(r"rank (\d) on (n\d)", cluster.printed_by(job)))
    assert placed == [(str(rank), f"n{1 + rank // 2}") for rank in range(ranks)]


def test_a_shell_of_salloc_reaches_all_nodes_and_a_failing_rank_fails_the_job(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, sys, time; os.environ['RANK'] == '1' and sys.exit(3); time.sleep(600)")
    running = cluster.start("salloc", "--nodes=2", "srun", "--interactive", *ACCELERATE, "launch", script)
    assert running.wait() == 3, running.printed
    assert "rank 1 failed: called sys.exit with code 3 on machine 1 (n2)" in running.printed
    assert until(lambda: not cluster.processes(), 10), cluster.processes()


def test_scancel_ends_everything(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("import os, time; print('rank', os.environ['RANK'], flush=True); time.sleep(600)")
    job = cluster.submit(f"{LAUNCH} {script}", "--nodes=2", "--ntasks-per-node=2")
    assert until(lambda: cluster.printed_by(job).count("rank") == 4, 60), cluster.printed_by(job)
    cluster.run("scancel", job)
    assert cluster.wait_for(job, 20)[0] == "CANCELLED"
    assert until(lambda: not cluster.processes(), 20), cluster.processes()
