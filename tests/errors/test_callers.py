"""Whose line it is: for warnings, and for what the watcher says of a thread."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import meshwright
from meshwright import Accelerator, load_checkpoint_in_model
from meshwright.errors import callers
from meshwright.errors.callers import find_user_frame, is_user_file, walk_frames, warn
from tests.training import make_model


def through(file: str) -> Callable[..., Any]:
    """Return a function that calls another one, and stands in a file."""
    names: dict[str, Any] = {}
    exec(compile("def call(function, *args):\n    return function(*args)", file, "exec"), names)
    call: Callable[..., Any] = names["call"]
    return call


def found() -> str:
    frame = find_user_frame(walk_frames(sys._getframe(1)))
    assert frame is not None
    return frame.f_code.co_filename


LIBRARY = "/opt/env/lib/python3.12/site-packages/library/trainer.py"
ANOTHER = "/usr/lib/python3/dist-packages/library/data.py"
PROGRAM = "/opt/env/lib/python3.12/site-packages/library/scripts/train.py"
PACKAGE = str(Path(meshwright.__file__).parent / "accelerator.py")


def test_the_line_is_the_innermost_one_of_the_users_own_code() -> None:
    assert through(PACKAGE)(lambda: through(LIBRARY)(lambda: through(ANOTHER)(found))) == __file__


@pytest.mark.parametrize("file", [LIBRARY, ANOTHER, PACKAGE, threading.__file__, "<string>", "<frozen runpy>"])
def test_what_was_installed_or_generated_is_not_the_users(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)  # not given by `python -c`
    for cached in (is_user_file, callers._is_outside_libraries):
        cached.cache_clear()
    assert not is_user_file(file)


@pytest.mark.parametrize("file", [__file__, "<stdin>", "/tmp/ipykernel_7/12.py", "<ipython-input-3-abc>"])
def test_what_somebody_wrote_is_the_users(file: str) -> None:
    assert is_user_file(file)


def frames_of(*files: str) -> list[Any]:
    """Return frames that stand in these files, the innermost first."""

    def innermost() -> list[Any]:
        frames = list(walk_frames(sys._getframe()))
        return [next(frame for frame in frames if frame.f_code.co_filename == file) for file in files]

    call: Callable[[], Any] = innermost
    for file in files:
        inner, outer = call, through(file)
        call = lambda inner=inner, outer=outer: outer(inner)  # type: ignore[misc]  # noqa: E731
    frames: list[Any] = call()
    return frames


def test_of_an_installed_program_it_is_the_programs_own_line() -> None:
    frames = frames_of(PACKAGE, ANOTHER, LIBRARY, PROGRAM, threading.__file__)
    frame = find_user_frame(frames)
    assert frame is not None
    assert frame.f_code.co_filename == PROGRAM


def test_there_may_be_no_such_line() -> None:
    assert find_user_frame(frames_of(PACKAGE, threading.__file__)) is None


class Wrapped(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


def wrong_loader(folder: Path) -> None:
    Accelerator(cpu=True).prepare(Wrapped([1, 2]))


def empty_checkpoint(folder: Path) -> None:
    import torch

    with meshwright.init_empty_weights():
        model = make_model()
    torch.save({}, folder / "pytorch_model.bin")
    load_checkpoint_in_model(model, str(folder / "pytorch_model.bin"))


def through_a_library(folder: Path) -> None:
    through(LIBRARY)(through(PACKAGE), warn, "mind this")


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (wrong_loader, "overrides DataLoader.__iter__"),
        (empty_checkpoint, "on the meta device"),
        (through_a_library, "mind this"),
    ],
)
def test_a_warning_points_at_the_users_line(misuse: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=says) as caught:
        misuse(tmp_path)
    own_lines = {line for _, _, line in misuse.__code__.co_lines()}
    assert {(warning.filename, warning.lineno in own_lines) for warning in caught} == {(__file__, True)}


def test_a_warning_is_shown_once_for_a_line_as_python_does() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("the same")
        warn("the same")
    assert [warning.lineno for warning in caught] == [first := caught[0].lineno, first + 1]


def test_nothing_in_the_package_warns_by_counting_frames() -> None:
    root = Path(meshwright.__file__).parent
    assert [str(file) for file in root.rglob("*.py") if "warnings.warn(" in file.read_text()] == []
