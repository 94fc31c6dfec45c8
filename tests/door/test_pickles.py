"""What users keep is read by Hugging Face's accelerate without meshwright, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.door.environments import Environment

KEEPS = Path(__file__).with_name("keeps.py")


def test_what_is_written_behind_the_door_is_read_without_it(with_theirs: Environment, tmp_path: Path) -> None:
    exchange(with_theirs, tmp_path, written_behind_the_door=True)


@pytest.mark.nightly
def test_what_is_written_without_the_door_is_read_behind_it(with_theirs: Environment, tmp_path: Path) -> None:
    exchange(with_theirs, tmp_path, written_behind_the_door=False)


def exchange(environment: Environment, folder: Path, *, written_behind_the_door: bool) -> None:
    open_door, closed = {"MESHWRIGHT_DOOR": "1"}, {"MESHWRIGHT_DOOR": ""}
    writer, reader = (open_door, closed) if written_behind_the_door else (closed, open_door)
    how = "read without meshwright" if written_behind_the_door else "read"
    done = environment.run(environment.python, KEEPS, "write", folder, at=folder, **writer)
    assert done.code == 0, done.complaints[-4000:]
    done = environment.run(environment.python, KEEPS, how, folder, at=folder, **reader)
    assert done.code == 0, done.complaints[-4000:]
    assert "trainer" in done.printed
