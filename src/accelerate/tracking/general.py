"""`GeneralTracker`: what a tracker is, for ours and for those people write themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

from ..runtime.group.runtime import rank_of_this_process

F = TypeVar("F", bound=Callable[..., Any])


class GeneralTracker:
    """Send what a run logs to one place.

    A tracker of your own has a `name`, says by `requires_logging_directory` whether it needs a folder, gives its
    inner object as `tracker`, and overrides the methods below. `start` opens the run, so that a tracker that is
    merely made costs nothing.
    """

    main_process_only = True
    """Set it to False to be called on every process."""

    in_background = True
    """`log` is called from a thread of its own, so that it may take its time. Set it to False for a client that must
    be called from the training thread (an SQLite connection, MLflow's active run), or that talks to other ranks."""

    is_remote = False
    """Set it to True for a client that talks to a server: where it is too slow, records are left out and counted.
    For others `accelerator.log` waits once too many records wait, and none is left out."""

    continued: Mapping[str, Any] = MappingProxyType({})
    """The identity of the run that `start` is to open again, where a checkpoint was resumed; else nothing."""
    next_step = 0
    """The first step that the resumed checkpoint does not have."""

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
        """Return what a later process needs to go on with this run, as plain data; nothing where that cannot be."""
        return {}

    def go_on(self, identity: Mapping[str, Any], next_step: int) -> None:
        """Hear, before `start`, which run to open again."""
        self.continued, self.next_step = identity, next_step

    def discard(self) -> None:
        """Close a run that got no record, because an older one is opened in its place; remove it where that works."""
        self.finish()


_EXPECTED = {
    "name": 'name = "my_tracker"',
    "requires_logging_directory": "requires_logging_directory = False",
    "tracker": "a property `tracker` that returns the client's own object",
}


def check(tracker: GeneralTracker) -> None:
    """Raise unless the tracker has what every tracker needs."""
    missing = {name: hint for name, hint in _EXPECTED.items() if name not in dir(tracker)}
    if missing:
        raise NotImplementedError(
            f"The tracker {type(tracker).__name__} is missing the following required attributes: "
            f"{', '.join(f'`{name}`' for name in missing)}. Give the class: {'; '.join(missing.values())}."
        )


def on_main_process(function: F) -> F:
    """Make a tracker's method do nothing on other processes than rank 0, unless its `main_process_only` is False."""

    @wraps(function)
    def guarded(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or rank_of_this_process() == 0:
            return function(self, *args, **kwargs)
        return None

    return cast("F", guarded)


class BlankTracker(GeneralTracker):
    """Stand for a tracker that lives on the main process only: every call on it does nothing."""

    name = ""
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)

    @property
    def tracker(self) -> BlankTracker:
        """The client's own object: on this process there is none."""
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
