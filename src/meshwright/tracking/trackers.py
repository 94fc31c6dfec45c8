"""The trackers of a run: opened once, written to by `log`, and closed at exit in any case."""

from __future__ import annotations

import atexit
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..runtime import phases
from ..runtime.devices.device import is_cpu
from ..runtime.group.runtime import Runtime, rank_of_this_process
from ..runtime.membership.member import Member
from ..untrusted import read_message
from .general import BlankTracker, GeneralTracker
from .reducing import reduced
from .registry import class_named, filter_trackers
from .values import StepCounter
from .writer import LoggedRecord, Writer

logger = logging.getLogger(__name__)

_SECONDS_TO_DRAIN = 10.0

# [Note: the main process changes]
# Under `meshwright launch --survive` the main process may be lost, and its replacement becomes the main process when it
# joins. The runs of the trackers are therefore known to all members, by the launcher's store. Whoever logs as the main
# process for the first time reopens them, as after a resume, and whoever logs and is the main process no more closes
# its part without ending the run.


class Trackers:
    """The trackers that `log_with` requests, before, during and after the run."""

    def __init__(self, log_with: Any, logging_dir: str | None) -> None:
        self.requested = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self._objects: list[GeneralTracker] = []
        self._writers: list[Writer] = []
        self._config: dict[str, Any] | None = None
        self._number = StepCounter()
        self.extra_values: Callable[[], dict[str, float]] = dict
        """Returns metrics to add to the record that is being logged: those of the meter, when they are due."""
        self._resumed: Mapping[str, Any] = {}
        """The runs of the resumed checkpoint, until trackers are opened that continue them."""
        self._started = False
        self._ended = False
        self._warned = False
        self._is_strict = False
        self._writes_as_main = False
        """Whether this process writes because it is the main process of changing members."""
        self._of_main: list[Writer] = []
        """The writers that it then has, until another process is the main process."""
        self._begun = 0

    def begin(
        self,
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
        *,
        strict: bool,
    ) -> None:
        """Create the trackers that were requested by name, and open all on the ranks they are for."""
        if self._started and not self._ended:
            self.finish()  # a second call starts new runs
        self._warn_about_unknown(init_kwargs, "init_kwargs")
        self._objects = [
            item if isinstance(item, GeneralTracker) else self._create(item, project_name, init_kwargs.get(item, {}))
            for item in self.requested
        ]
        self._writers, self._is_strict = [], strict
        self._started, self._ended, self._warned = True, False, False
        self._config, self._number = config, StepCounter()
        self._number.next = self._resumed.get("next_step", 0)
        atexit.register(self.close)  # a script that ends early, or by an error, keeps its records
        resumed, self._resumed = self._resumed, {}
        self._begun += 1
        self._writes_as_main, self._of_main = False, []
        member = _member()
        is_main = member is None and rank_of_this_process() == 0
        self._open([tracker for tracker in self._objects if is_main or not tracker.main_process_only], resumed)
        if member is not None:
            self._follow_main_process(member, resumed)

    def _open(self, trackers: Sequence[GeneralTracker], resumed: Mapping[str, Any]) -> None:
        """Open trackers on this process, and the runs that they continue."""
        writers = [Writer(tracker, strict=self._is_strict) for tracker in trackers]
        self._writers = [*self._writers, *writers]
        for writer in writers:
            if _writes_lost_records(writer.tracker):
                writer.tracker.lost_records = self._lost_records  # type: ignore[attr-defined]
            if resumed or writer.tracker.continued:
                writer.tracker.resume_run(resumed.get("runs", {}).get(writer.name, {}), self._number.next)
            writer.begin(self._config)

    def _follow_main_process(self, member: Member, resumed: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Open trackers on the present main process, and close them where it was: [Note: the main process changes]."""
        is_main = member.has_joined and rank_of_this_process() == 0
        if is_main == self._writes_as_main:
            return
        self._writes_as_main = is_main
        if is_main:
            key, before = self._key_of_runs, self._writers
            runs = resumed
            if member.store.check([key]):
                runs = {"runs": read_message(member.store, key, dict[str, dict[str, Any]])}
            self._open([tracker for tracker in self._objects if tracker.main_process_only], runs)
            self._of_main = self._writers[len(before) :]
            for writer in self._of_main:
                writer.tracker.main_process_only = False  # this object says who writes, also what is still in a queue
            self._announce_runs(member)
        else:
            self._writers = [writer for writer in self._writers if writer not in self._of_main]
            for writer in self._of_main:
                writer.finish(ends_run=False)
                writer.tracker.main_process_only = True

    @property
    def _key_of_runs(self) -> str:
        return f"trackers/{self._begun}"

    def _announce_runs(self, member: Member) -> None:
        member.store.set(self._key_of_runs, json.dumps({writer.name: writer.run() for writer in self._of_main}))

    def runs(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the run of each tracker, and the next step."""
        if not self._started or self._ended or not self._writers:
            return {}
        mark = uuid.uuid4().hex[:8]
        return {
            "next_step": self._number.next,
            "runs": {writer.name: writer.identity(mark) for writer in self._writers},
        }

    def resume_runs(self, runs: Mapping[str, Any]) -> None:
        """Resume the runs of a checkpoint: at once if trackers are open, otherwise when they are opened."""
        if not runs:
            return
        if rank_of_this_process() != 0:  # the checkpoint has the runs of rank 0
            runs = {**runs, "runs": {}}
        if not self._started or self._ended:
            self._resumed = runs
            return
        self._number.next = runs["next_step"]
        for writer in self._writers:
            writer.resume_run(runs["runs"].get(writer.name, {}), runs["next_step"], self._config)
        member = _member()
        if member is not None and self._writes_as_main:
            self._announce_runs(member)

    def _create(self, name: str, project_name: str, options: Mapping[str, Any]) -> GeneralTracker:
        tracker_class: Any = class_named(name)
        if tracker_class.requires_logging_directory:
            return tracker_class(project_name, self.logging_dir, **options)  # type: ignore[no-any-return]
        if getattr(tracker_class, "takes_logging_directory", False) and self.logging_dir is not None:
            options = {"logging_dir": self.logging_dir, **options}
        return tracker_class(project_name, **options)  # type: ignore[no-any-return]

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any], reduce: str | None
    ) -> None:
        """Pass the values to every tracker, without waiting until they are written."""
        if not self.requested:
            return
        if not self._started or self._ended:
            self._warn_not_logging()
            return
        if reduce is not None:
            values = reduced(values, reduce)
        member = _member()
        if member is not None:
            self._follow_main_process(member)
        self._number(step)  # also where nothing is written: this process may become the main process
        if self._writers:
            if log_kwargs:
                self._warn_about_unknown(log_kwargs, "log_kwargs")
            record = LoggedRecord(_copied(values) | _straggler_metrics() | self.extra_values(), step, dict(log_kwargs))
            for writer in self._writers:
                writer.put(record)

    def drained(self) -> list[GeneralTracker]:
        """Return the trackers after all logged records have reached them, so that direct calls keep the order."""
        for writer in self._writers:
            if not writer.drain(_SECONDS_TO_DRAIN):
                logger.warning("The tracker %r is behind: this call may reach it before earlier records.",
                               writer.name)  # fmt: skip
        return list(self._objects)

    def named(self, name: str, unwrap: bool) -> Any:
        """Return one tracker, or the object of its client."""
        names = [_name_of(item) for item in self.requested]
        if name not in names:
            raise ValueError(f"There is no tracker {name!r}: log_with has {', '.join(names) or 'none'}.")
        if not self._started:
            raise ValueError(f"The tracker {name!r} has no run yet: call accelerator.init_trackers(...) first.")
        tracker = self.drained()[names.index(name)]
        if tracker.main_process_only and rank_of_this_process() != 0:
            return BlankTracker()
        return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Close every run; a second call has no effect."""
        member = _member()
        if member is not None and self._started and not self._ended:
            self._follow_main_process(member)
        self.close()
        for writer in self._writers:
            writer.raise_if_strict()

    def close(self) -> None:
        """Close every run without raising, for use at exit."""
        if not self._started or self._ended:
            return
        self._ended = True
        atexit.unregister(self.close)
        # Clients that wrap stdout must unwrap it in reverse order; the tracker that writes lost records is last.
        for is_last in (False, True):
            for writer in reversed(self._writers):
                if _writes_lost_records(writer.tracker) == is_last:
                    writer.finish(ends_run=not self._writes_as_main or rank_of_this_process() == 0)

    def _lost_records(self) -> dict[str, int]:
        return {writer.name: writer.lost for writer in self._writers if writer.lost}

    def _warn_not_logging(self) -> None:
        if not self._warned and rank_of_this_process() == 0:
            when, remedy = (
                ("after end_training()", "Log before it.")
                if self._ended
                else ("before init_trackers()", "Call accelerator.init_trackers('my_project') first.")
            )
            logger.warning("accelerator.log() was called %s, and logged nothing. %s", when, remedy)
        self._warned = True

    def _warn_about_unknown(self, options: Iterable[str], argument: str) -> None:
        names = {_name_of(item) for item in self.requested}
        unknown = [key for key in options if key not in names]
        if unknown and not self._warned:
            self._warned = True
            logger.warning("%s is for %s, and log_with has no such tracker (it has %s): ignored.",
                           argument, ", ".join(unknown), ", ".join(sorted(names)) or "none")  # fmt: skip


def _member() -> Member | None:
    """Return this process as one of changing members; None without `meshwright launch --survive`."""
    runtime = Runtime.existing()
    return None if runtime is None else runtime.member


def _writes_lost_records(tracker: GeneralTracker) -> bool:
    return hasattr(tracker, "lost_records")


def _name_of(requested: str | GeneralTracker) -> str:
    return str(requested if isinstance(requested, str) else getattr(requested, "name", ""))


def _straggler_metrics() -> dict[str, Any]:
    """Return the straggler that the watcher has found since the last call, as metrics."""
    clock = phases.clock
    if clock is None or clock.extra_values is None:
        return {}
    metrics, clock.extra_values = clock.extra_values, None
    return metrics


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the values, because the loop may change a tensor right after.

    A number on the host is read at once. One on an accelerator is copied on the device and read by the writer thread,
    because reading it here would synchronise with the device.
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
