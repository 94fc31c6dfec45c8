"""`save_state` and `load_state` as a script uses them: names, what is kept, hooks, and what does not fit."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.formats import codec
from meshwright.checkpoint.layout import COMMIT_FILE
from meshwright.checkpoint.storage.store import LocalStore
from meshwright.temporary import locked
from tests import warm
from tests.launching import run_script
from tests.ranks import ranks, run_on_ranks
from tests.seeds.documents import DIRECTORY, python_blocks

from .formats.published import Tied
from .runs import Notes, StampedRun

needs_documents = pytest.mark.skipif(not DIRECTORY.is_dir(), reason="the documents are not here: set SEED_DOCUMENTS")
on_one_and_two = pytest.mark.parametrize("world_size", [1, 2])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- names and what is kept -------------------------------------------------------------------------------------------


def test_automatic_names_count_on_after_a_restart_and_the_newest_are_kept(tmp_path: Path) -> None:
    for start in range(0, 6, 2):
        run = StampedRun(tmp_path, project_options={"total_limit": 3})
        for number in (start, start + 1):
            run.stamp(number + 1)
            assert run.accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
    assert names(tmp_path / "checkpoints") == ["checkpoint_3", "checkpoint_4", "checkpoint_5"]
    run = StampedRun(tmp_path)
    assert run.accelerator.load_state().path.endswith("checkpoint_5")
    assert run.stamp_of_all() == 6
    assert run.accelerator.project_configuration.iteration == 6


def test_a_folder_with_checkpoints_of_an_earlier_run_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = StampedRun(tmp_path, project_options={"total_limit": 2})
    for _ in range(2):
        earlier.accelerator.save_state()
    assert "earlier run" not in caplog.text
    run = StampedRun(tmp_path, project_options={"total_limit": 2})
    for _ in range(2):
        run.accelerator.save_state()
    (told,) = [record.getMessage() for record in caplog.records if "earlier run" in record.getMessage()]
    assert "those of this run begin with checkpoint_2." in told
    assert "total_limit=2 counts both: this save deletes checkpoint_0." in told
    assert str(tmp_path / "checkpoints") in told
    caplog.clear()
    resumed = StampedRun(tmp_path, project_options={"total_limit": 2})
    resumed.accelerator.load_state()
    resumed.accelerator.save_state()
    assert "earlier run" not in caplog.text


def test_two_runs_that_save_in_one_folder_at_once_replace_nothing_of_each_other(tmp_path: Path) -> None:
    """Two real processes, each with saves in the background, too."""
    runs = [
        warm.Popen(
            [sys.executable, "-m", "tests.checkpoint.saving_beside_another", str(tmp_path), str(own), str(3 - own)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in (1, 2)
    ]
    saved, complaints = [], []
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        saved.append(json.loads(out))
        complaints.append(err)
    assert not saved[0].keys() & saved[1].keys(), "each run has names of its own"
    assert sorted(saved[0] | saved[1]) == sorted(map(str, (tmp_path / "checkpoints").iterdir())), "and nothing is left"
    assert len(saved[0]) == len(saved[1]) == 5
    for path, stamp in (saved[0] | saved[1]).items():
        run_again = StampedRun(tmp_path)
        run_again.accelerator.load_state(path)
        assert run_again.stamp_of_all() == stamp, path
    assert "Another run saves into" in "".join(complaints)


def test_a_folder_that_somebody_keeps_locked_delays_a_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.checkpoint.storage.store.SECONDS_TO_NAME", 0.2)
    (tmp_path / "checkpoints").mkdir()
    with locked(tmp_path / "checkpoints", 1):
        run = StampedRun(tmp_path, project_options={"total_limit": None})
        assert run.accelerator.save_state().endswith("checkpoint_0")


def test_a_name_that_another_run_takes_where_nothing_locks_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks: the other run commits between the choice of the name and the commit."""
    runs = [StampedRun(tmp_path, project_options={"total_limit": None}) for _ in range(2)]
    for number, run in enumerate(runs):
        run.stamp(number + 1)

    def other_first(*_: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(LocalStore, "is_taken", lambda *_: False)
        runs[1].accelerator.save_state()

    monkeypatch.setattr(runs[0].accelerator._checkpointer.staging, "synchronize", other_first)
    with pytest.raises(CheckpointError, match="Another run has made a checkpoint of this name in the meantime"):
        runs[0].accelerator.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert runs[0].accelerator.resume()
    assert runs[0].stamp_of_all() == 2
    assert runs[0].accelerator.save_state().endswith("checkpoint_1")


def test_going_back_to_an_older_checkpoint_overwrites_none(tmp_path: Path) -> None:
    run = StampedRun(tmp_path, project_options={"total_limit": None})
    for number in range(3):
        run.stamp(number + 1)
        run.accelerator.save_state()
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert run.stamp_of_all() == 1
    assert run.accelerator.save_state().endswith("checkpoint_3")
    assert len(names(tmp_path / "checkpoints")) == 4


def test_the_limit_counts_by_number_and_not_by_time(tmp_path: Path) -> None:
    """Clocks of machines differ."""
    run = StampedRun(tmp_path, project_options={"total_limit": 2})
    record = Path(run.accelerator.save_state()) / COMMIT_FILE
    record.write_text(json.dumps(json.loads(record.read_text()) | {"time": 1e11}))
    run.accelerator.save_state()
    run.accelerator.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]


def test_the_newest_committed_one_is_found_and_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = StampedRun(tmp_path, project_options={"total_limit": None})
    for number in range(3):
        run.stamp(number + 1)
        run.accelerator.save_state()
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "checkpoint_2" / COMMIT_FILE).write_text("{")
    (checkpoints / "checkpoint_3.partial-0123abcd").mkdir()
    (checkpoints / "checkpoint_4").mkdir()
    (checkpoints / "notes").mkdir()
    assert run.accelerator.load_state().path.endswith("checkpoint_1")
    passed_over = re.findall(r"Passed over \S+/(\S+): (.*)\.", caplog.text)
    assert [name for name, _ in passed_over] == ["checkpoint_4", "checkpoint_3.partial-0123abcd", "checkpoint_2"]
    assert passed_over[0][1] == f"it has no {COMMIT_FILE}"
    assert passed_over[1][1] == "it was not finished"
    assert "damaged" in passed_over[2][1]
    assert (checkpoints / "checkpoint_3.partial-0123abcd").is_dir(), "loading deletes nothing"
    run.accelerator.save_state()
    assert names(checkpoints) == [*(f"checkpoint_{number}" for number in (0, 1, 2, 4, 5)), "notes"]


def _is_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _is_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _leads_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def _is_large(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(1 << 34)


def _forged(**fields: Any) -> Any:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | fields))


POISON = {
    "nested deeply": lambda file: file.write_text("[" * 200_000),
    "a huge number": lambda file: file.write_text('{"format": ' + "9" * 5000 + "}"),
    "empty": lambda file: file.write_text(""),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\0"),
    "a list": lambda file: file.write_text("[]"),
    "a folder": _is_a_folder,
    "a pipe": _is_a_pipe,
    "a link to itself": _leads_nowhere,
    "16 GiB": _is_large,
    "of a newer version with more fields": _forged(format=2, extra={}),
    **{
        f"{field}: {value!r}": _forged(**{field: value})
        for field, values in {
            "format": ("9", [], None, True),
            "time": (None, "x", math.nan),
            "folder": (5, None, "../other"),
            "num_processes": ("x", 0, -1),
            "step": (None, "x", 1e400),
            "parts": (None, {"model": 3}),
            "versions": (None,),
            "files": (None, [], {"a": {"size": "a", "checksum": ""}}, {"a": {"size": -1, "checksum": ""}}),
        }.items()
        for value in values
    },
}


def test_one_poisoned_record_stops_neither_a_resume_nor_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = StampedRun(tmp_path, project_options={"total_limit": 2})
    for stamp in (1, 2):
        run.stamp(stamp)
        run.accelerator.save_state()
    checkpoints = tmp_path / "checkpoints"
    good, poisoned = checkpoints / "checkpoint_0", checkpoints / "checkpoint_1"
    record = (poisoned / COMMIT_FILE).read_text()
    for what, poison in POISON.items():
        (poisoned / COMMIT_FILE).write_text(record)
        poison(poisoned / COMMIT_FILE)
        caplog.clear()
        resumed = run.accelerator.resume()
        assert resumed is not None, what
        assert resumed.path == str(good), what
        assert f"Passed over {poisoned}: " in caplog.text, what
        if "newer" in what:
            assert "newer version (format 2" in caplog.text
        with pytest.raises(CheckpointError, match="checkpoint_1 was not loaded"):
            run.accelerator.load_state(poisoned)
        if (poisoned / COMMIT_FILE).is_dir():
            (poisoned / COMMIT_FILE).rmdir()
        else:
            (poisoned / COMMIT_FILE).unlink()
    (poisoned / COMMIT_FILE).write_text("{")
    for _ in range(3):
        run.accelerator.save_state()
    assert names(checkpoints) == ["checkpoint_1", "checkpoint_3", "checkpoint_4"], "what cannot be read is not deleted"


def test_names_of_others_neither_stop_nor_steer_automatic_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    others = [f"checkpoint_{number}" for number in (10**17, 10**240, "٣", "0x7", "-1", "1\n")]
    for name in (*others, "checkpoint_9.partial-00000000", "checkpoint_0007"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "checkpoint_8").write_text("a file")
    (checkpoints / "checkpoint_9").symlink_to("nowhere")
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    for state in ("removed", "replaced"):
        (checkpoints / f"checkpoint_3.{state}-00000000").symlink_to(elsewhere)
    run = StampedRun(tmp_path, project_options={"total_limit": 1})
    assert run.accelerator.save_state().endswith("checkpoint_10")
    assert run.accelerator.save_state().endswith("checkpoint_11")
    assert run.accelerator.resume().path.endswith("checkpoint_11")
    assert {*others, "checkpoint_0007", "checkpoint_8", "checkpoint_9", "checkpoint_11"} <= set(names(checkpoints))
    assert not (checkpoints / "checkpoint_10").exists()
    assert names(elsewhere) == ["precious"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StampedRun(tmp_path, project_options={"total_limit": 1})
    run.accelerator.save_state()

    def refuse(self: LocalStore, name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(LocalStore, "remove", refuse)  # what a folder of another user in a sticky folder raises
    assert run.accelerator.save_state().endswith("checkpoint_1")
    assert "checkpoint_0 could not be deleted: [Errno 13] Permission denied" in caplog.text


def test_a_resume_is_true_and_names_the_checkpoint_and_the_step(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    for start in range(3):
        accelerator = Accelerator(cpu=True, project_config=project)
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        resumed = accelerator.resume()
        if start == 0:
            assert resumed is None
        else:
            assert resumed
            path = tmp_path / "checkpoints" / f"checkpoint_{start - 1}"
            assert str(resumed) == f"Loaded {path} (step {2 * start})"
            assert (resumed.step, resumed.differences) == (2 * start, [])
        for _ in range(2):
            accelerator.backward(model(torch.ones(2)).sum())
            optimizer.step()
        accelerator.save_state()


def test_without_any_checkpoint_there_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"found no checkpoint in {tmp_path}"):
        StampedRun(tmp_path).accelerator.load_state()
    accelerator = Accelerator(cpu=True)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ValueError, match="no project folder was given"):
            call()


def test_a_folder_beside_automatic_names_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = StampedRun(tmp_path)
    for _ in range(2):
        run.accelerator.save_state(tmp_path / "mine")
    assert names(tmp_path) == ["checkpoints"]
    assert caplog.text.count("the folder is not used") == 1


def test_a_folder_of_results_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("{}")
    run = StampedRun()
    for number in (1, 2):
        run.stamp(number)
        run.accelerator.save_state(tmp_path / "out")
    assert (tmp_path / "out" / "results.json").read_text() == "{}"
    assert names(tmp_path) == ["out"]
    run.stamp(3)
    run.accelerator.load_state(tmp_path / "out")
    assert run.stamp_of_all() == 2


def save_many(folder: Path) -> int:
    run = StampedRun(folder)
    for number in range(9):
        run.stamp(number)
        run.accelerator.save_state(wait=number % 3 > 0)
    run.accelerator.load_state()
    return run.stamp_of_all()


def test_saves_that_follow_each_other_do_not_meet_the_deleting_of_the_last(tmp_path: Path) -> None:
    assert run_on_ranks(3, save_many, folder=tmp_path) == [8, 8, 8]
    assert names(tmp_path / "checkpoints") == ["checkpoint_8"]


def save_on_two_hosts(folder: Path) -> list[str]:
    """Let ranks 0 and 1 be one host and ranks 2 and 3 another; a path that means another folder on each is theirs."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    here = folder / f"host-{rank // 2}"
    here.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(here)
    try:
        run = StampedRun("/proc/self/cwd", project_options={"save_on_each_node": True})
        for number in (1, 2):
            run.stamp(number)
            run.accelerator.save_state()
        run.stamp(3)
        run.accelerator.load_state(verify="hash")
        assert run.stamp_of_all() == 2
        return names(here / "checkpoints" / "checkpoint_1")
    finally:
        os.chdir(before)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")
def test_every_host_keeps_a_whole_checkpoint_of_its_own(tmp_path: Path) -> None:
    first, _, second, _ = run_on_ranks(4, save_on_two_hosts, folder=tmp_path)
    common = {COMMIT_FILE, "model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "progress.bin"}
    common |= {"custom_checkpoint_0.pkl"}
    assert set(first) == common | {"random_states_0.pkl", "random_states_1.pkl"}
    assert set(second) == common | {"random_states_2.pkl", "random_states_3.pkl"}
    assert names(tmp_path / "host-1" / "checkpoints") == ["checkpoint_1"]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_what_cannot_be_registered_is_refused_by_position_and_type() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"these have none: Item at index 1, `int`; Item at index 2, `str`"):
        accelerator.register_for_checkpointing(Notes(), 3, "text")


def accelerator_with(*objects: Any, registered: int = 0) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    have = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": DataLoader(range(4))}
    accelerator.prepare(*(have[name] for name in objects))
    for _ in range(registered):
        accelerator.register_for_checkpointing(Notes())
    return accelerator, have


def load_into_another_run(folder: Path) -> tuple[list[str], list[str], str, bool]:
    saving, have = accelerator_with("model", "optimizer", "loader", registered=2)
    saving.save_state(folder)
    loading, other = accelerator_with("model", "optimizer", "scheduler", "loader", registered=1)
    with pytest.raises(CheckpointError) as error:
        loading.load_state(folder)
    untouched = not torch.equal(have["model"].weight, other["model"].weight)
    report = loading.load_state(folder, strict=False)
    assert torch.equal(have["model"].weight, other["model"].weight) or saving.process_index
    return report.missing, report.extra, str(error.value), untouched


@on_one_and_two
def test_missing_and_extra_parts_are_listed_or_returned(world_size: int, tmp_path: Path) -> None:
    for missing, extra, error, untouched in run_on_ranks(world_size, load_into_another_run, folder=tmp_path / "ckpt"):
        assert missing == ["scheduler (scheduler.bin)"]
        assert extra == ["registered object_1 (custom_checkpoint_1.pkl)"]
        assert f"missing in {tmp_path / 'ckpt'}: scheduler (scheduler.bin)" in error
        assert f"in {tmp_path / 'ckpt'}, but not prepared here: registered object_1" in error
        assert "strict=False loads the rest" in error
        assert untouched, "nothing is restored where something does not fit"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda a: a.prepare(nn.Linear(3, 2)), r"model: weight has shape \(2, 3\) here and \(2, 2\) in the checkpoint"),
        (
            lambda a: a.prepare(nn.Linear(2, 2, bias=False)),
            "model: the checkpoint has bias, which the model does not have",
        ),
        (
            lambda a: a.prepare(nn.Sequential(nn.Linear(2, 2))),
            "lacks 0.bias, 0.weight; the checkpoint has bias, weight",
        ),
        (
            lambda a: a.prepare(
                *(lambda m: (m, torch.optim.SGD([{"params": [m.weight]}, {"params": [m.bias]}])))(nn.Linear(2, 2))
            ),
            r"optimizer: the groups have \[1, 1\] parameters here and \[2\] in the checkpoint",
        ),
    ],
)
def test_a_part_of_another_shape_is_described(prepare: Any, message: str, tmp_path: Path) -> None:
    saving, _ = accelerator_with("model", "optimizer")
    saving.save_state(tmp_path / "ckpt")
    loading = Accelerator(cpu=True)
    prepare(loading)
    with pytest.raises(CheckpointError, match=message):
        loading.load_state(tmp_path / "ckpt", strict=False)


def test_a_loader_with_another_batch_size_is_refused_before_anything_is_restored(tmp_path: Path) -> None:
    def run_with(batch_size: int) -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(nn.Linear(2, 2), DataLoader(range(24), batch_size=batch_size))
        return accelerator, model, loader

    saving, _, loader = run_with(4)
    for _ in loader:
        saving.save_state(tmp_path / "ckpt")
        break
    loading, model, _ = run_with(3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match="batches of 3 cannot begin there"):
        loading.load_state(tmp_path / "ckpt")
    assert torch.equal(model.weight, before)


def test_an_unknown_way_to_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify='all' is unknown: choose size"):
        Accelerator(cpu=True).load_state(tmp_path, verify="all")


def test_weights_in_torchs_format_come_back(tmp_path: Path) -> None:
    run = StampedRun()
    run.stamp(1)
    run.accelerator.save_state(tmp_path / "ckpt", safe_serialization=False)
    assert "pytorch_model.bin" in names(tmp_path / "ckpt")
    run.stamp(2)
    run.accelerator.load_state(tmp_path / "ckpt")
    assert run.stamp_of_all() == 1
    run.stamp(3)
    run.accelerator.save_state(tmp_path / "ckpt")
    assert "pytorch_model.bin" not in names(tmp_path / "ckpt"), "replaced, not mixed"
    run.accelerator.load_state(tmp_path / "ckpt")
    assert run.stamp_of_all() == 3


@pytest.mark.parametrize("wait", [True, False])
def test_tied_weights_are_saved_once_and_come_back_tied(wait: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(Tied())
    saved = model.embedding.weight.clone()
    accelerator.save_state(tmp_path / "ckpt", wait=wait)
    with torch.no_grad():
        model.embedding.weight.zero_()
    accelerator.load_state(tmp_path / "ckpt")
    assert "head.weight" not in load_file(tmp_path / "ckpt" / "model.safetensors")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, saved)


# --- the background ---------------------------------------------------------------------------------------------------


@contextmanager
def writing_held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let nothing be written until the event is set."""
    go_on = threading.Event()
    write = codec.write
    monkeypatch.setattr(codec, "write", lambda *args: (go_on.wait(30), write(*args))[1])
    yield go_on
    go_on.set()


class Numbers(Notes):
    """An object whose state is not made of tensors, and goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.items = np.zeros(3), [1, {"a": [2]}]

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array, "items": self.items, "stamp": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array, self.items = state["array"], state["items"]


def test_training_may_change_everything_while_it_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, numbers = StampedRun(), Numbers()
    run.accelerator.register_for_checkpointing(numbers)
    run.stamp(1)
    with writing_held_up(monkeypatch) as go_on:
        run.accelerator.save_state(tmp_path / "ckpt", wait=False)
        run.stamp(2)
        numbers.array += 1
        numbers.items[1]["a"].append(3)  # type: ignore[index]
        assert not (tmp_path / "ckpt").exists()
        go_on.set()
        run.accelerator.load_state(tmp_path / "ckpt")
    assert run.stamp_of_all() == 1
    assert numbers.array.tolist() == [0, 0, 0]
    assert numbers.items == [1, {"a": [2]}]


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_weights_are_saved_as_hooks_leave_them(tmp_path: Path) -> None:
    accelerator, _ = accelerator_with("model")

    def replace(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        weights[0] = {"weight": torch.ones(2, 2)}

    def remove_one(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        del weights[0]["bias"]

    for hook, kept in ((replace, {"weight"}), (remove_one, {"weight"}), (None, {"weight", "bias"})):
        handle = accelerator.register_save_state_pre_hook(hook) if hook is not None else None
        accelerator.save_state(tmp_path / "ckpt")
        assert load_file(tmp_path / "ckpt" / "model.safetensors").keys() == kept
        if handle is not None:
            handle.remove()


def test_a_hook_that_empties_the_list_of_models_does_not_empty_the_accelerator(tmp_path: Path) -> None:
    accelerator, _ = accelerator_with("model")

    def pop_both(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        models.pop()
        weights.pop()

    accelerator.register_save_state_pre_hook(pop_both)
    for _ in range(2):
        accelerator.save_state(tmp_path / "ckpt")
    assert "model.safetensors" not in names(tmp_path / "ckpt")
    assert len(accelerator._models) == 1


def test_what_a_hook_writes_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    run = StampedRun(tmp_path)

    def write(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        Path(output_dir, "more").mkdir()
        Path(output_dir, "more", "mine.txt").write_text("words")

    run.accelerator.register_save_state_pre_hook(write)
    saved = Path(run.accelerator.save_state())
    assert (saved / "more" / "mine.txt").read_text() == "words"
    assert "more/mine.txt" in json.loads((saved / COMMIT_FILE).read_text())["files"]
    (saved / "more" / "mine.txt").write_text("other")
    with pytest.raises(CheckpointError, match=r"more/mine\.txt is damaged"):
        run.accelerator.load_state(verify="hash")


class Pretrained(nn.Module):
    """What diffusers' and transformers' models have of their own."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Linear(3, 3)

    def register_to_config(self, **config: Any) -> None:
        self.config = config

    def save_pretrained(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        save_file(self.state_dict(), f"{folder}/weights.safetensors")
        Path(folder, "config.json").write_text(json.dumps(self.config))

    @classmethod
    def from_pretrained(cls, folder: str, subfolder: str) -> Pretrained:
        model = cls(**json.loads(Path(folder, subfolder, "config.json").read_text()))
        model.load_state_dict(load_file(f"{folder}/{subfolder}/weights.safetensors"))
        return model


class CLIPVisionModel(Pretrained):
    pass


class UNet2DDobuleConditionModel(Pretrained):
    pass


def run_document_004(folder: Path) -> list[str]:
    """Register the hooks of the document, as they are written there, and save and load with them."""
    (code,) = [block for block in python_blocks("004") if "save_model_hook" in block]
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    unet, encoder = UNet2DDobuleConditionModel(depth=3), CLIPVisionModel(width=5)
    optimizer = torch.optim.AdamW([*unet.parameters(), *encoder.parameters()], lr=0.1)
    prepared_unet, prepared_encoder, optimizer = accelerator.prepare(unet, encoder, optimizer)
    names_of_script = {
        "os": os,
        "accelerator": accelerator,
        "unet": prepared_unet,
        "image_encoder": prepared_encoder,
        "CLIPVisionModel": CLIPVisionModel,
        "UNet2DDobuleConditionModel": UNet2DDobuleConditionModel,
    }
    exec(code, names_of_script)
    saved = [model.layer.weight.clone() for model in (unet, encoder)]
    path = accelerator.save_state(folder)
    for model in (unet, encoder):
        model.register_to_config()
        nn.init.zeros_(model.layer.weight)
    accelerator.load_state(folder)
    assert torch.equal(unet.layer.weight, saved[0])
    assert torch.equal(encoder.layer.weight, saved[1])
    assert unet.config == {"depth": 3}
    assert encoder.config == {"width": 5}
    assert len(accelerator._models) == 2
    return sorted(str(found.relative_to(path)) for found in Path(path).rglob("*") if found.is_file())


@needs_documents
@on_one_and_two
def test_the_hooks_of_document_004_work_as_they_are_written(world_size: int, tmp_path: Path) -> None:
    for files in run_on_ranks(world_size, run_document_004, folder=tmp_path / "ckpt"):
        assert files == sorted(
            [
                COMMIT_FILE,
                *(
                    f"{model}/{file}"
                    for model in ("unet", "image_encoder")
                    for file in ("config.json", "weights.safetensors")
                ),
                "optimizer.bin",
                "progress.bin",
                *(f"random_states_{rank}.pkl" for rank in range(world_size)),
            ]
        )


# --- generators -------------------------------------------------------------------------------------------------------


def programs_of_document_002() -> tuple[str, str]:
    """Return the two programs without the author's arrows, and without what they printed for him."""
    saves, loads = (block for block in python_blocks("002") if "checkpoint_path" in block)
    programs = []
    for block in (saves, loads):
        code = re.split(r"^(?:\$|''')", block, maxsplit=1, flags=re.MULTILINE)[0]
        programs.append(re.sub(r" *<<<", "", code))
    return programs[0], programs[1]


@needs_documents
@on_one_and_two
def test_the_random_state_programs_of_document_002_print_what_it_says(world_size: int, tmp_path: Path) -> None:
    for name, code in zip(("saves.py", "loads.py"), programs_of_document_002(), strict=True):
        (tmp_path / name).write_text(code)
    saved = run_script(tmp_path / "saves.py", world_size=world_size, directory=tmp_path).splitlines()
    assert len(saved) == 2
    runs = [run_script(tmp_path / "loads.py", world_size=world_size, directory=tmp_path).splitlines() for _ in range(2)]
    first, second = runs
    assert len(first) == len(second) == 3
    assert first[0] != second[0], "before load_state the numbers are random"
    assert first[1:] == second[1:], "after it they are those of the checkpoint"
    assert first[1] != first[2]


def draw(folder: Path, seed: int) -> list[float]:
    accelerator = Accelerator(cpu=True)
    set_seed(seed, device_specific=True)
    if seed == 1:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [torch.rand(()).item(), float(np.random.rand()), __import__("random").random()]


@on_one_and_two
def test_every_rank_draws_the_numbers_that_it_would_have_drawn(world_size: int, tmp_path: Path) -> None:
    drawn = [run_on_ranks(world_size, draw, folder=tmp_path / "check", seed=seed) for seed in (1, 2, 3)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({numbers[0] for numbers in drawn[0]}) == world_size


# --- loaders ----------------------------------------------------------------------------------------------------------


def consume(folder: Path, steps: int, config: dict[str, Any], resume: bool, workers: int) -> list[int]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    set_seed(1 if not resume else 2)
    loader = accelerator.prepare(DataLoader(range(48), batch_size=2, shuffle=True, num_workers=workers))
    if resume:
        accelerator.resume(folder)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if step == steps - 1:
            accelerator.save_state(folder)
            break
    return seen


@on_one_and_two
@pytest.mark.parametrize(
    ("config", "workers"),
    [
        ({}, 0),
        ({"dispatch_batches": True}, 0),
        ({"use_stateful_dataloader": True}, 1),
        ({"use_seedable_sampler": True}, 0),
    ],
    ids=["shard", "dispatch", "stateful", "seedable"],
)
def test_the_rest_of_an_epoch_comes_after_a_resume_whatever_the_loader(
    world_size: int, config: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    if "use_stateful_dataloader" in config:
        pytest.importorskip("torchdata")
    options: dict[str, Any] = {"folder": tmp_path / "ckpt", "config": config, "workers": workers}
    begun = run_on_ranks(world_size, consume, steps=3, resume=False, **options)[0]
    rest = run_on_ranks(world_size, consume, steps=99, resume=True, **options)[0]
    assert len(begun) == 3 * 2 * world_size
    assert sorted(begun + rest) == list(range(48))


# --- telling ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_one_process_tells(tmp_path: Path) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.save_state(tmp_path / "ckpt")
    logging.getLogger("meshwright").removeHandler(handler)
    warnings_of_window = [
        text for text in messages if "first 1 of 3 micro-batches are not part of a checkpoint" in text
    ]
    assert len(warnings_of_window) == (1 if accelerator.is_main_process else 0)


def test_a_checkpoint_can_be_moved_and_copied(tmp_path: Path) -> None:
    run = StampedRun()
    run.stamp(1)
    run.accelerator.save_state(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    run.stamp(2)
    run.accelerator.load_state(tmp_path / "b", verify="hash")
    assert run.stamp_of_all() == 1


def test_misspelt_options_are_told_by_a_save_and_refused_by_a_load(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"save_state\(\) was given wiat, which .* Did you mean wait with wiat\?"):
        accelerator.save_state(tmp_path / "a", wiat=False)
    with pytest.warns(UserWarning, match=r"save_state\(\) was given save_latest, which nothing reads here"):
        accelerator.save_state(tmp_path / "a", save_latest=False)
    weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    for method in (accelerator.load_state, accelerator.resume):
        with pytest.raises(TypeError, match=rf"^{method.__name__}\(\) got .* 'stict'. Did you mean strict\?$"):
            method(tmp_path / "a", stict=False)
        with pytest.raises(
            TypeError, match=rf"^{method.__name__}\(\) got .* 'colour': .*Linear.load_state_dict does not"
        ):
            method(tmp_path / "a", colour=1)
        assert not model.weight.any()
    with pytest.raises(TypeError, match="Did you mean strict"):
        accelerator.resume(tmp_path / "there is none", stict=False)
    accelerator.load_state(tmp_path / "a", assign=True)
    assert torch.equal(model.weight, weights)
