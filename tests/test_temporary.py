"""Temporary folders: gone with the process that made them, however it ended; those of others are never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.temporary import new_folder, remove_folder, temporary_folder

NAME = "accelerate-logs-{}.temporary"
KILLED = """
import os, signal, sys
from meshwright.temporary import new_folder
folder = new_folder("logs", sys.argv[1])
(folder / "below").mkdir()
(folder / "below" / "file").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_private_and_goes_with_its_block(tmp_path: Path) -> None:
    with temporary_folder("logs", tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_what_a_running_one_uses_stays(tmp_path: Path) -> None:
    used = new_folder("logs", tmp_path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    assert len(names(tmp_path)) == 2
    with temporary_folder("plan", tmp_path) as folder:
        assert names(tmp_path) == sorted([used.name, folder.name])
    remove_folder(used)
    assert names(tmp_path) == []


def test_a_folder_that_a_forked_process_still_uses_stays(tmp_path: Path) -> None:
    code = (
        "import os, time\nif os.fork():\n    os.kill(os.getpid(), 9)\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    program = KILLED.rsplit("\n", 2)[0] + "\n" + code
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait() == -9
        left = names(tmp_path)
        with temporary_folder("logs", tmp_path):
            assert len(names(tmp_path)) == 2
        os.kill(child, 9)
        parent.stdout.read()  # the child has ended
    with temporary_folder("logs", tmp_path) as folder:
        assert names(tmp_path) == [folder.name] != left


def test_what_only_looks_like_one_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / NAME.format("00000000")).symlink_to(precious)
    os.mkfifo(tmp_path / NAME.format("11111111"))
    (tmp_path / NAME.format("22222222")).write_text("a file")
    for name in ("accelerate-logs-mine", "accelerate_0a1b2c3d", "accelerate-logs-00000000.temporary.old"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    with temporary_folder("logs", tmp_path):
        pass
    assert names(tmp_path) == before
    assert names(precious) == ["file"]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder where every user can write, such as /tmp."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_what_belongs_to_another_user_is_left_alone(shared: Path) -> None:
    for kind in ("open", "closed"):
        folder = shared / NAME.format(f"{kind:0>8}")
        folder.mkdir()
        os.mkfifo(folder / "launcher.lock")
        folder.chmod(0o777 if kind == "open" else 0)
        os.chown(folder, 65534, 65534)
    with temporary_folder("logs", shared):
        assert len(names(shared)) == 3
    os.seteuid(65533)
    try:
        with temporary_folder("logs", shared):
            assert len(names(shared)) == 3
    finally:
        os.seteuid(0)
    assert len(names(shared)) == 2
