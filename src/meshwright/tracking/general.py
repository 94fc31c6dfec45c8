"""`GeneralTracker`: the base class of trackers, built-in and custom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

from ..runtime.group.runtime import rank_of_this_process

F = TypeVar("F", bound=Callable[..., Any])


class GeneralTracker:
    """Log a run to one backend.

    A custom tracker has a `name`, sets `requires_logging_directory` if it needs a folder, returns the object of its
    client as `tracker`, and overrides the methods below. `start` opens the run; creating a tracker has no effects.
    """

    main_process_only = True
    """Set it to False to be called on every process."""

    in_background = True
    """`log` is called from a separate thread, so that it may be slow. Set it to False for a client that must be called
    from the training thread (an SQLite connection, MLflow's active run), or that communicates with other ranks."""

    is_remote = False
    """Set it to True for a client of a server: if it is too slow, records are dropped and counted. For others
    `accelerator.log` waits when the backlog is full, and no record is dropped."""

    continued: Mapping[str, Any] = MappingProxyType({})
    """The identity of the run that `start` must reopen, after a resume from a checkpoint; otherwise empty."""
    next_step = 0
    """The first step after the resumed checkpoint."""

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check(self)

    def start(self) -> None:
        """Open the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step."""

    def finish(self) -> None:
        """Close the run."""

    def run_identity(self) -> dict[str, Any]:
        """Return what a later process needs to reopen this run, as plain data; empty if it cannot be reopened."""
        return {}

    def resume_run(self, identity: Mapping[str, Any], next_step: int) -> None:
        """Set the run that `start` must reopen."""
        self.continued, self.next_step = identity, next_step

    def hand_over(self) -> None:
        """Close the run here, because another process goes on with it."""
        self.finish()

    def discard(self) -> None:
        """Close a run without records, because an older one is reopened instead; delete it if possible."""
        self.finish()


_EXPECTED = {
    "name": 'name = "my_tracker"',
    "requires_logging_directory": "requires_logging_directory = False",
    "tracker": "a property `tracker` that returns the client's own object",
}


def check(tracker: GeneralTracker) -> None:
    """Raise if the tracker lacks a required attribute."""
    missing = {name: hint for name, hint in _EXPECTED.items() if name not in dir(tracker)}
    if missing:
        raise NotImplementedError(
            f"The tracker {type(tracker).__name__} is missing the following required attributes: "
            f"{', '.join(f'`{name}`' for name in missing)}. Give the class: {'; '.join(missing.values())}."
        )


def on_main_process(function: F) -> F:
    """Make a method of a tracker do nothing except on rank 0, unless its `main_process_only` is False."""

    @wraps(function)
    def guarded(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or rank_of_this_process() == 0:
            return function(self, *args, **kwargs)
        return None

    return cast("F", guarded)


class BlankTracker(GeneralTracker):
    """A placeholder for a tracker that exists on the main process only: every call does nothing."""

    name = ""
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)

    @property
    def tracker(self) -> BlankTracker:
        """The object of the client: the placeholder itself."""
        return self

    def __getattr__(self, name: str) -> BlankTracker:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> BlankTracker:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> BlankTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> BlankTracker:
        return self

    def __exit__(self, *error: Any) -> None:
        pass
