"""Every rank reports a fault; the earlier checkpoint is untouched, and no rank hangs."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.layout import COMMIT_FILE
from tests.ranks import run_on_ranks
from tests.sizes import on_two_processes

from ..runs import Notes, StampedRun

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
on_one_and_two = pytest.mark.parametrize("world_size", [1, 2])


def save(folder: Path, stamp: int) -> str | None:
    """Save on one rank of a world, and return its error."""
    run = StampedRun(folder)
    run.stamp(stamp)
    return error_of(run.accelerator.save_state)


def load(folder: Path, **options: Any) -> tuple[int, str | None]:
    """Load on one rank; return the stamp of all parts and the error."""
    run = StampedRun(folder)
    run.stamp(9)
    error = error_of(lambda: run.accelerator.load_state(**options))
    return run.stamp_of_all(), error


def error_of(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def the_same_on_all(errors: list[str | None]) -> str:
    assert len(set(errors)) == 1, f"the ranks say different things: {errors}"
    assert errors[0] is not None, "nothing was refused"
    return errors[0]


def assert_kept(world_size: int, folder: Path, stamp: int) -> None:
    """What was there loads, and nothing else is there."""
    assert run_on_ranks(world_size, load, folder=folder, verify="hash") == [(stamp, None)] * world_size
    (only,) = (folder / "checkpoints").iterdir()
    assert (only / COMMIT_FILE).is_file()


class Disk:
    """A small file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=16m", "none", str(folder))

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words], check=True, capture_output=True)

    def remount(self, option: str) -> None:
        self._mount("-o", f"remount,{option}", str(self.folder))

    def leave_free(self, size: int) -> None:
        used = (usage := os.statvfs(self.folder)).f_frsize * (usage.f_blocks - usage.f_bfree)
        self.remount(f"size={used + size}")

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        made = Disk(tmp_path / "disk")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system can only be mounted by root")
    yield made
    made.unmount()


@on_two_processes
def test_a_full_disk_is_named_wherever_it_becomes_full(world_size: int, disk: Disk) -> None:
    assert run_on_ranks(world_size, save, folder=disk.folder, stamp=1) == [None] * world_size
    needed = sum(path.stat().st_blocks * 512 for path in disk.folder.rglob("*"))
    files: set[str] = set()
    for free in range(0, needed, needed // 8):
        disk.leave_free(free)
        errors = run_on_ranks(world_size, save, folder=disk.folder, stamp=2)
        if errors[0] is None:  # rank 0 had room for its part; then it deleted the older one, and rank 1 had room too
            assert world_size == 2
            break
        error = the_same_on_all(errors)
        assert "checkpoints/checkpoint_1 was not " in error
        assert "No space left on device" in error
        assert error.endswith("Earlier checkpoints are untouched.")
        files |= set(re.findall(r"\w+\.(?:bin|pkl|pt|safetensors|json)", error))
        assert_kept(world_size, disk.folder, 1)
    assert {"optimizer.bin", "model.safetensors"} <= files
    disk.leave_free(8 << 20)
    assert run_on_ranks(world_size, save, folder=disk.folder, stamp=3) == [None] * world_size
    assert_kept(world_size, disk.folder, 3)


@on_one_and_two
def test_a_folder_that_cannot_be_written_is_named(world_size: int, tmp_path: Path, request: Any) -> None:
    folder = tmp_path / "project"
    if IS_ROOT:  # whom permissions do not stop
        disk = request.getfixturevalue("disk")
        folder = disk.folder
    run_on_ranks(world_size, save, folder=folder, stamp=1)
    if IS_ROOT:
        disk.remount("ro")
    else:
        (folder / "checkpoints").chmod(stat.S_IRUSR | stat.S_IXUSR)
    error = the_same_on_all(run_on_ranks(world_size, save, folder=folder, stamp=2))
    assert "checkpoint_1 was not made" in error
    assert "Read-only file system" in error or "Permission denied" in error
    assert f"{folder}/checkpoints/checkpoint_1.partial-" in error
    assert_kept(world_size, folder, 1)


def save_with_a_hook(folder: Path, stamp: int, rank: int, hook: Callable[..., None]) -> str | None:
    run = StampedRun(folder)
    run.stamp(stamp)
    if run.accelerator.process_index == rank:
        run.accelerator.register_save_state_pre_hook(hook)
    return error_of(run.accelerator.save_state)


def block_the_file(models: Any, weights: Any, output_dir: str) -> None:
    Path(output_dir, "random_states_1.pkl").mkdir()  # where rank 1 is to write its generators


def fail(models: Any, weights: Any, output_dir: str) -> None:
    raise OSError(5, "Input/output error", f"{output_dir}/mine.bin")


@pytest.mark.parametrize(
    ("hook", "message"),
    [(block_the_file, r"generators (random_states_1.pkl) could not be written"), (fail, "mine.bin")],
)
def test_a_rank_that_cannot_add_its_files_is_named_and_the_checkpoint_stays(
    hook: Any, message: str, tmp_path: Path
) -> None:
    errors = run_on_ranks(2, save_with_a_hook, folder=tmp_path, stamp=2, rank=1, hook=hook)
    assert errors[0] is None, "rank 0 waits for nobody"
    assert "files of this rank: rank 1: " in errors[1]
    assert message in errors[1]
    assert run_on_ranks(2, load_without_generators, folder=tmp_path) == [2, 2]


def load_without_generators(folder: Path) -> int:
    run = StampedRun(folder)
    (change,) = run.accelerator.load_state(verify="hash").changes
    assert "not finished, on rank 1" in change
    return run.stamp_of_all(but=["generator"])


class Unable(Notes):
    """A registered object that fails, on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if int(os.environ.get("RANK", "0")) == self.rank:
            raise LookupError("nothing to tell")
        return super().state_dict()


class Unpicklable(Notes):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


def save_with(folder: Path, kind: str, **save_options: Any) -> str | None:
    run = StampedRun(folder)
    run.stamp(2)
    run.accelerator.register_for_checkpointing(Unpicklable() if kind == "unpicklable" else Unable(int(kind)))
    return error_of(lambda: (run.accelerator.save_state(**save_options), run.accelerator.checkpointer.wait()))


@on_one_and_two
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [("0", "could not be captured: LookupError"), ("unpicklable", "could not be written: ")],
)
def test_an_object_that_cannot_be_saved_is_named(
    world_size: int, wait: bool, kind: str, message: str, tmp_path: Path
) -> None:
    run_on_ranks(world_size, save, folder=tmp_path, stamp=1)
    error = the_same_on_all(run_on_ranks(world_size, save_with, folder=tmp_path, kind=kind, wait=wait))
    assert f"registered object_1 (custom_checkpoint_1.pkl) {message}" in error
    assert_kept(world_size, tmp_path, 1)


def test_registered_objects_are_asked_on_the_main_process_only(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_with, folder=tmp_path, kind="1") == [None, None]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


@on_two_processes
@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (truncate, {}, r"has \d+ bytes instead of"),
        (flip_a_bit, {"verify": "hash"}, "is damaged"),
        (Path.unlink, {}, "is missing"),
    ],
)
def test_damage_to_any_file_is_named_before_anything_is_restored(
    world_size: int, damage: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run_on_ranks(world_size, save, folder=tmp_path / "whole", stamp=1)
    files = sorted(path.name for path in (tmp_path / "whole" / "checkpoints" / "checkpoint_0").iterdir())
    files = [file for file in files if not file.startswith("commit")]
    assert len(files) == 6 + world_size
    for file in files:
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        damage(tmp_path / "damaged" / "checkpoints" / "checkpoint_0" / file)
        results = run_on_ranks(world_size, load, folder=tmp_path / "damaged", **options)
        error = the_same_on_all([error for _, error in results])
        assert re.search(f"{file} {message}", error)
        assert "checkpoint_0 was not loaded" in error
        assert {stamp for stamp, _ in results} == {9}, "what was there before is untouched"
        shutil.rmtree(tmp_path / "damaged")


@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_text('{"format": 99}')])
def test_a_damaged_record_is_passed_over_or_named(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = StampedRun(tmp_path, project_options={"total_limit": None})
    for stamp in (1, 2):
        run.stamp(stamp)
        run.accelerator.save_state()
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    damage(newest / COMMIT_FILE)
    with pytest.raises(CheckpointError, match=f"checkpoint_1 was not loaded: {COMMIT_FILE}|newer version"):
        run.accelerator.load_state(newest)
    assert run.stamp_of_all() == 2
    run.accelerator.load_state()
    assert run.stamp_of_all() == 1
    assert f"Passed over {newest}: " in caplog.text


@on_one_and_two
def test_a_file_that_cannot_be_read_is_named(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(world_size, save, folder=tmp_path, stamp=1)
    checkpoint = tmp_path / "checkpoints" / "checkpoint_0"
    (checkpoint / COMMIT_FILE).unlink()  # as accelerate 1.x would have left it: nothing says what is in the files
    (checkpoint / "progress.bin").unlink()
    for file in ("optimizer.bin", "model.safetensors", "scaler.pt"):
        before = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(before[: len(before) // 2])
        error = the_same_on_all([error for _, error in run_on_ranks(world_size, load, folder=tmp_path)])
        assert f"({file}) cannot be read: " in error
        (checkpoint / file).write_bytes(before)


def load_absent(folder: Path) -> str | None:
    accelerator = Accelerator(cpu=True)
    return error_of(lambda: accelerator.load_state(folder / "absent"))


@on_one_and_two
def test_a_folder_that_is_not_there_is_named(world_size: int, tmp_path: Path) -> None:
    error = the_same_on_all(run_on_ranks(world_size, load_absent, folder=tmp_path))
    assert f"there is no folder {tmp_path / 'absent'}" in error


def test_a_save_that_was_interrupted_by_an_error_can_be_repeated(tmp_path: Path) -> None:
    run = StampedRun(tmp_path)
    run.stamp(1)
    broken = run.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointError, match=r"mine\.bin"):
        run.accelerator.save_state()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    broken.remove()
    assert run.accelerator.save_state().endswith("checkpoint_0")
    run.stamp(2)
    run.accelerator.load_state()
    assert run.stamp_of_all() == 1
    assert torch.equal(run.optimizer.param_groups[0]["params"][0], torch.ones(64, 64))
