"""`--survive` on several machines: a process is replaced on its own machine; a machine that is lost is given up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.machines import ACCELERATE, Machine, Running, machines, until, why_not
from tests.parallel.replicas.test_surviving import SCRIPT, assert_each_sample_once, assert_equal_ends
from tests.timing import limit

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

REPLICAS = Path(__file__).parents[1] / "processes" / "elastic" / "replicas.py"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(["n1", "n2", "n3"], tmp_path) as made:
        yield made


def launch(machine: Machine, rank: int) -> Running:
    place = ("--num_machines", 3, "--machine_rank", rank, "--main_process_ip", "n1")
    return machine.start(*ACCELERATE, "launch", "--cpu", *place, "--survive", REPLICAS)


def test_a_process_is_replaced_on_its_machine_and_a_lost_machine_is_given_up(
    three: list[Machine], tmp_path: Path
) -> None:
    launched = [launch(machine, rank) for rank, machine in enumerate(three)]

    def wait_for(*names: str) -> None:
        assert until(lambda: all((tmp_path / name).exists() for name in names), limit(60)), launched[0].printed

    wait_for("member_0_0", "member_1_0", "member_2_0")
    os.kill(int((tmp_path / "pid_1_0").read_text()), signal.SIGKILL)
    wait_for("member_1_1")
    assert "rank 1 was killed by SIGKILL; 2 replicas continue, a replacement is starting." in launched[1].printed
    launched[1].wait_for("rank 1 has joined; 3 replicas train.", seconds=limit(5))

    launched[2].process.send_signal(signal.SIGSTOP)
    launched[0].wait_for("no heartbeat from machine 2; the others continue without it.", seconds=limit(30))
    launched[2].process.send_signal(signal.SIGCONT)
    assert launched[2].wait(limit(20)) == 2
    assert "The other machines went on without this one" in launched[2].printed
    assert until(lambda: not three[2].processes(), limit(6)), "it cannot write into a run that went on without it"
    (tmp_path / "finish").touch()
    started = time.monotonic()
    assert [running.wait(limit(60)) for running in launched[:2]] == [0, 0], launched[0].printed
    assert time.monotonic() - started < limit(20), "nobody waits for the machine that is lost"
    assert "1 replacement, " in launched[0].printed


def test_the_run_ends_with_the_machine_that_hosts_the_store(three: list[Machine], tmp_path: Path) -> None:
    launched = [launch(machine, rank) for rank, machine in enumerate(three)]
    assert until(lambda: all((tmp_path / f"member_{rank}_0").exists() for rank in range(3)), limit(60))
    launched[0].process.kill()
    assert [running.wait(limit(20)) for running in launched[1:]] == [2, 2]
    assert "a machine was lost, at n1:29500" in launched[1].printed
    assert until(lambda: not any(machine.processes() for machine in three), limit(10))


def test_a_machine_that_was_cut_off_cannot_come_back_into_the_training(tmp_path: Path) -> None:
    steps = 160
    with machines(["n1", "n2"], tmp_path) as (first, second):
        place = ("--num_machines", 2, "--num_processes", 4, "--main_process_ip", "n1", "--survive")
        launched = [
            machine.start(
                *ACCELERATE, "launch", "--cpu", *place, "--machine_rank", rank, SCRIPT, tmp_path, steps, "zero_first"
            )
            for rank, machine in enumerate((first, second))
        ]
        samples = [tmp_path / f"samples_{rank}_0" for rank in range(4)]
        begun = until(lambda: all(path.exists() and path.stat().st_size for path in samples), limit(120))
        assert begun, launched[0].printed + launched[1].printed
        second.unplug()
        launched[0].wait_for("2 of 4 replicas go on after ", seconds=limit(60))
        cut_off = [path.read_text() for path in samples[2:]]
        second.plug_in()
        assert launched[1].wait(limit(60)) == 2
        assert "The other machines went on without this one" in launched[1].printed
        assert until(lambda: not second.processes(), limit(6))
        assert launched[0].wait(limit(120)) == 0, launched[0].printed
    assert "no heartbeat from machine 1; the others continue without it." in launched[0].printed
    assert [path.read_text() for path in samples[2:]] == cut_off, "it made no step after it was taken for lost"
    assert sorted(path.name for path in tmp_path.glob("end_*")) == ["end_0_0", "end_1_0"]
    assert_equal_ends(tmp_path, tmp_path / "one", steps, "zero_first")
    assert_each_sample_once(tmp_path, 2)
