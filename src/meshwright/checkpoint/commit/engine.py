"""Save state to a checkpoint and load it. See [Note: commit] in layout.py."""

from __future__ import annotations

import errno
import logging
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsafeFileError
from ...runtime.streams.mapping import THREADS
from ..formats import codec
from ..formats.saving import flush, is_full, on_host
from ..group import CheckpointGroup
from ..layout import (
    COMMIT_FILE,
    PROGRESS_FILE,
    CommitRecord,
    FileFacts,
    automatic_name,
    is_published,
    random_states_file,
    supplement_file,
)
from ..parts.states import Part
from ..storage.store import Store

logger = logging.getLogger(__name__)
_warned_files: set[str] = set()
_NEARLY_FULL = 1 << 16


class CheckpointError(RuntimeError):
    """Report a checkpoint that could not be made or loaded. Every process raises the same.

    A save failed (a full disk, no permission, a lost process), or the checkpoint does not fit what was prepared: the
    message lists every difference. `load_state(..., strict=False)` loads what fits.
    """


@dataclass(kw_only=True)
class LoadReport:
    """The result of a load. It is always true, so that `if accelerator.resume():` works."""

    path: str
    step: int | None = None
    """The number of optimizer steps; None for checkpoints without it, such as those of accelerate 1.x."""
    missing: list[str] = field(default_factory=list)
    """Objects that are prepared here and not in the checkpoint."""
    extra: list[str] = field(default_factory=list)
    """Objects that are in the checkpoint and not prepared here."""
    changes: list[str] = field(default_factory=list)
    """Differences from the run that saved it, and state that was derived again."""

    @property
    def differences(self) -> list[str]:
        """Return what is missing, extra or changed, one sentence each; empty if everything matches."""
        missing = [f"missing in {self.path}: {item}" for item in self.missing]
        extra = [f"in {self.path}, but not prepared here: {item}" for item in self.extra]
        return [*missing, *extra, *self.changes]

    def __str__(self) -> str:
        """Return the checkpoint and the step, followed by the differences."""
        step = "" if self.step is None else f" (step {self.step})"
        return "\n".join([f"Loaded {self.path}{step}", *self.differences])


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is not committed: its folder exists and its states are captured."""

    store: Store
    name: str
    token: str
    folder: Path
    parts: Sequence[Part] = ()
    step: int
    iteration: int | None
    save: str = ""
    """The position of the run, for ranks that add to it; empty if all ranks make it."""
    states: dict[str, Any] = field(default_factory=dict)
    """States that are captured already, because capturing is collective or because training continues."""

    @property
    def path(self) -> str:
        """The path of the committed checkpoint."""
        return str(self.store.path(self.name))

    def state_of(self, part: Part) -> Any:
        """Return the state of a part: the captured one, or else the live one."""
        if part.name in self.states:
            return self.states[part.name]
        with part_errors(part, "could not be captured"):
            return on_host(part.capture())


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A checkpoint whose files are on a local disk."""

    path: str
    folder: Path
    record: CommitRecord | None
    """None for a checkpoint of accelerate 1.x."""

    @property
    def num_processes(self) -> int:
        """Return the number of processes that saved it; accelerate 1.x writes one file of generators for each."""
        if self.record is not None:
            return self.record.num_processes
        return sum((self.folder / random_states_file(rank)).is_file() for rank in range(len(self.files())))

    def has(self, file: str) -> bool:
        """Tell whether a file is part of the checkpoint, and not the rest of an unfinished save."""
        return file in self.record.files if self.record is not None else (self.folder / file).is_file()

    def files(self) -> list[str]:
        """Return the names of the files in its folder."""
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def unmatched(self, parts: Sequence[Part]) -> list[str]:
        """Return the contents that do not belong to any of the parts."""
        if self.record is not None:
            known = {part.name for part in parts}
            return [f"{part} ({file})" for part, file in self.record.parts.items() if part not in known]
        taken = {part.file for part in parts} | {random_states_file(rank) for rank in range(self.num_processes)}
        return [file for file in self.files() if is_published(file) and file not in taken]


class CheckpointEngine:
    """Save parts to a store and load them from it, in consensus with the other ranks."""

    def __init__(self, group: CheckpointGroup) -> None:
        self.group = group

    def open(self, store: Store, name: str | Callable[[], int], *, step: int, save: str = "") -> Draft:
        """Create the folder into which a checkpoint is written: of a name, or of the number that a function returns.

        The coordinator calls the function when no other run chooses one.
        """
        token, folder, iteration = self.group.broadcast(uuid.uuid4().hex[:8]), Path(), None
        problem: Exception | None = None
        if callable(name):
            choose, name = name, ""
            with self.consensus("the next checkpoint has no name"):
                if self.group.is_coordinator:
                    store.clean_up(None)
                    with store.naming():
                        iteration = choose()
                        name = automatic_name(iteration)
                        try:
                            folder = store.draft(name, token)
                        except (OSError, ValueError) as error:  # which the other ranks shall hear with the name
                            problem = error
            name, iteration = self.group.broadcast((name, iteration))
        else:
            with self.consensus(f"checkpoint {store.path(name)} was not made"):
                if self.group.is_coordinator:
                    store.clean_up(name)
        with self.consensus(f"checkpoint {store.path(name)} was not made"):
            if problem is not None:
                raise problem
            if iteration is None or not self.group.is_coordinator:
                folder = store.draft(name, token)
        return Draft(store=store, name=name, token=token, folder=folder, step=step, iteration=iteration, save=save)

    def written_here(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that this rank writes."""
        return [part for part in parts if part.per_rank or self.group.is_coordinator]

    def finish(self, draft: Draft, before_commit: Callable[[], None] = lambda: None) -> None:
        """Write and commit, or raise the same error on every rank and delete the draft."""
        facts: dict[str, FileFacts] = {}
        with self.consensus(f"checkpoint {draft.path} was not made", draft):
            facts = write_parts(draft, self.written_here(draft.parts), self.group)
            if not draft.store.is_shared:
                facts = all_files(draft.folder, facts)
            draft.store.publish(draft.folder, draft.name, draft.token)
        before_commit()
        written = {file: fact for files in self.group.gather(facts) for file, fact in files.items()}
        with self.consensus(f"checkpoint {draft.path} was not committed", draft):
            if self.group.is_coordinator:
                record = CommitRecord(
                    num_processes=self.group.num_processes,
                    parts={part.name: part.file for part in draft.parts},
                    files=self._all_file_facts(draft, written),
                    token=draft.token,
                    save=draft.save,
                    step=draft.step,
                    iteration=draft.iteration,
                    versions={
                        "meshwright": version("meshwright"),
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                )
                draft.store.commit(draft.folder, draft.name, draft.token, record)
        if not draft.store.is_shared:
            draft.store.discard(draft.folder)

    def _all_file_facts(self, draft: Draft, written: dict[str, FileFacts]) -> dict[str, FileFacts]:
        """Return the facts of every file, including those that hooks wrote."""
        if not draft.store.is_shared:
            return written
        files = all_files(draft.folder, written)
        unseen = sorted(written.keys() - files.keys())
        if unseen and not self.group.on_each_node:
            raise FileNotFoundError(
                f"{', '.join(unseen[:4])} was written by another process but is not in {draft.folder} as the main "
                "process sees it. Save to a folder that all machines share, or use "
                "ProjectConfiguration(save_on_each_node=True)."
            )
        return files

    @contextmanager
    def fetched(self, store: Store, name: str, wanted: Callable[[str], bool], verify: str) -> Iterator[Fetched]:
        """Fetch the files of a checkpoint, and verify them."""
        folder, record = Path(), None
        with self.consensus(f"{store.path(name)} was not loaded"):
            folder = store.fetch(name, wanted, self.group.rank)
            record = self._verified(folder, verify, store.is_shared)
        try:
            yield Fetched(path=str(store.path(name)), folder=folder, record=record)
        finally:
            store.release(folder)

    def load(
        self,
        source: Fetched,
        parts: Sequence[Part],
        *,
        strict: bool,
        load_options: dict[str, Any],
        optional: Sequence[str] = (),
    ) -> LoadReport:
        """Read all parts, raise if any does not match, and only then restore."""
        report = LoadReport(path=source.path)
        states: dict[str, Any] = {}
        with self.consensus(f"{source.path} was not loaded"):
            objections: list[str] = []
            for part in parts:
                path = source.folder / part.file
                if not path.exists():
                    if part.name not in optional:
                        report.missing.append(f"{part.name} ({part.file})")
                    continue
                with part_errors(part, "cannot be read"):
                    states[part.name] = part.read(path, self.group, **load_options)
                    objection = part.objection(states[part.name])
                if objection is not None:
                    objections.append(f"{part.name}: {objection}")
            report.extra = source.unmatched(parts)
            if objections:
                raise ValueError("; ".join(objections))
            if strict and (report.missing or report.extra):
                listing = "\n".join(report.differences)
                raise ValueError(f"it does not match the prepared objects.\n{listing}\nstrict=False loads the rest")
        with self.consensus(f"{source.path} was loaded in part"):
            for part in parts:
                if part.name in states:
                    with part_errors(part, "could not be restored"):
                        part.restore(states.pop(part.name))
        return report

    def _verified(self, folder: Path, verify: str, all_files_are_here: bool) -> CommitRecord | None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        record_file = folder / COMMIT_FILE
        if not os.path.lexists(record_file):
            if (folder / PROGRESS_FILE).is_file():
                raise FileNotFoundError(f"{COMMIT_FILE} is missing")
            return None  # accelerate 1.x
        record = CommitRecord.read(record_file)
        added = self._supplement_of_this_rank(folder, record)
        for file, facts in {**record.files, **added}.items():
            path = folder / file
            if not path.is_file():
                if not all_files_are_here:  # a file of another rank, which was not downloaded
                    continue
                raise FileNotFoundError(f"{file} is missing")
            if path.stat().st_size != facts.size:
                raise ValueError(f"{file} has {path.stat().st_size} bytes instead of {facts.size}: it is damaged")
        if verify == "hash":
            # Every byte is read; ranks that see the same files divide the work.
            common = sorted(record.files)
            mine = common[self.group.rank :: self.group.world_size] if all_files_are_here else common
            _check_contents(folder, {**{file: record.files[file] for file in mine}, **added})
        return replace(record, files={**record.files, **added})

    def _supplement_of_this_rank(self, folder: Path, record: CommitRecord) -> Mapping[str, FileFacts]:
        """Return the files that this rank added to this checkpoint. See [Note: who commits] in supplements.py."""
        path = folder / supplement_file(self.group.rank)
        if not os.path.lexists(path):
            return {}
        added = CommitRecord.read(path)
        return added.files if added.token == record.token else {}

    def consensus(self, what: str, draft: Draft | None = None) -> _Consensus:
        """Return a block that succeeds on all ranks or raises the same error on all of them."""
        return _Consensus(self.group, what, draft)


class _Consensus:
    """A block that succeeds on all ranks or raises on all of them, with the first failed rank in the message."""

    def __init__(self, group: CheckpointGroup, what: str, draft: Draft | None) -> None:
        self.group, self.what, self.draft = group, what, draft

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        message = None if error is None else f"{_describe(error)}"
        failures = {rank: text for rank, text in enumerate(self.group.gather(message)) if text is not None}
        if not failures:
            return
        if self.draft is not None and (self.group.is_coordinator or not self.draft.store.is_shared):
            self.draft.store.discard(self.draft.folder)
        rank, text = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        rank = rank if self.group.world_size > 1 else self.group.rank
        where = f"rank {rank}{others}: " if self.group.num_processes > 1 else ""
        kept = " Earlier checkpoints are untouched." if self.draft is not None else ""
        raise CheckpointError(f"{self.what}: {where}{text}.{kept}") from error


def _check_contents(folder: Path, files: Mapping[str, FileFacts]) -> None:
    with ThreadPoolExecutor(THREADS) as checkers:
        for file, facts in files.items():
            if (folder / file).is_file() and codec.facts_of(folder / file, checkers) != facts:
                raise ValueError(f"{file} is damaged: its checksum differs from the recorded one")


@contextmanager
def part_errors(part: Part, what: str, folder: Path | None = None) -> Iterator[None]:
    """Add the part and the file to an error, and report a full disk, which errors of torch do not mention."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UnsafeFileError):
            raise
        reason = os.strerror(errno.ENOSPC) if folder is not None and is_full(folder) else _describe(error)
        raise ValueError(f"{part.name} ({part.file}) {what}: {reason}") from error


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return (
        str(error).rstrip(".")
        if isinstance(error, (ValueError, FileNotFoundError))
        else f"{type(error).__name__}: {error}"
    )


def write_parts(draft: Draft, parts: Sequence[Part], group: CheckpointGroup) -> dict[str, FileFacts]:
    """Write parts one after another; each is flushed and checksummed while the next is written.

    The order is reversed, because optimizers are larger than models and the work on the last part is not overlapped.
    """
    with ThreadPoolExecutor(thread_name_prefix="checkpoint") as pool, ThreadPoolExecutor(THREADS) as checkers:
        pending: dict[Path, tuple[Future[None], Future[FileFacts]]] = {}
        # Folders first: writing them is collective, so no rank may have failed before.
        for part in [*(part for part in parts if part.is_folder), *(p for p in reversed(parts) if not p.is_folder)]:
            path = draft.folder / part.file
            state = draft.state_of(part)
            with part_errors(part, "could not be written", draft.folder):
                part.write(state, path, group)
                _warn_of_unsafe_globals(part, path)
            for file in part.written_here(path, group):
                pending[file] = (pool.submit(flush, file), pool.submit(codec.facts_of, file, checkers))
        facts: dict[str, FileFacts] = {}
        for file, (flushed, checked) in pending.items():
            flushed.result()
            facts[file.relative_to(draft.folder).as_posix()] = checked.result()
    return facts


def _warn_of_unsafe_globals(part: Part, path: Path) -> None:
    """Warn of classes that can be saved and that a load will refuse."""
    if not part.is_user_state:
        return
    culprit = codec.culprit_in(path)
    if culprit is not None and part.file not in _warned_files:
        _warned_files.add(part.file)
        logger.warning(
            "%s holds %s: load_state will refuse it, because loading classes can execute code. Let state_dict() return "
            "tensors, numbers, text, lists and dicts, or allow the class before loading: "
            "torch.serialization.add_safe_globals([...]).",
            part.file,
            culprit,
        )


def all_files(folder: Path, known: dict[str, FileFacts]) -> dict[str, FileFacts]:
    """Return the facts of every file in a folder; those that are not known are computed."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {file: path for file, path in found.items() if file != COMMIT_FILE and ".partial-" not in path.name}
    with ThreadPoolExecutor(THREADS) as checkers:
        facts = {}
        for file, path in found.items():
            if file not in known:
                flush(path)
            facts[file] = known.get(file) or codec.facts_of(path, checkers)
    return facts
