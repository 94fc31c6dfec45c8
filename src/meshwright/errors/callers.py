"""Find the user's own frames in a stack, and warn at the user's line."""

from __future__ import annotations

import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
PACKAGE = str(Path(__file__).parents[1])
STDLIB = os.path.dirname(os.__file__)
_INSTALL_FOLDER_NAMES = ("/site-packages/", "/dist-packages/")
_DEBUGGER_PACKAGES = ("/debugpy/", "/pydevd", "/IPython/core/debugger", "/pudb/", "/ipdb/")
_INTERACTIVE_FILES = ("<stdin>", "<ipython-input", "<console>")


def suggest_arguments(function: F) -> F:
    """Make a function suggest the nearest argument name when it is called with an unknown one."""

    @wraps(function)
    def suggesting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            wrong = re.search(r"unexpected keyword argument '(\w+)'$", str(error))
            if wrong is None or error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            import difflib
            import inspect

            near = difflib.get_close_matches(wrong[1], inspect.signature(function).parameters, n=1)
            raise TypeError(f"{error}" + (f". Did you mean {near[0]}?" if near else "")) from None

    return cast(F, suggesting)


def misspelt(given: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Return the names that resemble an argument of a method which accepts other names too, and that argument."""
    import difflib

    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for name in set(given) - set(known)}
    return {name: found[0] for name, found in near.items() if found}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, however deep in the stack the caller is."""
    here = sys._getframe(1)
    frame = find_user_frame(walk_frames(here)) or here
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__", "__main__"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def warn_at(place: tuple[str, int], message: str, category: type[Warning]) -> None:
    """Warn at a line that was executed before, here or on another rank."""
    path, line = place
    warnings.warn_explicit(message, category, path, line)


def user_place() -> tuple[str, int]:
    """Return the file and the line of the user from which this is called, however deep in the stack."""
    here = sys._getframe(1)
    frame = find_user_frame(walk_frames(here)) or here
    return frame.f_code.co_filename, frame.f_lineno


def user_line() -> str:
    """Return the user's line from which this is called, however deep in the stack: "train.py:12"."""
    frame = find_user_frame(walk_frames(sys._getframe(1)))
    return "outside of any script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def calling_lines() -> str:
    """Return a short text for the files and lines that lead to this call, those of this package left out."""
    frames = walk_frames(sys._getframe(1))
    lines = [
        f"{frame.f_code.co_filename}:{frame.f_lineno}"
        for frame in frames
        if not frame.f_code.co_filename.startswith(PACKAGE)
    ]
    return f"{zlib.crc32(' '.join(lines).encode()):08x}"


def walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_user_frame(frames: Iterable[FrameType]) -> FrameType | None:
    """Return the innermost frame of the user's code; for an installed program, of its outermost file."""
    program = None
    innermost_first = list(frames)
    for frame in innermost_first:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return frame
        program = file if _is_outside_libraries(file) else program
    return next((frame for frame in innermost_first if frame.f_code.co_filename == program), None)


@cache
def is_user_file(file: str) -> bool:
    """Return whether a file is the user's, and not of Python, torch, this package or another installed one."""
    installed = file.startswith(_install_folders()) or any(folder in file for folder in _INSTALL_FOLDER_NAMES)
    return not installed and _is_outside_libraries(file)


@cache
def is_debugger_file(file: str) -> bool:
    """Return whether a file belongs to a debugger that is a package of its own."""
    return any(part in file for part in _DEBUGGER_PACKAGES)


@cache
def _is_outside_libraries(file: str) -> bool:
    if file.startswith("<"):  # code without a file: interactive, `python -c`, or generated by a library
        return file.startswith(_INTERACTIVE_FILES) or (
            file == "<string>" and not hasattr(sys.modules["__main__"], "__file__")
        )
    return not file.startswith(_library_folders()) and not is_debugger_file(file)


@cache
def _install_folders() -> tuple[str, ...]:
    import sysconfig  # on first use: it reads how Python was built

    return tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))


@cache
def _library_folders() -> tuple[str, ...]:
    import sysconfig

    found = find_spec("torch")  # without importing it
    torch_folder = os.path.dirname(found.origin) if found is not None and found.origin else PACKAGE
    return tuple(os.path.join(folder, "") for folder in (PACKAGE, STDLIB, sysconfig.get_path("scripts"), torch_folder))
