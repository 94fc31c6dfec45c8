"""The known trackers, the installed ones, and those that `log_with` requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from ..config.enums import LoggerType
from ..errors.callers import warn
from ..runtime.devices import abilities
from .general import GeneralTracker, check

logger = logging.getLogger(__name__)

CLASS_OF = {
    "aim": "AimTracker",
    "clearml": "ClearMLTracker",
    "comet_ml": "CometMLTracker",
    "dvclive": "DVCLiveTracker",
    "jsonl": "JSONLTracker",
    "mlflow": "MLflowTracker",
    "swanlab": "SwanLabTracker",
    "tensorboard": "TensorBoardTracker",
    "trackio": "TrackioTracker",
    "wandb": "WandBTracker",
}
"""Name of the tracker, of its adapter module and, except for `jsonl`, of its package -> the class."""

_registered: dict[str, type[GeneralTracker]] = {}
_mapping: dict[str, type[GeneralTracker]] | None = None


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Register a custom tracker class under its `name` for `log_with`; usable as a decorator."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"register_tracker_class takes a subclass of GeneralTracker, not {tracker_class!r}.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f'{tracker_class.__name__} needs a name: write name = "my_tracker" in the class.')
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} does not say if it needs a folder: write requires_logging_directory = False "
            "in the class, or True."
        )
    if name in CLASS_OF or name in _registered:
        warn(f"log_with={name!r} is a tracker already. From now on it is {tracker_class.__qualname__}.")
    _registered[name] = tracker_class
    if _mapping is not None:
        _mapping[name] = tracker_class
    return tracker_class


def class_named(name: str) -> type[GeneralTracker]:
    """Return the class of a tracker, without importing its package."""
    if name in _registered:
        return _registered[name]
    module = ".jsonl" if name == "jsonl" else f".clients.{name}"
    found: type[GeneralTracker] = getattr(import_module(module, __package__), CLASS_OF[name])
    return found


def mapping() -> dict[str, type[GeneralTracker]]:
    """Return the class of every tracker by its name, the published `LOGGER_TYPE_TO_CLASS`. There is only one."""
    global _mapping
    if _mapping is None:  # imports every adapter
        _mapping = {name: class_named(name) for name in (*CLASS_OF, *_registered)}
    return _mapping


def is_installed(name: str) -> bool:
    """Tell whether the package of a tracker is installed."""
    if name in _registered or name == "jsonl":
        return True
    # By the published function, because other libraries monkeypatch it if a client is installed but broken.
    return bool(getattr(abilities, f"is_{name}_available")())


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers that are installed."""
    return [LoggerType(name) for name in CLASS_OF if is_installed(name)]


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Iterable[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | None = None,
) -> list[str | GeneralTracker]:
    """Return the names and tracker objects that `log_with` requests and that can be used.

    Trackers that are not installed are omitted with a warning; an unknown name is an error.
    """
    if log_with is None:
        return []
    single = isinstance(log_with, (str, GeneralTracker)) or not isinstance(log_with, Iterable)
    requested: list[Any] = [log_with] if single else list(log_with)  # type: ignore[arg-type]
    names = {str(item) for item in requested if isinstance(item, str)}
    chosen: dict[Any, str | GeneralTracker] = {}
    for item in requested:
        if isinstance(item, GeneralTracker):
            check(item)
            chosen[id(item)] = item
        elif isinstance(item, str):
            chosen |= {name: name for name in _usable(str(item), logging_dir)} if str(item) != "all" else {}
        else:
            raise TypeError(
                f"log_with takes names such as 'tensorboard' and objects of a GeneralTracker subclass, not {item!r}."
            )
    if "all" in names:
        chosen |= {name: name for name in _all_usable(logging_dir)}
    return list(chosen.values())


def _usable(name: str, logging_dir: str | None) -> list[str]:
    known = [*CLASS_OF, *_registered]
    if name not in known:
        near = get_close_matches(name, [*known, "all"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"Unsupported logging capability: {name}.{hint} log_with knows all, {', '.join(sorted(known))}."
        )
    if not is_installed(name):
        logger.warning(
            "log_with=%r: the package is not installed, so nothing is logged there. Install it: pip install %s",
            name,
            name,
        )
        return []
    if class_named(name).requires_logging_directory and logging_dir is None:  # type: ignore[attr-defined]
        raise ValueError(
            f"log_with={name!r} requires a `logging_dir`, the folder of its files: Accelerator(log_with={name!r}, "
            "project_dir='my_run')."
        )
    return [name]


def _all_usable(logging_dir: str | None) -> list[str]:
    """Return the usable trackers, published and registered; `jsonl` must be requested by name."""
    published = [name for name in CLASS_OF if name != "jsonl"]
    installed = [name for name in [*published, *_registered] if is_installed(name)]
    usable = [
        name
        for name in installed
        if logging_dir is not None or not class_named(name).requires_logging_directory  # type: ignore[attr-defined]
    ]
    without_folder = [f"{name} (no project_dir was given)" for name in installed if name not in usable]
    missing = [f"{name} (not installed)" for name in published if name not in installed]
    left_out = f" Left out: {', '.join([*without_folder, *missing])}." if without_folder or missing else ""
    logger.warning("log_with='all' logs to: %s.%s", ", ".join(usable), left_out)
    return usable
