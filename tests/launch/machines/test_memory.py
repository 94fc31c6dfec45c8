"""The folder for copies in memory: the launcher's own, gone with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import LaunchError
from meshwright.launch.machines import memory

VARIABLE = "MESHWRIGHT_MEMORY_COPIES_DIR"


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def settings(**flags: object) -> LaunchSettings:
    return LaunchSettings.resolve(flags, None)


def test_the_processes_get_a_folder_that_is_removed_at_the_end(shared_memory: Path) -> None:
    with memory.copies_of(settings(memory_copies_every=4)):
        folder = Path(os.environ[VARIABLE])
        assert folder.parent == shared_memory
        (folder / "0").mkdir()
        (folder / "0" / "state-0-a.pt").write_bytes(b"state")
    assert VARIABLE not in os.environ
    assert list(shared_memory.iterdir()) == []


def test_folders_of_launchers_that_were_killed_are_removed_and_those_of_running_ones_stay(shared_memory: Path) -> None:
    killed = shared_memory / "meshwright-copies-00000000.temporary"
    (killed / "0").mkdir(parents=True)
    with memory.copies_of(settings(memory_copies_every=4)):
        first = Path(os.environ[VARIABLE])
        assert not killed.exists()
        with memory.copies_of(settings(memory_copies_every=4)):
            assert first.exists()


def test_a_pipe_of_another_user_does_not_hold_the_launcher_up(shared_memory: Path) -> None:
    other = shared_memory / "meshwright-copies-zz"
    other.mkdir()
    os.mkfifo(other / "launcher.lock")
    os.mkfifo(shared_memory / "meshwright-copies-00000000.temporary")
    with memory.copies_of(settings(memory_copies_every=4)):
        assert len(list(shared_memory.iterdir())) == 3


def test_a_folder_of_the_users_is_left_alone(shared_memory: Path) -> None:
    with memory.copies_of(settings(memory_copies_every=4, memory_copies_dir=str(shared_memory / "mine"))):
        assert VARIABLE not in os.environ, "it is handed on with the other settings"
    with memory.copies_of(settings()):
        assert list(shared_memory.iterdir()) == []


def test_a_machine_without_shared_memory_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", Path("/nowhere"))
    with (
        pytest.raises(LaunchError, match=r"/nowhere does not exist.* by --memory_copies_dir"),
        memory.copies_of(settings(memory_copies_every=4)),
    ):
        pass
