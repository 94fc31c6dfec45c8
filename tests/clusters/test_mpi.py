"""The same script under a real OpenMPI, on one machine and on two, without a flag."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.machines import ACCELERATE, Machine, machines, why_not
from tests.clusters.test_slurm import SUMS, placed

_WHY_NOT = why_not() or (None if shutil.which("mpirun") else "mpirun not installed: see .ci/install_clusters")
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Machine]:
    """The first of three machines, with a file `hosts` that names it and the second."""
    with machines(["n1", "n2", "n3"], tmp_path) as made:
        (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
        # In the place of ssh: enter the namespaces of the machine.
        cases = "".join(f'{machine.name}) exec {" ".join(machine.enter())} sh -c "$*" ;;\n' for machine in made)
        agent = tmp_path / "remote_shell"
        agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}esac\n")
        agent.chmod(0o755)
        made[0].variables = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": str(agent),
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        yield made[0]


def test_mpirun_with_one_python_per_rank_on_two_machines(first: Machine) -> None:
    printed = first.run("mpirun", "--hostfile", "hosts", "-np", 2, sys.executable, SUMS)
    assert placed(printed) == [("0", "2", "0", "n1", "3"), ("1", "2", "0", "n2", "3")]


@pytest.mark.nightly
def test_mpirun_with_one_launch_per_rank(first: Machine) -> None:
    printed = first.run("mpirun", "-np", 2, *ACCELERATE, "launch", SUMS)
    assert placed(printed) == [("0", "2", "0", "n1", "3"), ("1", "2", "1", "n1", "3")]


def test_a_launch_that_starts_mpirun(first: Machine) -> None:
    mpirun = ("--mpirun_hostfile", "hosts", "--num_processes", 2)
    printed = first.run(*ACCELERATE, "launch", "--cpu", *mpirun, SUMS)
    assert placed(printed) == [("0", "2", "0", "n1", "3"), ("1", "2", "0", "n2", "3")]


def test_rank_0_on_another_machine_than_mpirun_asks_for_an_address(first: Machine, tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(
        "from meshwright.runtime.process import ProcessInfo\nProcessInfo.from_environment().rendezvous_address()"
    )
    (tmp_path / "hosts").write_text("n2 slots=1\nn3 slots=1\n")
    running = first.start("mpirun", "--hostfile", "hosts", "-np", 2, sys.executable, script)
    assert running.wait() != 0
    assert "set MASTER_ADDR to a host name or address that every process can reach" in running.printed
