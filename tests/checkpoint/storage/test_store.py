"""Folders and names: how a draft becomes a checkpoint, what is replaced, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.formats.saving import flush
from meshwright.checkpoint.layout import COMMIT_FILE, FORMAT, CommitRecord, FileFacts
from meshwright.checkpoint.storage.store import LocalStore


def record_of(*files: str) -> CommitRecord:
    facts = {file: FileFacts(size=1, checksum="") for file in files}
    return CommitRecord(num_processes=1, parts={}, files=facts)


def commit(store: LocalStore, name: str, contents: str, token: str = "0123abcd") -> None:
    draft = store.draft(name, token)
    (draft / "model.bin").write_text(contents)
    store.commit(draft, name, token, record_of("model.bin"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_is_none_before_its_commit(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    draft = store.draft("a", "0123abcd")
    assert not store.exists("a")
    (found,) = store.found()
    assert (found.name, found.problem) == ("a.partial-0123abcd", "it was not finished")
    store.commit(draft, "a", "0123abcd", record_of())
    (found,) = store.found()
    assert (found.name, found.problem) == ("a", None)


def test_a_draft_has_the_name_of_its_checkpoint(tmp_path: Path) -> None:
    """Hooks get its path, and scripts read the step from the name."""
    assert LocalStore(tmp_path).draft("checkpoint-7", "0123abcd").name == "checkpoint-7"


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_hook_writes_beside_its_folder_is_beside_the_checkpoint(tmp_path: Path, is_killed: bool) -> None:
    store = LocalStore(tmp_path)
    commit(store, "checkpoint-6", "old")
    (tmp_path / "latest.txt").write_text("6")
    draft = store.draft("checkpoint-7", "0123abcd")
    (draft.parent / "latest.txt").write_text("7")
    if is_killed:
        (draft / COMMIT_FILE).write_text(record_of().to_json())
        store.recover("checkpoint-7")
    else:
        store.commit(draft, "checkpoint-7", "0123abcd", record_of())
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-7", "latest.txt"]
    assert (tmp_path / "latest.txt").read_text() == "7"


def test_the_age_of_a_finished_draft_is_that_of_its_record(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    draft = store.draft("a", "0123abcd")
    (draft / COMMIT_FILE).write_text(record_of().to_json())
    (found,) = store.found()
    assert found.record is not None
    assert found.changed == found.record.time


def test_replacing_leaves_the_new_one_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "a", "old")
    commit(store, "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "model.bin").read_text() == "new"


def test_what_else_was_in_a_replaced_folder_stays(tmp_path: Path) -> None:
    """People save into folders that hold their logs, their results and even other checkpoints."""
    store = LocalStore(tmp_path)
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "events").write_text("precious")
    (tmp_path / "out" / "optimizer.bin").write_text("a file of accelerate 1.x")
    commit(store, "out", "first")
    assert names(tmp_path / "out") == [COMMIT_FILE, "logs", "model.bin"]
    (tmp_path / "out" / "results.txt").write_text("precious too")
    commit(store, "out", "second")
    assert names(tmp_path / "out") == [COMMIT_FILE, "logs", "model.bin", "results.txt"]
    assert (tmp_path / "out" / "logs" / "events").read_text() == "precious"
    assert names(tmp_path) == ["out"]


def test_what_else_was_there_is_rescued_after_a_kill(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "out", "old")
    (tmp_path / "out" / "results.txt").write_text("precious")
    (tmp_path / "out").rename(tmp_path / "out.replaced-00000000")  # where a kill between the two moves leaves it
    draft = store.draft("out", "0123abcd")
    (draft / COMMIT_FILE).write_text(record_of().to_json())
    store.recover("out")
    assert names(tmp_path) == ["out", "out.replaced-00000000"]
    store.clean_up("out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [COMMIT_FILE, "results.txt"]


def test_what_was_to_be_replaced_comes_back_if_there_is_nothing_new(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "a", "old")
    (tmp_path / "a").rename(tmp_path / "a.replaced-00000000")
    store.clean_up("a")
    assert names(tmp_path) == ["a"]


def test_a_commit_that_fails_leaves_the_old_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    commit(store, "a", "old")
    draft = store.draft("a", "0123abcd")
    rename = Path.rename

    def fail_for_the_draft(path: Path, target: Any) -> Path:
        if path == draft:
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_draft)
    with pytest.raises(PermissionError):
        store.commit(draft, "a", "0123abcd", record_of())
    store.discard(draft)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "model.bin").read_text() == "old"


def test_looking_does_not_disturb_a_save_that_is_running(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "checkpoint_0", "old")
    draft = store.draft("checkpoint_1", "0123abcd")
    (draft / "model.bin").write_text("half")
    (tmp_path / "checkpoint_0.removed-00000000").mkdir()
    for name in (None, "checkpoint_0", "checkpoint_1"):
        LocalStore(tmp_path).recover(name)
    assert draft.is_dir()
    store.commit(draft, "checkpoint_1", "0123abcd", record_of("model.bin"))
    assert store.exists("checkpoint_1")


def test_a_save_survives_somebody_who_names_its_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads may look between the two moves of one that replaces."""
    store = LocalStore(tmp_path)
    commit(store, "a", "old")
    rename = Path.rename

    def look_in_between(path: Path, target: Any) -> Path:
        if ".partial-" in path.parent.name and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=LocalStore(tmp_path).recover, args=("a",))
            other.start()
            other.join()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look_in_between)
    commit(store, "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "model.bin").read_text() == "new"


@pytest.mark.parametrize("flushed", [COMMIT_FILE, "a"])
def test_a_save_survives_somebody_who_names_its_draft_before_it_is_flushed(
    flushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loads finds the record before the one that saves goes on."""

    def look_first(path: Path) -> None:
        if path.name == flushed and ".partial-" in str(path):
            LocalStore(tmp_path).recover("a")
        flush(path)

    monkeypatch.setattr("meshwright.checkpoint.storage.store.flush", look_first)
    commit(LocalStore(tmp_path), "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "model.bin").read_text() == "new"


def test_settling_touches_one_name_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    mine = ["a.partial-00000000", "a.removed-00000000"]
    others = ["b.partial-00000000", "a.partial-notanid", "checkpoint_1.partial-00000000", "a.b.removed-00000000"]
    for name in mine + others:
        (tmp_path / name).mkdir()
    store.clean_up("a")
    assert names(tmp_path) == sorted(others)
    store.clean_up(None)
    assert "checkpoint_1.partial-00000000" not in names(tmp_path)
    assert "b.partial-00000000" in names(tmp_path)


def test_a_folder_that_cannot_be_moved_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(ValueError, match=r"where this process is running.*such as .*here/checkpoint"):
        LocalStore(tmp_path).draft("here", "0123abcd")
    with pytest.raises(ValueError, match="a mount point"):
        LocalStore("/").draft("proc", "0123abcd")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: name a folder"):
        LocalStore(tmp_path).draft("file", "0123abcd")
    assert names(tmp_path) == ["file", "here"]


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/model.bin", "a/../../b", "..\\b"])
def test_a_record_cannot_name_files_elsewhere(file: str) -> None:
    with pytest.raises(ValueError, match="outside of its folder"):
        CommitRecord.from_json(record_of(file).to_json())


@pytest.mark.parametrize("text", ["", "[]", "{}", '"text"', '{"format": 1}', '{"files": 3}', '{"files": {"a": 1}}'])
def test_a_record_that_is_none_is_damaged(text: str) -> None:
    with pytest.raises(ValueError, match="damaged"):
        CommitRecord.from_json(text)


def test_a_record_comes_back_as_it_was() -> None:
    record = record_of("model.bin", "unet/config.json")
    assert CommitRecord.from_json(record.to_json()) == record


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_folders_that_nobody_else_may_read_are_passed_over() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        store = LocalStore(folder)
        for name in ("open", "closed", "closed_record", "closed_1x"):
            commit(store, name, "contents")
        (folder / "closed_1x" / COMMIT_FILE).rename(folder / "closed_1x" / "random_states_0.pkl")
        for closed in ("closed", "closed_1x", f"closed_record/{COMMIT_FILE}"):
            (folder / closed).chmod(0)
        folder.chmod(0o755)
        os.seteuid(65534)
        try:
            assert {found.name: found.problem is None for found in store.found()} == {
                "open": True,
                "closed": False,
                "closed_record": False,
                "closed_1x": False,
            }
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_the_folder_that_a_link_names_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    from meshwright.checkpoint.checkpointer import _locate

    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large" / "ckpt")
    for contents in ("old", "new"):
        store, name = _locate(str(tmp_path / "link"))
        assert isinstance(store, LocalStore)
        commit(store, name, contents)
    assert names(tmp_path) == ["large", "link"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "model.bin").read_text() == "new"


@pytest.mark.parametrize("newer", [{"format": FORMAT + 1}, {"format": FORMAT + 1, "colour": "red"}, {"colour": "red"}])
def test_a_record_of_a_newer_version_is_called_newer_and_not_damaged(newer: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(record_of("a").to_json()), **newer})
    with pytest.raises(ValueError, match=r"^it was written by a newer version .*: update meshwright$"):
        CommitRecord.from_json(text)


def test_records_of_this_format_and_of_older_ones_are_read() -> None:
    record = json.loads(record_of("a").to_json())
    for format_of_record in (FORMAT, FORMAT - 1):
        assert CommitRecord.from_json(json.dumps({**record, "format": format_of_record})).files.keys() == {"a"}


def test_a_draft_that_another_run_is_writing_is_left_alone(tmp_path: Path) -> None:
    writing = LocalStore(tmp_path)
    draft = writing.draft("checkpoint_3", "0123abcd")
    other = LocalStore(tmp_path)
    other.clean_up(None)
    commit(other, "checkpoint_4", "other")
    assert draft.is_dir()
    writing.commit(draft, "checkpoint_3", "0123abcd", record_of())
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]


def test_a_draft_of_a_killed_process_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    code = f"""
import os
from meshwright.checkpoint.storage.store import LocalStore
store = LocalStore({str(tmp_path)!r})
store.draft("checkpoint_3", "0123abcd")
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert names(tmp_path) == ["checkpoint_3.partial-0123abcd"]
    LocalStore(tmp_path).clean_up(None)
    assert names(tmp_path) == []


def test_every_rank_makes_the_draft_and_what_it_is_in(tmp_path: Path) -> None:
    first = LocalStore(tmp_path / "new" / "run").draft("a", "0123abcd")
    assert LocalStore(tmp_path / "new" / "run").draft("a", "0123abcd") == first
    assert first.is_dir()
