"""The user's line: which frames of a stack are the user's own, and warnings that point there."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
PACKAGE = str(Path(__file__).parents[1])
STDLIB = os.path.dirname(os.__file__)
_FOLDERS_OF_INSTALLED = ("/site-packages/", "/dist-packages/")
_DEBUGGING_PACKAGES = ("/debugpy/", "/pydevd", "/IPython/core/debugger", "/pudb/", "/ipdb/")
_TYPED_CODE = ("<stdin>", "<ipython-input", "<console>")


def suggesting_arguments(function: F) -> F:
    """Let a function name the nearest argument when it is called with one that it does not have."""

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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, from however deep below it."""
    here = sys._getframe(1)
    frame = users_frame(outwards(here)) or here
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__", "__main__"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def users_line() -> str:
    """Return the user's line from which this is called, however deep below it: "train.py:12"."""
    frame = users_frame(outwards(sys._getframe(1)))
    return "outside of any script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame(frames: Iterable[FrameType]) -> FrameType | None:
    """Return the innermost frame of the user's own code; of an installed program, that of its outermost file."""
    program = None
    inner_first = list(frames)
    for frame in inner_first:
        file = frame.f_code.co_filename
        if is_of_the_user(file):
            return frame
        program = file if _is_no_machinery(file) else program
    return next((frame for frame in inner_first if frame.f_code.co_filename == program), None)


@cache
def is_of_the_user(file: str) -> bool:
    """Tell a script's own files from Python's, torch's, this package's and other installed ones."""
    installed = file.startswith(_installed()) or any(folder in file for folder in _FOLDERS_OF_INSTALLED)
    return not installed and _is_no_machinery(file)


@cache
def is_of_a_debugger(file: str) -> bool:
    """Tell the files of a debugger that is a package of its own."""
    return any(part in file for part in _DEBUGGING_PACKAGES)


@cache
def _is_no_machinery(file: str) -> bool:
    if file.startswith("<"):  # code without a file: typed, given as `python -c`, or made by a library
        return file.startswith(_TYPED_CODE) or (file == "<string>" and not hasattr(sys.modules["__main__"], "__file__"))
    return not file.startswith(_machinery()) and not is_of_a_debugger(file)


@cache
def _installed() -> tuple[str, ...]:
    import sysconfig  # on first use: it reads how Python was built

    return tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))


@cache
def _machinery() -> tuple[str, ...]:
    import sysconfig

    torch = find_spec("torch")  # not imported for this
    folder_of_torch = os.path.dirname(torch.origin) if torch is not None and torch.origin else PACKAGE
    return tuple(
        os.path.join(folder, "") for folder in (PACKAGE, STDLIB, sysconfig.get_path("scripts"), folder_of_torch)
    )
