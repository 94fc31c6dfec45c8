"""What somebody else can write behind a URL: automatic checkpoints of others are passed over, and refused by name."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from meshwright.checkpoint.commit.engine import CheckpointError
from tests.fuzzing.targets import attributes, changed_since

from ..runs import StampedRun

FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda record: [],
    "no folder": lambda record: record | {"folder": 5},
    "a folder elsewhere": lambda record: record | {"folder": "../checkpoint_0"},
    "a folder at the root": lambda record: record | {"folder": "/etc"},
    "a file elsewhere": lambda record: record | {"files": {"../../x": {"size": 1, "checksum": ""}}},
    "a file with a NUL": lambda record: record | {"files": {"a\0b": {"size": 1, "checksum": ""}}},
    "a size that is a text": lambda record: record | {"files": {"a": {"size": "1", "checksum": ""}}},
    "a newer format": lambda record: record | {"format": 99},
}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    before = attributes()
    yield f"memory://hostile/{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/remote"
    assert changed_since(before) == []
    fs = fsspec.filesystem("memory")
    if fs.exists("/hostile"):
        fs.rm("/hostile", recursive=True)


def two_checkpoints(url: str) -> tuple[StampedRun, Any, str]:
    run = StampedRun(url, project_options={"total_limit": None})
    for stamp in (1, 2):
        run.stamp(stamp)
        run.accelerator.save_state()
    fs, root = fsspec.core.url_to_fs(url)
    return run, fs, f"{root}/checkpoints/checkpoint_1"


def downloads() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("meshwright-download-")}


def test_forged_records_behind_a_url_are_passed_over(url: str, caplog: pytest.LogCaptureFixture) -> None:
    run, fs, newest = two_checkpoints(url)
    record = json.loads(fs.cat_file(f"{newest}/commit.json"))
    contents = {what: json.dumps(forge(record)).encode() for what, forge in FORGED.items()}
    contents |= {"nothing": b"", "depth": b"[" * 100_000, "no text": b"\xff\xfe", "17 MB": b" " * 17_000_000}
    for what, content in contents.items():
        fs.pipe_file(f"{newest}/commit.json", content)
        run.stamp(7)
        resumed = run.accelerator.resume()
        assert resumed, what
        assert resumed.path.endswith("checkpoint_0"), what
        assert run.stamp_of_all() == 1
        with pytest.raises(CheckpointError, match="checkpoint_1 was not loaded"):
            run.accelerator.load_state(f"{url}/checkpoints/checkpoint_1")
    assert run.accelerator.save_state().endswith("checkpoint_2"), "and later saves go on"


def test_files_behind_a_url_are_not_downloaded_in_another_size(url: str) -> None:
    run, fs, newest = two_checkpoints(url)
    record = json.loads(fs.cat_file(f"{newest}/commit.json"))
    file = f"{newest}/{record['folder']}/optimizer.bin"
    fs.pipe_file(file, b"0" * 20_000_000)
    here, fetched = downloads(), []
    get_file = type(fs).get_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(fs), "get_file", lambda *args, **kwargs: (fetched.append(args[1]), get_file(*args, **kwargs))
        )
        run.stamp(7)
        with pytest.raises(CheckpointError, match=r"optimizer\.bin has 20000000 bytes at .* instead of"):
            run.accelerator.load_state(f"{url}/checkpoints/checkpoint_1")
    assert fetched == []
    assert run.stamp_of_all() == 7, "nothing has changed"
    assert downloads() <= here, "and nothing is left on this machine"


def test_code_behind_a_url_is_refused(url: str, tmp_path: Path) -> None:
    run, fs, newest = two_checkpoints(url)
    record = json.loads(fs.cat_file(f"{newest}/commit.json"))

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"state": Payload(), "param_groups": []}, tmp_path / "evil")
    content = (tmp_path / "evil").read_bytes()
    fs.pipe_file(f"{newest}/{record['folder']}/optimizer.bin", content)
    record["files"]["optimizer.bin"]["size"] = len(content)
    fs.pipe_file(f"{newest}/commit.json", json.dumps(record).encode())
    run.stamp(7)
    with pytest.raises(RuntimeError, match="more than data"):
        run.accelerator.load_state(f"{url}/checkpoints/checkpoint_1")
    assert run.stamp_of_all() == 7
    assert not (tmp_path / "made").exists()


def test_links_beside_a_checkpoint_stop_no_save(tmp_path: Path) -> None:
    run, _, newest = two_checkpoints(f"file://{tmp_path}/remote")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (Path(newest) / "data-00000000").symlink_to(tmp_path / "precious")
    (Path(newest).parent / "checkpoint_7").symlink_to(tmp_path / "nowhere")
    os.mkfifo(Path(newest).parent / "checkpoint_0" / "data-11111111")
    run.stamp(3)
    path = run.accelerator.save_state()
    assert (tmp_path / "precious" / "file").exists()
    run.stamp(9)
    run.accelerator.load_state(path)
    assert run.stamp_of_all() == 3


def test_of_two_runs_behind_one_url_the_later_commit_replaces_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores have no locks: both have chosen the same name."""
    runs = [StampedRun(url, project_options={"total_limit": None}) for _ in range(2)]
    for number, run in enumerate(runs):
        run.stamp(number + 1)

    def other_first() -> None:
        monkeypatch.undo()
        runs[1].accelerator.save_state()

    monkeypatch.setattr(runs[0].accelerator._checkpointer.staging, "synchronize", other_first)
    with pytest.raises(CheckpointError, match="Another run has made a checkpoint of this name in the meantime"):
        runs[0].accelerator.save_state()
    assert runs[0].accelerator.resume()
    assert runs[0].stamp_of_all() == 2
    assert runs[0].accelerator.save_state().endswith("checkpoint_1")
