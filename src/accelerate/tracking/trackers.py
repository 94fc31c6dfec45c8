"""The trackers of a run, together: opened once, fed by `log`, closed at the end whatever happens."""

from __future__ import annotations

import atexit
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..runtime import phases
from ..runtime.devices.device import is_cpu
from ..runtime.group.runtime import rank_of_this_process
from .general import BlankTracker, GeneralTracker
from .reducing import reduced
from .registry import class_named, filter_trackers
from .values import StepCounter
from .writer import Record, Writer

logger = logging.getLogger(__name__)

_SECONDS_TO_CATCH_UP = 10.0


class Trackers:
    """What `log_with` asked for, before, during and after the run."""

    def __init__(self, log_with: Any, logging_dir: str | None) -> None:
        self.asked_for = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self._objects: list[GeneralTracker] = []
        self._writers: list[Writer] = []
        self._config: dict[str, Any] | None = None
        self._number = StepCounter()
        self._resumed: Mapping[str, Any] = {}
        """What the checkpoint said of its runs, until trackers are opened that can go on with them."""
        self._begun = False
        self._ended = False
        self._warned = False

    def begin(
        self,
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
        *,
        strict: bool,
    ) -> None:
        """Make the trackers that were asked for by name, and open all of them on the processes they are for."""
        if self._begun and not self._ended:
            self.finish()  # a second call begins new runs
        self._warn_about_unknown(init_kwargs, "init_kwargs")
        self._objects = [
            item if isinstance(item, GeneralTracker) else self._made(item, project_name, init_kwargs.get(item, {}))
            for item in self.asked_for
        ]
        here = [tracker for tracker in self._objects if not tracker.main_process_only or rank_of_this_process() == 0]
        self._writers = [Writer(tracker, strict=strict) for tracker in here]
        for tracker in here:
            if _keeps_losses(tracker):
                tracker.losses = self._losses  # type: ignore[attr-defined]
        self._begun, self._ended, self._warned = True, False, False
        self._config, self._number = config, StepCounter()
        self._number.next = self._resumed.get("next_step", 0)
        atexit.register(self.close)  # a script that ends early, or by an error, keeps what it logged
        resumed, self._resumed = self._resumed, {}
        for writer in self._writers:
            if resumed or writer.tracker.continued:
                writer.tracker.go_on(resumed.get("runs", {}).get(writer.name, {}), self._number.next)
            writer.begin(config)

    def runs(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: which run each tracker writes, and the step that comes next."""
        if not self._begun or self._ended or not self._writers:
            return {}
        mark = uuid.uuid4().hex[:8]
        return {
            "next_step": self._number.next,
            "runs": {writer.name: writer.identity(mark) for writer in self._writers},
        }

    def go_on(self, runs: Mapping[str, Any]) -> None:
        """Go on with the runs of a checkpoint: at once where trackers are open, else when they are opened."""
        if not runs:
            return
        if rank_of_this_process() != 0:  # the checkpoint has the runs of rank 0
            runs = {**runs, "runs": {}}
        if not self._begun or self._ended:
            self._resumed = runs
            return
        self._number.next = runs["next_step"]
        for writer in self._writers:
            writer.go_on(runs["runs"].get(writer.name, {}), runs["next_step"], self._config)

    def _made(self, name: str, project_name: str, options: Mapping[str, Any]) -> GeneralTracker:
        tracker_class: Any = class_named(name)
        if tracker_class.requires_logging_directory:
            return tracker_class(project_name, self.logging_dir, **options)  # type: ignore[no-any-return]
        if getattr(tracker_class, "takes_logging_directory", False) and self.logging_dir is not None:
            options = {"logging_dir": self.logging_dir, **options}
        return tracker_class(project_name, **options)  # type: ignore[no-any-return]

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any], reduce: str | None
    ) -> None:
        """Hand the values to every tracker; returns before they have written them."""
        if not self.asked_for:
            return
        if not self._begun or self._ended:
            self._say_that_nobody_listens()
            return
        if reduce is not None:
            values = reduced(values, reduce)
        if self._writers:
            if log_kwargs:
                self._warn_about_unknown(log_kwargs, "log_kwargs")
            self._number(step)
            record = Record(_copied(values) | _news(), step, dict(log_kwargs))
            for writer in self._writers:
                writer.put(record)

    def caught_up(self) -> list[GeneralTracker]:
        """Return the trackers, once what was logged so far has reached them: a call on one must not overtake it."""
        for writer in self._writers:
            if not writer.drain(_SECONDS_TO_CATCH_UP):
                logger.warning("The tracker %r is behind: this call may reach it before earlier records.",
                               writer.name)  # fmt: skip
        return list(self._objects)

    def named(self, name: str, unwrap: bool) -> Any:
        """Return one tracker, or the client's own object."""
        names = [_name_of(item) for item in self.asked_for]
        if name not in names:
            raise ValueError(f"There is no tracker {name!r}: log_with has {', '.join(names) or 'none'}.")
        if not self._begun:
            raise ValueError(f"The tracker {name!r} has no run yet: call accelerator.init_trackers(...) first.")
        tracker = self.caught_up()[names.index(name)]
        if tracker.main_process_only and rank_of_this_process() != 0:
            return BlankTracker()
        return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Close every run; harmless when it was done before."""
        self.close()
        for writer in self._writers:
            writer.raise_if_strict()

    def close(self) -> None:
        """Close every run, without raising: what the end of the interpreter calls."""
        if not self._begun or self._ended:
            return
        self._ended = True
        atexit.unregister(self.close)
        # Clients that wrap the standard output must unwrap it in turn; who writes down the losses of others comes last.
        for is_last in (False, True):
            for writer in reversed(self._writers):
                if _keeps_losses(writer.tracker) == is_last:
                    writer.finish()

    def _losses(self) -> dict[str, int]:
        return {writer.name: writer.lost for writer in self._writers if writer.lost}

    def _say_that_nobody_listens(self) -> None:
        if not self._warned and rank_of_this_process() == 0:
            when, remedy = (
                ("after end_training()", "Log before it.")
                if self._ended
                else ("before init_trackers()", "Call accelerator.init_trackers('my_project') first.")
            )
            logger.warning("accelerator.log() was called %s, and logged nothing. %s", when, remedy)
        self._warned = True

    def _warn_about_unknown(self, options: Iterable[str], argument: str) -> None:
        names = {_name_of(item) for item in self.asked_for}
        unknown = [key for key in options if key not in names]
        if unknown and not self._warned:
            self._warned = True
            logger.warning("%s is for %s, and log_with has no such tracker (it has %s): ignored.",
                           argument, ", ".join(unknown), ", ".join(sorted(names)) or "none")  # fmt: skip


def _keeps_losses(tracker: GeneralTracker) -> bool:
    return hasattr(tracker, "losses")


def _name_of(asked_for: str | GeneralTracker) -> str:
    return str(asked_for if isinstance(asked_for, str) else getattr(asked_for, "name", ""))


def _news() -> dict[str, Any]:
    """Take what the watcher has found out about the ranks since the last time."""
    clock = phases.clock
    if clock is None or clock.extra_values is None:
        return {}
    news, clock.extra_values = clock.extra_values, None
    return news


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Take the values as they are now: the loop may change a tensor right after.

    A number on the host is read at once; one on an accelerator is copied there and read by the writer, because reading
    it here would make the step wait for the device.
    """
    copied: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            readable = is_cpu(value.device) and value.numel() == 1
            copied[name] = value.item() if readable else value.detach().clone()
        elif isinstance(value, dict):
            copied[name] = _copied(value)
        else:
            copied[name] = value
    return copied
