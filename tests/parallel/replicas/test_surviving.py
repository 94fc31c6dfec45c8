"""`meshwright launch --survive`: killed replicas are replaced, and the run ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from meshwright.tools.report.runs.finding import read_runs
from meshwright.tools.report.runs.moments import newest_windows
from meshwright.tools.report.runs.replicas import read_changes
from tests.launching import end_tree, run_accelerate, run_script, start_accelerate
from tests.sizes import sized

SCRIPT = Path(__file__).with_name("training.py")
REPLICAS = 4
SAMPLES = 384
STEP_OF_FLIP = 12


class Run:
    """A run of four replicas whose processes can be killed."""

    def __init__(
        self, folder: Path, steps: int, mode: str, *shards: int, flags: Sequence[object] = (), **variables: str
    ) -> None:
        self.folder = folder
        place = ("--cpu", "--num_processes", REPLICAS, "--survive", *flags)
        words = ("launch", *place, SCRIPT, folder, steps, mode, *shards)
        self.launcher = start_accelerate(*words, directory=folder, **variables)
        self.wait_until(lambda: len(self.members()) == REPLICAS)

    def process(self, rank: int) -> psutil.Process | None:
        """Return the newest process of a rank, if it runs."""
        newest = max(self.folder.glob(f"pid_{rank}_*"), key=lambda path: int(path.name.split("_")[2]), default=None)
        try:
            found = None if newest is None else psutil.Process(int(newest.read_text() or 0))
            return None if found is None or found.status() == psutil.STATUS_ZOMBIE else found
        except psutil.NoSuchProcess:
            return None

    def members(self) -> list[int]:
        """Return the ranks whose newest process runs and has made a step."""
        return [rank for rank in range(REPLICAS) if self.process(rank) is not None and self.has_stepped(rank)]

    def has_stepped(self, rank: int) -> bool:
        number = max((int(path.name.split("_")[2]) for path in self.folder.glob(f"pid_{rank}_*")), default=0)
        samples = self.folder / f"samples_{rank}_{number}"
        return samples.exists() and samples.stat().st_size > 0

    def wait_until(self, is_reached: Callable[[], bool], seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > until or self.launcher.poll() is not None:
                left = "" if self.launcher.poll() is not None else end_tree(self.launcher.pid)
                pytest.fail(f"It was not reached. {left}\n{self.launcher.communicate()}")
            time.sleep(0.02)

    def kill(self, *ranks: int) -> None:
        """Kill the newest processes of ranks, and wait until they are gone."""
        victims = {rank: found for rank in ranks if (found := self.process(rank)) is not None}
        for found in victims.values():
            os.kill(found.pid, signal.SIGKILL)
        self.wait_until(lambda: all(self.process(rank) != found for rank, found in victims.items()))

    def kill_at_random(self, kills: int, draw: random.Random) -> int:
        """Kill members one after the other, as long as there are more than two; return how many were killed."""
        made = 0
        while made < kills and self.launcher.poll() is None:
            members = self.members()
            if len(members) > 2:
                self.kill(draw.choice(members))
                made += 1
                time.sleep(draw.random())
            time.sleep(0.02)
        return made

    def end(self) -> str:
        """Wait for the end, and return what the launcher and the processes have logged."""
        printed, complaints = self.launcher.communicate(timeout=sized(gate=600, nightly=3 * 3600))
        assert self.launcher.returncode == 0, printed + complaints
        return str(complaints)


def undisturbed(folder: Path, steps: int, mode: str) -> torch.Tensor:
    """Return the parameters of the same training on one process."""
    folder.mkdir()
    limit = sized(gate=300, nightly=3600)
    run_script(SCRIPT, folder, steps, mode, world_size=1, directory=folder, time_limit=limit)
    parameters: torch.Tensor = torch.load(folder / "end_0_0")["parameters"]
    return parameters


def assert_equal_to_one_process(run: Run, folder: Path, steps: int, mode: str) -> None:
    assert_equal_ends(run.folder, folder, steps, mode)


def assert_equal_ends(made: Path, folder: Path, steps: int, mode: str) -> None:
    expected = undisturbed(folder, steps, mode)
    ends = [torch.load(path) for path in made.glob("end_*")]
    assert ends
    for end in ends:
        assert torch.equal(end["parameters"], ends[0]["parameters"]), "replicas are bitwise equal"
        torch.testing.assert_close(end["parameters"], expected, rtol=0, atol=1e-5)


def assert_every_sample_once(run: Run, kills: int) -> None:
    assert_each_sample_once(run.folder, kills)


def assert_each_sample_once(made: Path, kills: int) -> None:
    """A process that is killed between a step and its record leaves out the samples of that step, and no others."""
    counts: Counter[tuple[int, int]] = Counter()
    epochs = set()
    for path in made.glob("samples_*"):
        for line in path.read_text().splitlines():
            step = json.loads(line) if line.endswith("}") else {"epoch": 0, "ids": []}
            epochs.add(step["epoch"])
            counts.update((step["epoch"], number) for number in step["ids"])
    assert set(counts.values()) == {1}, "no sample counts twice"
    missing = len(epochs) * SAMPLES - len(counts)
    assert missing <= 16 * kills


def assert_seen_in_one_log(run: Run, complaints: str, steps: int, kills: int) -> None:
    """The log of the run goes on when the main process is lost, and lists who left and who joined."""
    [log] = read_runs([run.folder / "runs"])
    assert log.ended is not None
    assert len(log.segments) == 1, "it was not resumed"
    logged = log.scalars["samples"].points().step.tolist()
    assert len(set(logged)) == len(logged)
    assert steps - len(logged) <= 3 * kills, "only what a killed process had not written yet is missing"
    changes = read_changes(log.file)
    assert changes is not None
    assert f"{changes.replacements} replacements, {changes.lost_seconds:.1f} s lost of " in complaints
    texts = [change.text for change in changes.changes]
    assert "rank 0 was killed by SIGKILL" in texts
    assert any(text.startswith("rank 0 joined after ") for text in texts)
    assert sum(change.seconds or 0 for change in changes.changes) == pytest.approx(changes.lost_seconds, abs=0.01)


@pytest.mark.nightly
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kills, seconds, steps = 200, 15.0, 30_000
    folder = tmp_path / "run"
    folder.mkdir()
    run, draw, made = Run(folder, steps, "zero_first"), random.Random(0), 0
    first_pids = {rank: run.process(rank) for rank in range(REPLICAS)}
    while made < kills and run.launcher.poll() is None:
        members = run.members()
        if len(members) > 2:
            victim = draw.choice(members)
            run.kill(victim)
            first_pids.pop(victim, None)
            made += 1
            time.sleep(seconds)
        time.sleep(0.02)
    survivors = [process for process in first_pids.values() if process is not None and process.is_running()]
    complaints = run.end()
    assert_equal_to_one_process(run, tmp_path / "one", steps, "zero_first")
    assert_every_sample_once(run, made)
    assert made >= kills // 4, complaints
    total = re.search(r"(\d+) replacements, ([\d.]+) s lost", complaints)
    assert total is not None
    assert int(total[1]) >= made
    print(f"{made} kills, {total[0]}, {len(survivors)} processes from the start")


def test_evaluations_and_checkpoints_survive_losses(tmp_path: Path) -> None:
    kills, steps = sized(gate=(4, 60), nightly=(60, 900))
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, steps, "examine")
    made = run.kill_at_random(kills, random.Random(1))
    complaints = run.end()
    assert_equal_to_one_process(run, tmp_path / "one", steps, "examine")
    assert_every_sample_once(run, made)
    scores = [json.loads(line) for path in folder.glob("scores_*") for line in path.read_text().splitlines()]
    assert {score["step"] for score in scores} == set(range(5, steps + 1, 5))
    assert all(score["seen"] == list(range(100)) for score in scores), "every sample counts once in a metric"
    assert all(score["saved"] for score in scores)
    assert made >= kills // 4, complaints


def test_lost_shares_keep_exact_losses_and_accumulation(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 90
    folder.mkdir()
    run = Run(folder, steps, "items")
    run.kill(0)  # which holds rank 0, and reported until now
    run.wait_until(lambda: len(run.members()) == REPLICAS)
    run.kill(1, 3)  # two at once
    run.wait_until(lambda: run.process(1) is not None and not run.has_stepped(1))
    run.kill(1)  # a replacement that has not joined
    complaints = run.end()
    assert "rank 0 has joined" in complaints
    assert_seen_in_one_log(run, complaints, steps, kills=4)
    assert_equal_to_one_process(run, tmp_path / "one", steps, "items")
    assert_every_sample_once(run, 4)


def test_a_stopped_process_is_taken_for_lost_and_cannot_come_back(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 60
    folder.mkdir()
    run = Run(folder, steps, "zero_first")
    stopped = run.process(2)
    assert stopped is not None
    stopped.suspend()
    run.wait_until(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)
    complaints = run.end()
    assert "the others go on without rank 2 (no heartbeat for 15 s): its process is killed." in complaints
    assert_equal_to_one_process(run, tmp_path / "one", steps, "zero_first")
    assert_every_sample_once(run, 1)


def test_a_replica_with_a_flipped_bit_is_named_and_replaced(tmp_path: Path) -> None:
    folder, steps, every = tmp_path / "run", 90, 5
    folder.mkdir()
    run = Run(folder, steps, "flip", flags=("--check_replicas_every", every))
    run.wait_until(lambda: (folder / "pid_3_1").exists())
    complaints = run.end()
    reason = "its parameters differ from those of the others in 1 of 4 tensors (0.weight)"
    assert f"Rank 3 leaves the run, and a replacement takes its place: {reason}." in complaints
    assert f"the others go on without rank 3 ({reason}): its process is killed." in complaints
    made = len((folder / "samples_3_0").read_text().splitlines())
    assert STEP_OF_FLIP <= made < STEP_OF_FLIP + every
    [log] = read_runs([folder / "runs"])
    changes = read_changes(log.file)
    assert changes is not None
    assert [change.kind for change in changes.changes] == ["left", "joined"]
    assert changes.changes[0].text == f"rank 3 left: {reason}"
    assert newest_windows(log.file.with_name("ranks.jsonl"))[0] is not None, "the times of steps are known, too"
    assert_equal_to_one_process(run, tmp_path / "one", steps, "flip")
    assert_every_sample_once(run, 1)


def test_a_member_that_hangs_is_named_with_its_line_and_replaced(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 90
    folder.mkdir()
    run = Run(folder, steps, "hang", flags=("--replace_hung_after", 14), MESHWRIGHT_HANG_SECONDS="4")
    run.wait_until(lambda: (folder / "pid_3_1").exists())
    complaints = run.end()
    place = r"training\.py:\d+, in the script's own code: `time\.sleep\(600\)`"
    named = re.findall(rf"Rank 3 has kept \d others waiting for (\d+) s: {place}", complaints)
    assert named, complaints
    assert all(4 <= int(seconds) < 14 for seconds in named)
    reason = rf"it kept the others waiting for \d+ s at {place}"
    assert re.search(rf"the others go on without rank 3 \({reason}\): its process is killed\.", complaints)
    [log] = read_runs([folder / "runs"])
    changes = read_changes(log.file)
    assert changes is not None
    assert [change.kind for change in changes.changes] == ["hangs"] * len(named) + ["left", "joined"]
    assert_equal_to_one_process(run, tmp_path / "one", steps, "zero_first")
    assert_every_sample_once(run, 1)


def test_two_replicas_that_differ_end_the_run(tmp_path: Path) -> None:
    words = ("--cpu", "--num_processes", 2, "--survive", "--check_replicas_every", 5)
    launched = run_accelerate("launch", *words, SCRIPT, tmp_path, 40, "flip", directory=tmp_path)
    assert launched.code == 1
    assert "ReplicaMismatchError: The replicas on ranks 0, 1 differ, and no majority tells" in launched.complaints
    assert not list(tmp_path.glob("end_*"))


def test_a_script_that_cannot_take_replacements_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 1))\n"
        "accelerator.backward(model(torch.ones(1, 2)).sum())\n"
    )
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "--survive", script, directory=tmp_path)
    assert launched.code == 1
    assert "--survive in a script that does not call accelerator.resume()" in launched.complaints
