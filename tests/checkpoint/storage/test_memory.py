"""The files of copies in memory: two slots, of which one is complete at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.checkpoint.layout import FileFacts
from meshwright.checkpoint.storage.memory import STATE, CopyFolder


def put(folder: CopyFolder, step: int, content: bytes = b"state") -> None:
    def write(path: Path) -> FileFacts:
        path.write_bytes(content)
        return FileFacts(size=len(content), checksum="x")

    folder.put(STATE, 0, step, 1, write)


def steps_of(folder: CopyFolder) -> list[int]:
    return sorted(record.step for record in folder.records())


@pytest.fixture
def folder(tmp_path: Path) -> CopyFolder:
    made = CopyFolder(tmp_path / "copies")
    made.create()
    return made


def test_the_two_newest_copies_are_kept(folder: CopyFolder) -> None:
    for step in (1, 2, 3, 5):
        put(folder, step)
    assert steps_of(folder) == [3, 5]
    assert len(list(folder.path.glob("*.pt"))) == 2


def test_a_copy_that_fails_leaves_the_newest_one(folder: CopyFolder) -> None:
    put(folder, 1)
    put(folder, 2)

    def fail(path: Path) -> FileFacts:
        path.write_bytes(b"half")
        raise OSError("no room")

    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            folder.put(STATE, 0, 3, 1, fail)
        assert steps_of(folder) == [2]


def test_a_file_of_another_size_than_recorded_does_not_count(folder: CopyFolder) -> None:
    put(folder, 1)
    put(folder, 2)
    newest = max(folder.records(), key=lambda record: record.step)
    folder.file_of(newest).write_bytes(b"sta")
    assert steps_of(folder) == [1]


def test_copies_of_other_steps_are_deleted(folder: CopyFolder) -> None:
    put(folder, 1)
    put(folder, 2)
    folder.keep_only(1)
    assert steps_of(folder) == [1]
    folder.keep_only(None)
    assert list(folder.path.iterdir()) == []


def test_nobody_else_reads_the_folder(folder: CopyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        folder.create()
