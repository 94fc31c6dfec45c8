"""What a script is, and what it may observe."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How scripts are run: in one process, in two that form a group, or in one that calls the command line.
WORLDS = {"one": 1, "two": 2, "cli": 1}


class Observer:
    """Collect what a user can see, as plain values under names; a name used again makes a list longer."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def __call__(self, **values: Any) -> None:
        """Note values under their names."""
        for name, value in values.items():
            self.seen.setdefault(name, []).append(plain(value))

    def files(self, folder: str | Path) -> None:
        """Note every file below a folder under a name of its own."""
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                self.seen[f"file {path.relative_to(folder).as_posix()}"] = []

    def raises(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note the type of what a call raises, or that it returns."""
        try:
            function(*args, **kwargs)
        except Exception as error:
            self(**{name: published_type(error)})
        else:
            self(**{name: "returns"})


def published_type(error: BaseException) -> str:
    """Return the most special built-in or torch type of an error: subclasses of it are no difference to a user."""
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] in ("builtins", "torch"):
            return kind.__name__
    raise AssertionError("every exception has a built-in base")


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it, with its type wherever that could be lost."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        data = value.detach().cpu()
        data = data.double() if data.is_floating_point() else data
        return {"dtype": str(value.dtype), "values": data.tolist(), "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "values": value.tolist()}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {type(value).__name__: plain(value._asdict())}
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(plain(item) for item in value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, (torch.device, torch.dtype, Path)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} is nothing that can be compared; observe what a user reads from it")


@dataclass(frozen=True)
class Script:
    """A function that uses accelerate, and the worlds it is run in."""

    name: str
    body: Callable[[Observer], None]
    worlds: tuple[str, ...]


_SCRIPTS: dict[str, Script] = {}


def script(*worlds: str) -> Callable[[Callable[[Observer], None]], Callable[[Observer], None]]:
    """Register a function as a script."""

    def register(body: Callable[[Observer], None]) -> Callable[[Observer], None]:
        assert body.__name__ not in _SCRIPTS, f"two scripts are called {body.__name__}"
        assert set(worlds) <= set(WORLDS)
        _SCRIPTS[body.__name__] = Script(body.__name__, body, worlds)
        return body

    return register


def all_scripts() -> Iterable[Script]:
    """Import the modules of scripts and return what they register."""
    from . import scripts

    for module in sorted(found.name for found in pkgutil.iter_modules(scripts.__path__)):
        importlib.import_module(f"{scripts.__name__}.{module}")
    return _SCRIPTS.values()
