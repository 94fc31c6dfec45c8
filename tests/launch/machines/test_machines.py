"""`meshwright launch` on several machines: network namespaces with names and addresses of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.machines import ACCELERATE, Machine, Running, machines, until, why_not
from tests.timing import limit

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SCRIPTS = Path(__file__).parents[2] / "clusters"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Machine]]:
    """n1, n2 and n3, which know their own names by loopback addresses only, as Debian's do."""
    with machines(["n1", "n2", "n3"], tmp_path, own_name_is_loopback=True) as made:
        yield made


def launch(machine: Machine, rank: int, script: Path, *more: object, num_machines: int = 3) -> Running:
    place = ("--num_machines", num_machines, "--machine_rank", rank, "--main_process_ip", "n1")
    return machine.start(*ACCELERATE, "launch", "--cpu", *place, *more, script)


def assert_nothing_runs_on(three: Sequence[Machine]) -> None:
    assert until(lambda: not any(machine.processes() for machine in three), 6)


def test_three_machines_add_up(three: list[Machine]) -> None:
    launched = [launch(machine, rank, SCRIPTS / "sums.py") for rank, machine in enumerate(three)]
    assert [running.wait() for running in launched] == [0, 0, 0], launched[0].printed
    for rank, (machine, running) in enumerate(zip(three, launched, strict=True)):
        assert f"rank {rank} of 3, local 0, on {machine.name}, by eth0: sum 6" in running.printed
    assert_nothing_runs_on(three)


def test_an_unreachable_machine_is_named_on_both_sides_within_30_seconds(three: list[Machine]) -> None:
    three[2].unplug()
    started = time.monotonic()
    first, second, lost = (launch(machine, rank, SCRIPTS / "sums.py") for rank, machine in enumerate(three))

    assert lost.wait(limit(30)) == 2
    assert "This machine (n3) cannot reach n1:29500, the address of machine 0: " in lost.printed
    first.wait_for("no connection from machine 2; present: 0 (n1), 1 (n2). It must reach n1:29500", seconds=limit(30))
    assert time.monotonic() - started < limit(30)

    assert first.process.poll() is second.process.poll() is None, "the others go on waiting"
    first.process.send_signal(signal.SIGINT)
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(5), second.wait(5)) == (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "Traceback" not in first.printed + second.printed
    assert_nothing_runs_on(three)


@pytest.mark.parametrize(
    ("third", "more", "said"),
    [
        ({"rank": 1}, (), "two machines say they are machine 1: n2 and n3. Check --machine_rank."),
        ({"rank": 2, "num_machines": 4}, (), "machine 0 (n1) was started for 3 machines, machine 2 (n3) for 4."),
        (
            {"rank": 2},
            ("--num_processes", 6),
            "machine 0 (n1) was started for 1 processes per machine, machine 2 (n3) for 2.",
        ),
    ],
    ids=["rank", "machines", "processes"],
)
def test_machines_that_disagree_are_all_told(
    three: list[Machine], third: dict[str, int], more: tuple[object, ...], said: str
) -> None:
    launched = [launch(machine, rank, SCRIPTS / "sums.py") for rank, machine in enumerate(three[:2])]
    assert until(lambda: ":29500" in three[0].run("ss", "-Htn", "state", "established"), 10)
    launched.append(
        launch(three[2], third["rank"], SCRIPTS / "sums.py", *more, num_machines=third.get("num_machines", 3))
    )
    for running in launched:
        assert running.wait(10) == 2
        assert f"meshwright launch: The machines do not agree: {said}" in running.printed


FAILS_ON_RANK_1 = """
import time
from pathlib import Path
from meshwright import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.wait_for_everyone()
if accelerator.process_index == 2:
    Path("asleep").touch()
    time.sleep(600)  # busy elsewhere: it would not notice by itself
while not Path("asleep").exists():
    time.sleep(0.1)
if accelerator.process_index == 1:
    raise ValueError("sample 17 is broken")
accelerator.wait_for_everyone()
"""


def test_every_machine_names_the_rank_that_failed_and_stops(three: list[Machine], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ON_RANK_1)
    launched = [launch(machine, rank, script) for rank, machine in enumerate(three)]
    assert [running.wait() for running in launched] == [1, 1, 1]
    for running in launched:
        assert "ValueError: sample 17 is broken" in running.printed
        assert 'train.py:13  in <module>:  raise ValueError("sample 17 is broken")' in running.printed
    first, second, third = (running.printed for running in launched)
    assert "rank 1 failed: ValueError on machine 1 (n2)" in second
    assert "rank 1 on machine 1 (n2) failed first: ValueError" in first
    assert "collateral rank 0 lost the connection to it" in first
    assert "rank 1 on machine 1 (n2) failed first: ValueError" in third
    ended_by = ("ended by the launcher", "waited for it")  # or by its watcher, whoever is first
    assert any(f"collateral rank 2 {words}" in third for words in ended_by), third
    assert_nothing_runs_on(three)


def test_training_goes_on_when_a_machine_is_lost_and_when_another_takes_its_place(
    three: list[Machine], tmp_path: Path
) -> None:
    def join(machine: Machine) -> Running:
        # A machine is given up after 20 s without a heartbeat, also on a busy one; the last one is waited for 1 s.
        timeouts = "keep_alive_interval=1,keep_alive_max_attempt=20,last_call_timeout=1"
        elastic = ("--nnodes", "2:3", "--max_restarts", 2, "--rdzv_conf", timeouts)
        meet = ("--main_process_ip", three[0].address)
        return machine.start(*ACCELERATE, "launch", "--cpu", *elastic, *meet, SCRIPTS / "elastic.py")

    def steps_with(machines: int, after: int) -> int:
        """Wait until that many machines train together, and return their step."""

        def progress() -> list[int]:
            file = tmp_path / "progress"
            return [int(number) for number in file.read_text().split()] if file.exists() else [0, 0]

        assert until(lambda: progress()[1] == machines and progress()[0] > after, limit(60)), launched[0].printed
        return progress()[0]

    launched = [join(machine) for machine in three]
    step = steps_with(3, after=0)
    launched[2].process.kill()
    assert until(lambda: not three[2].processes(), limit(6)), "its ranks die with it"
    step = steps_with(2, after=step)
    launched[2] = join(three[2])
    steps_with(3, after=step)
    (tmp_path / "enough").touch()
    assert [running.wait() for running in launched] == [0, 0, 0]
    for running in launched:
        assert "of 3 ended at step" in running.printed
    noticed = (
        "(it lost another machine); restarting (1 more after this).",
        "the number of machines changed; restarting",
    )
    assert any(words in launched[0].printed for words in noticed)  # whichever came first
    assert "the number of machines changed; restarting with the new number." in launched[0].printed
    assert_nothing_runs_on(three)
