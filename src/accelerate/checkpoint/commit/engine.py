"""The one way in which state becomes a checkpoint and back. See [Note: commit] in layout.py."""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..formats import codec
from ..formats.saving import flush
from ..group import Crew
from ..layout import (
    COMMIT_FILE,
    PROGRESS_FILE,
    CommitRecord,
    FileFacts,
    is_published,
    random_states_file,
    supplement_file,
)
from ..parts.states import Part
from ..storage.store import Store

logger = logging.getLogger(__name__)
_told: set[str] = set()
_LITTLE = 1 << 16


class CheckpointError(RuntimeError):
    """Report a checkpoint that could not be made or loaded. Every process raises the same.

    A save failed (a full disk, no permission, a lost process), or the checkpoint does not fit what was prepared: the
    message lists every difference. `load_state(..., strict=False)` loads what fits.
    """


@dataclass(kw_only=True)
class LoadReport:
    """What a load found and did. It is always true, so that `if accelerator.resume():` means what it says."""

    path: str
    step: int | None = None
    """How often the optimizers had stepped; None for checkpoints that do not say, as those of accelerate 1.x."""
    missing: list[str] = field(default_factory=list)
    """What is prepared here and is not in the checkpoint."""
    extra: list[str] = field(default_factory=list)
    """What is in the checkpoint and is not prepared here."""
    changes: list[str] = field(default_factory=list)
    """What differs from the run that saved it, and what was derived anew."""

    @property
    def differences(self) -> list[str]:
        """Return what is missing, extra or changed, a sentence each; nothing after a load in which all fits."""
        missing = [f"missing in {self.path}: {item}" for item in self.missing]
        extra = [f"in {self.path}, but not prepared here: {item}" for item in self.extra]
        return [*missing, *extra, *self.changes]

    def __str__(self) -> str:
        """Name the checkpoint and the step, and below them the differences."""
        step = "" if self.step is None else f" (step {self.step})"
        return "\n".join([f"Loaded {self.path}{step}", *self.differences])


@dataclass(kw_only=True)
class Draft:
    """A checkpoint on its way: its folder exists, its states are captured, nothing is committed."""

    store: Store
    name: str
    token: str
    folder: Path
    parts: Sequence[Part] = ()
    step: int
    iteration: int | None
    save: str = ""
    """Where the run is, for ranks that add to it; empty where all ranks make it together."""
    states: dict[str, Any] = field(default_factory=dict)
    """What was captured already, because all processes had to or because training goes on."""

    @property
    def path(self) -> str:
        """Where it will be."""
        return str(self.store.path(self.name))

    def state_of(self, part: Part) -> Any:
        """Return a part's state: what was captured, else what is live."""
        if part.name in self.states:
            return self.states[part.name]
        with naming(part, "could not be captured"):
            return part.capture()


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A checkpoint whose files are within reach."""

    path: str
    folder: Path
    record: CommitRecord | None
    """None for one of accelerate 1.x."""

    @property
    def num_processes(self) -> int:
        """Return how many processes saved it; accelerate 1.x leaves one file of generators for each."""
        if self.record is not None:
            return self.record.num_processes
        return sum((self.folder / random_states_file(rank)).is_file() for rank in range(len(self.files())))

    def has(self, file: str) -> bool:
        """Tell whether a file is part of the checkpoint, and not what an unfinished save has left."""
        return file in self.record.files if self.record is not None else (self.folder / file).is_file()

    def files(self) -> list[str]:
        """Return the names of the files in its folder."""
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def beyond(self, parts: Sequence[Part]) -> list[str]:
        """List what it holds and these parts do not take."""
        if self.record is not None:
            known = {part.name for part in parts}
            return [f"{part} ({file})" for part, file in self.record.parts.items() if part not in known]
        taken = {part.file for part in parts} | {random_states_file(rank) for rank in range(self.num_processes)}
        return [file for file in self.files() if is_published(file) and file not in taken]


class CheckpointEngine:
    """Save parts to a store and load them from it, together with the other processes."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def open(self, store: Store, name: str, *, step: int, iteration: int | None, save: str = "") -> Draft:
        """Make the folder in which a checkpoint will be written."""
        token, folder = self.crew.from_leader(uuid.uuid4().hex[:8]), Path()
        with self.together(f"checkpoint {store.path(name)} was not made"):
            if self.crew.leads:
                store.settle(name if iteration is None else None)
        with self.together(f"checkpoint {store.path(name)} was not made"):
            folder = store.draft(name, token)
        return Draft(store=store, name=name, token=token, folder=folder, step=step, iteration=iteration, save=save)

    def written_here(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that this process writes."""
        return [part for part in parts if part.per_rank or self.crew.leads]

    def finish(self, draft: Draft, before_commit: Callable[[], None] = lambda: None) -> None:
        """Write and commit, or raise the same error on every process and leave nothing behind."""
        facts: dict[str, FileFacts] = {}
        with self.together(f"checkpoint {draft.path} was not made", draft):
            facts = write_parts(draft, self.written_here(draft.parts), self.crew)
            if not draft.store.is_shared:
                facts = all_files(draft.folder, facts)
            draft.store.publish(draft.folder, draft.name, draft.token)
        before_commit()
        announced = {file: fact for files in self.crew.gather(facts) for file, fact in files.items()}
        with self.together(f"checkpoint {draft.path} was not committed", draft):
            if self.crew.leads:
                record = CommitRecord(
                    num_processes=self.crew.num_processes,
                    parts={part.name: part.file for part in draft.parts},
                    files=self._files(draft, announced),
                    token=draft.token,
                    save=draft.save,
                    step=draft.step,
                    iteration=draft.iteration,
                    versions={
                        "accelerate": version("accelerate"),
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                    },
                )
                draft.store.commit(draft.folder, draft.name, draft.token, record)
        if not draft.store.is_shared:
            draft.store.discard(draft.folder)

    def _files(self, draft: Draft, announced: dict[str, FileFacts]) -> dict[str, FileFacts]:
        """Return the facts of every file, those that hooks wrote too."""
        if not draft.store.is_shared:
            return announced
        files = all_files(draft.folder, announced)
        unseen = sorted(announced.keys() - files.keys())
        if unseen and not self.crew.on_each_node:
            raise FileNotFoundError(
                f"{', '.join(unseen[:4])} was written by another process but is not in {draft.folder} as the main "
                "process sees it. Save to a folder that all machines share, or use "
                "ProjectConfiguration(save_on_each_node=True)."
            )
        return files

    @contextmanager
    def fetched(self, store: Store, name: str, wanted: Callable[[str], bool], verify: str) -> Iterator[Fetched]:
        """Bring a checkpoint's files within reach, and check them."""
        folder, record = Path(), None
        with self.together(f"{store.path(name)} was not loaded"):
            folder = store.fetch(name, wanted, self.crew.rank)
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
        """Read everything, object to what does not fit, and only then restore."""
        report = LoadReport(path=source.path)
        states: dict[str, Any] = {}
        with self.together(f"{source.path} was not loaded"):
            objections: list[str] = []
            for part in parts:
                path = source.folder / part.file
                if not path.exists():
                    if part.name not in optional:
                        report.missing.append(f"{part.name} ({part.file})")
                    continue
                with naming(part, "cannot be read"):
                    states[part.name] = part.read(path, self.crew, **load_options)
                    objection = part.objection(states[part.name])
                if objection is not None:
                    objections.append(f"{part.name}: {objection}")
            report.extra = source.beyond(parts)
            if objections:
                raise ValueError("; ".join(objections))
            if strict and (report.missing or report.extra):
                listing = "\n".join(report.differences)
                raise ValueError(f"it does not match the prepared objects.\n{listing}\nstrict=False loads the rest")
        with self.together(f"{source.path} was loaded in part"):
            for part in parts:
                if part.name in states:
                    with naming(part, "could not be restored"):
                        part.restore(states.pop(part.name))
        return report

    def _verified(self, folder: Path, verify: str, all_files_are_here: bool) -> CommitRecord | None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        record_file = folder / COMMIT_FILE
        if not record_file.is_file():
            if (folder / PROGRESS_FILE).is_file():
                raise FileNotFoundError(f"{COMMIT_FILE} is missing")
            return None  # accelerate 1.x
        record = CommitRecord.from_json(record_file.read_text(encoding="utf-8", errors="replace"))
        added = self._added_here(folder, record)
        for file, facts in {**record.files, **added}.items():
            path = folder / file
            if not path.is_file():
                if not all_files_are_here:  # another rank's, which was not downloaded
                    continue
                raise FileNotFoundError(f"{file} is missing")
            if path.stat().st_size != facts.size:
                raise ValueError(f"{file} has {path.stat().st_size} bytes instead of {facts.size}: it is damaged")
        if verify == "hash":
            # Every byte is read; processes that see the same files share them.
            common = sorted(record.files)
            mine = common[self.crew.rank :: self.crew.world_size] if all_files_are_here else common
            _check_contents(folder, {**{file: record.files[file] for file in mine}, **added})
        return replace(record, files={**record.files, **added})

    def _added_here(self, folder: Path, record: CommitRecord) -> Mapping[str, FileFacts]:
        """Return the files that this rank added to this very checkpoint. See [Note: who commits] in supplements.py."""
        path = folder / supplement_file(self.crew.rank)
        if not path.is_file():
            return {}
        try:
            added = CommitRecord.from_json(path.read_text(encoding="utf-8", errors="replace"))
        except ValueError as error:
            raise ValueError(str(error).replace(COMMIT_FILE, path.name)) from error
        return added.files if added.token == record.token else {}

    def together(self, what: str, draft: Draft | None = None) -> _Together:
        """Return a block that every process passes, or none."""
        return _Together(self.crew, what, draft)


class _Together:
    """A block that every process passes, or none: one that fails is named by all."""

    def __init__(self, crew: Crew, what: str, draft: Draft | None) -> None:
        self.crew, self.what, self.draft = crew, what, draft

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        said = None if error is None else f"{_named(error)}"
        failures = {rank: text for rank, text in enumerate(self.crew.gather(said)) if text is not None}
        if not failures:
            return
        if self.draft is not None and (self.crew.leads or not self.draft.store.is_shared):
            self.draft.store.discard(self.draft.folder)
        rank, text = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        rank = rank if self.crew.world_size > 1 else self.crew.rank
        where = f"rank {rank}{others}: " if self.crew.num_processes > 1 else ""
        kept = " Earlier checkpoints are untouched." if self.draft is not None else ""
        raise CheckpointError(f"{self.what}: {where}{text}.{kept}") from error


def _check_contents(folder: Path, files: Mapping[str, FileFacts]) -> None:
    with ThreadPoolExecutor(codec.THREADS) as checkers:
        for file, facts in files.items():
            if (folder / file).is_file() and codec.facts_of(folder / file, checkers) != facts:
                raise ValueError(f"{file} is damaged: its checksum differs from the recorded one")


@contextmanager
def naming(part: Part, what: str, folder: Path | None = None) -> Iterator[None]:
    """Say which part and file an error is about; torch's own do not say that a disk is full."""
    try:
        yield
    except Exception as error:
        if isinstance(error, codec.UnsafeFileError):
            raise
        is_full = folder is not None and shutil.disk_usage(folder).free < _LITTLE
        reason = os.strerror(errno.ENOSPC) if is_full else _named(error)
        raise ValueError(f"{part.name} ({part.file}) {what}: {reason}") from error


def _named(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return (
        str(error).rstrip(".")
        if isinstance(error, (ValueError, FileNotFoundError))
        else f"{type(error).__name__}: {error}"
    )


def write_parts(draft: Draft, parts: Sequence[Part], crew: Crew) -> dict[str, FileFacts]:
    """Write parts one after another; one is flushed and checked while the next is written.

    The last ones are written first: optimizers are larger than models, and what comes last has nothing to hide behind.
    """
    with ThreadPoolExecutor(thread_name_prefix="checkpoint") as pool, ThreadPoolExecutor(codec.THREADS) as checkers:
        pending: dict[Path, tuple[Future[None], Future[FileFacts]]] = {}
        # Folders first: all processes write them together, so none may have failed before.
        for part in [*(part for part in parts if part.is_folder), *(p for p in reversed(parts) if not p.is_folder)]:
            path = draft.folder / part.file
            state = draft.state_of(part)
            with naming(part, "could not be written", draft.folder):
                part.write(state, path, crew)
                _tell_strangers(part, path)
            for file in part.written_here(path, crew):
                pending[file] = (pool.submit(flush, file), pool.submit(codec.facts_of, file, checkers))
        facts: dict[str, FileFacts] = {}
        for file, (flushed, checked) in pending.items():
            flushed.result()
            facts[file.relative_to(draft.folder).as_posix()] = checked.result()
    return facts


def _tell_strangers(part: Part, path: Path) -> None:
    """Warn of what can be saved and will not be loaded, while there is still time to do something about it."""
    if not part.is_users_own:
        return
    strangers = codec.strangers_in(path)
    if strangers and part.file not in _told:
        _told.add(part.file)
        logger.warning(
            "%s holds %s: load_state will refuse it, because loading classes can execute code. Let state_dict() return "
            "tensors, numbers, text, lists and dicts, or allow the class before loading: "
            "torch.serialization.add_safe_globals([...]).",
            part.file,
            ", ".join(strangers),
        )


def all_files(folder: Path, known: dict[str, FileFacts]) -> dict[str, FileFacts]:
    """Return the facts of every file in a folder, finding out those that are not known."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {file: path for file, path in found.items() if file != COMMIT_FILE and ".partial-" not in path.name}
    with ThreadPoolExecutor(codec.THREADS) as checkers:
        facts = {}
        for file, path in found.items():
            if file not in known:
                flush(path)
            facts[file] = known.get(file) or codec.facts_of(path, checkers)
    return facts
