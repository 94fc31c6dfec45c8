"""Copies in host memory: after the end of all processes a run goes on from them, bitwise equal."""

from __future__ import annotations

import logging
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from meshwright import Accelerator, LocalSGD, PartialState
from meshwright.checkpoint.commit.copies import MemoryCopies
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.errors import UnsupportedSettingError
from meshwright.launch.machines.memory import SHARED_MEMORY
from tests.clusters.machines import ACCELERATE, machines, why_not
from tests.launching import Launched, run_accelerate
from tests.sizes import sized

SCRIPT = Path(__file__).with_name("copied_training.py")
EVERY, KILLED_AT, NEWEST = 4, 12, 8
"""The copy of step 8 is complete before step 12 begins, and that of step 12 is not made."""


def folders_in_memory() -> set[Path]:
    return set(SHARED_MEMORY.glob("accelerate-copies-*"))


def launch(folder: Path, way: str, event: str, *words: object) -> Launched:
    folder.mkdir()
    processes = 4 if way == "hsdp" else 2
    return run_accelerate(
        "launch", "--cpu", "--num_processes", processes, *words, SCRIPT, folder, way, event, directory=folder
    )


def assert_equal_ends(folder: Path, undisturbed: Path) -> None:
    """Parameters, moments, rates, registered objects and generators of every rank are bitwise equal."""
    ends = sorted(undisturbed.glob("end_*"))
    assert ends
    for file in ends:
        wanted, found = (torch.load(path, weights_only=False) for path in (file, folder / file.name))
        for name, value in wanted.items():
            for one, other in zip(tree_leaves(value), tree_leaves(found[name]), strict=True):
                same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
                assert same, (file.name, name, one, other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[object, ...], Path] = {}

    def run(way: str, *words: object) -> Path:
        key = (way, *words)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / way
            assert launch(made[key], way, "none", *words).code == 0
        return made[key]

    return run


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp"])
def test_a_run_whose_processes_are_all_killed_goes_on_from_memory(
    way: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    before = folders_in_memory()
    run = launch(tmp_path / "run", way, f"kill:{KILLED_AT}", "--max_restarts", 1, "--memory_copies_every", EVERY)
    assert run.code == 0, run.complaints
    assert run.complaints.count(f"Resumed from memory: step {NEWEST}.") == 1
    assert not list((tmp_path / "run").glob("checkpoints*")), "nothing was written to the disk"
    assert_equal_ends(tmp_path / "run", undisturbed(way))
    assert folders_in_memory() == before, "the launcher removes the copies"


@pytest.mark.parametrize("way", sized(gate=["ddp"], nightly=["ddp", "hsdp"]))
def test_a_run_whose_replicas_come_and_go_goes_on_from_memory_when_all_are_killed(
    way: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    words = ("--survive", "--max_restarts", 1, "--memory_copies_every", EVERY)
    run = launch(tmp_path / "run", way, f"kill:{KILLED_AT}", *words)
    assert run.code == 0, run.complaints
    assert f"Resumed from memory: step {NEWEST}." in run.complaints
    assert_equal_ends(tmp_path / "run", undisturbed(way, "--survive"))


def test_the_replacement_of_the_rank_that_writes_makes_copies_too(tmp_path: Path) -> None:
    words = ("--survive", "--max_restarts", 1, "--memory_copies_every", EVERY)
    run = launch(tmp_path / "run", "ddp", "kill:5:0:60", *words)
    assert run.code == 0, run.complaints
    assert "rank 0 has joined; 2 replicas train." in run.complaints
    assert "Resumed from memory: step " in run.complaints
    assert 52 <= int(run.complaints.partition("Resumed from memory: step ")[2].partition(".")[0]) <= 56


def test_a_kill_in_the_middle_of_a_copy_leaves_the_one_before(tmp_path: Path, undisturbed: Callable[..., Path]) -> None:
    restarts = ("--max_restarts", 1, "--memory_copies_every", EVERY)
    run = launch(tmp_path / "run", "fsdp", f"in_copy:{KILLED_AT}", *restarts)
    assert run.code == 0, run.complaints
    assert f"Resumed from memory: step {NEWEST}." in run.complaints
    assert_equal_ends(tmp_path / "run", undisturbed("fsdp"))


def test_a_folder_of_the_users_is_found_by_the_next_launch_and_empty_after_the_end(
    tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    copies = ("--memory_copies_every", EVERY, "--memory_copies_dir", tmp_path / "copies")
    run = tmp_path / "run"
    killed = launch(run, "ddp", f"kill:{KILLED_AT}", *copies)
    assert killed.code == 137, killed.complaints
    assert len(list((tmp_path / "copies").rglob("*.json"))) == 6, (
        "two copies: one state, and the generators of each rank"
    )
    again = run_accelerate("launch", "--cpu", "--num_processes", 2, *copies, SCRIPT, run, "ddp", "none", directory=run)
    assert again.code == 0, again.complaints
    assert f"Resumed from memory: step {NEWEST}." in again.complaints
    assert_equal_ends(run, undisturbed("ddp"))
    assert [path for path in (tmp_path / "copies").rglob("*") if path.is_file()] == []


def test_copies_of_another_number_of_processes_are_not_used_and_that_is_said(tmp_path: Path) -> None:
    copies = ("--memory_copies_every", EVERY, "--memory_copies_dir", tmp_path / "copies")
    run = tmp_path / "run"
    assert launch(run, "ddp", f"kill:{KILLED_AT}", *copies).code == 137
    again = run_accelerate("launch", "--cpu", "--num_processes", 1, *copies, SCRIPT, run, "ddp", "none", directory=run)
    assert again.code == 0, again.complaints
    assert "Copies in memory of 2 processes are not used, and are deleted: this run has 1." in again.complaints
    assert "Resumed" not in again.complaints


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("way", sized(gate=["fsdp"], nightly=["ddp", "fsdp", "hsdp"]))
def test_a_machine_that_lost_its_copies_gets_them_from_its_neighbour(
    way: str, tmp_path: Path, undisturbed: Callable[..., Path]
) -> None:
    processes = 4 if way == "hsdp" else 2
    lost = processes // 2  # the first rank of the second machine
    with machines(["n1", "n2"], tmp_path) as made:
        launched = [
            machine.start(
                *(
                    *ACCELERATE,
                    "launch",
                    "--cpu",
                    "--num_machines",
                    2,
                    "--num_processes",
                    processes,
                    "--machine_rank",
                    rank,
                    "--main_process_ip",
                    "n1",
                ),
                *(
                    "--max_restarts",
                    1,
                    "--memory_copies_every",
                    EVERY,
                    SCRIPT,
                    tmp_path,
                    way,
                    f"lose:{KILLED_AT}:{lost}",
                ),
            )
            for rank, machine in enumerate(made)
        ]
        assert [running.wait() for running in launched] == [0, 0], "".join(one.printed for one in launched)
    assert (
        f"Resumed from memory: step {NEWEST}; the machines of ranks [{lost}] got it from their neighbours."
        in launched[0].printed
    )
    assert_equal_ends(tmp_path, undisturbed(way))


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_tmpfs_that_is_too_small_is_refused_after_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    words = [sys.executable, "-m", "meshwright", "launch", "--cpu", "--num_processes", 2]
    words += [
        "--memory_copies_every",
        EVERY,
        "--memory_copies_dir",
        tmp_path / "small",
        SCRIPT,
        tmp_path,
        "ddp",
        "none",
    ]
    mount = f"mount -t tmpfs -o size=16k none {shlex.quote(str(tmp_path / 'small'))}"
    command = f"{mount} && exec {shlex.join(map(str, words))}"
    run = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr
    assert "--memory_copies_every cannot be used: the copies of this machine need 0.03 MB" in run.stderr
    assert "has room for 0.0" in run.stderr


# --- one process ------------------------------------------------------------------------------------------------------


class Training:
    """A training on one process, whose copies are made in a folder."""

    def __init__(self, folder: Path, *, width: int = 3, resumes: bool = True) -> None:
        PartialState._reset_state()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_dir=folder)
        model = torch.nn.Linear(4, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.report = self.accelerator.resume() if resumes else None

    def train(self, steps: int, after_step: Callable[[], Any] = lambda: None) -> None:
        while True:
            for batch in self.loader:
                if self.optimizer.steps_taken == steps:
                    return
                self.accelerator.backward(self.model(batch).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                after_step()

    @property
    def copies(self) -> MemoryCopies:
        copies = self.accelerator.checkpointer.copies
        assert copies is not None
        copies.wait()
        return copies


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MESHWRIGHT_MEMORY_COPIES_EVERY", "2")
    monkeypatch.setenv("MESHWRIGHT_MEMORY_COPIES_DIR", str(tmp_path / "copies"))
    yield tmp_path / "run"
    PartialState._reset_state()


def test_the_newer_of_copy_and_checkpoint_is_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="meshwright")
    first = Training(folder)
    assert first.report is None
    first.accelerator.project_configuration.automatic_checkpoint_naming = True
    first.train(3)
    first.accelerator.save_state()
    first.train(7)
    assert first.copies.folder.records()
    second = Training(folder)
    assert second.report is not None
    assert second.report.step == 6
    assert "Resumed from memory: step 6, 3 steps after the newest checkpoint on disk." in caplog.text
    second.train(7)
    assert torch.equal(second.model.weight, first.model.weight)
    second.accelerator.project_configuration.automatic_checkpoint_naming = True
    second.accelerator.save_state()
    third = Training(folder)
    assert third.report is not None
    assert third.report.step == 7, "the checkpoint is newer"
    assert third.copies.folder.records() == [], "the run leaves the path of the copies"


def test_a_damaged_copy_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="meshwright")
    first = Training(folder)
    first.train(7)
    newest = max(first.copies.folder.records(), key=lambda record: (record.step, record.kind))
    assert newest.kind == "state"
    path = first.copies.folder.file_of(newest)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    second = Training(folder)
    assert second.report is not None
    assert second.report.step == 4
    assert "The copy of step 6 in memory is not used: " in caplog.text
    assert "is damaged: its checksum differs" in caplog.text


def test_a_copy_of_another_model_is_refused(folder: Path) -> None:
    first = Training(folder)
    first.train(5)
    first.copies.wait()
    with pytest.raises(
        CheckpointError, match=r"copy of step 4 in memory.* model: bias has shape \(5,\) here and \(3,\)"
    ):
        Training(folder, width=5)
    assert first.copies.folder.records(), "a mistake in the script deletes nothing"


def test_a_loop_inside_of_the_training_loop_is_no_place_for_a_copy(folder: Path) -> None:
    training = Training(folder)
    inner = training.accelerator.prepare_data_loader(DataLoader(torch.zeros(4, 4), batch_size=1))
    copied: list[int] = []

    def evaluate() -> None:
        for _ in inner:
            copied.extend(record.step for record in training.copies.folder.records())

    training.train(2, evaluate)
    assert copied == []
    assert {record.step for record in training.copies.folder.records()} == {2}


def test_a_copy_is_late_if_no_step_before_it_awaited_the_last_one(folder: Path) -> None:
    training = Training(folder)

    def left_early() -> Iterator[torch.Tensor]:
        for batch in training.loader:
            yield batch
            if training.optimizer.steps_taken == 3:
                return

    loop = (batch for _ in range(3) for batch in left_early())
    for batch in loop:
        if training.optimizer.steps_taken == 6:
            break
        training.accelerator.backward(training.model(batch).square().mean())
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert {record.step for record in training.copies.folder.records()} == {2, 5}


def test_a_script_that_does_not_resume_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"in a script that does not call accelerator\.resume"):
        Training(folder, resumes=False).train(2)


def test_copies_without_a_folder_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_MEMORY_COPIES_DIR")
    with pytest.raises(UnsupportedSettingError, match="nothing says which folder the copies of this run are in"):
        Training(folder)


def test_a_copy_that_fails_does_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(folder)
    training.train(5)
    before = {record.step for record in training.copies.folder.records()}
    monkeypatch.setattr("meshwright.checkpoint.commit.copies._save", lambda *_: Path("/nowhere/at/all").read_bytes())
    training.train(7)
    assert before == {2, 4}
    assert max(record.step for record in training.copies.folder.records()) == 4
    assert "has made no copy of step 6 in memory, and the one before it stays: FileNotFoundError" in caplog.text


def test_the_cost_of_a_copy_is_recorded(folder: Path) -> None:
    training = Training(folder)
    training.train(5)
    assert len(training.copies.costs) == 2
    assert training.copies.costs[-1].num_bytes > 3 * training.model.weight.nbytes
    assert training.copies.costs[-1].seconds_in_loop > 0
    assert training.copies.costs[-1].seconds_in_background > 0


def test_a_loader_that_is_being_copied_can_be_pickled(folder: Path) -> None:
    training = Training(folder)
    assert training.copies in list(training.accelerator.instruments)
    pickle.loads(pickle.dumps(training.loader))
    assert training.copies in list(training.accelerator.instruments)


def test_local_sgd_is_refused_because_its_replicas_differ(folder: Path) -> None:
    training = Training(folder)
    with pytest.raises(UnsupportedSettingError, match="LocalSGD with --memory_copies_every cannot be used"):
        LocalSGD(training.accelerator, training.model, 4)
