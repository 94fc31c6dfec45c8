"""Copy the state of a run into host memory every few steps. See [Note: two slots] in storage/memory.py.

[Note: who keeps what] Ranks with the same state, such as those of DDP or along `dp_replicate`, are replicas. On each
machine the first rank of a set of replicas writes their state once; every rank writes its own generators. If a state is
on one machine only, as every shard of FSDP is, its writer also sends it to the rank with the same number on the next
machine. So the copies of a machine that was lost are somewhere else, and a run on one machine sends nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.loaders.base import PreparedLoader
from ...errors import UnsupportedSettingError
from ...instruments import Instrument
from ...parallel.base import Strategy
from ...parallel.modules.dtensors import local
from ...runtime import phases
from ...runtime.collectives.nested import leaves
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from ...runtime.streams.mapping import THREADS
from ...untrusted import build, parse_json
from ..formats import codec
from ..group import CheckpointGroup
from ..layout import FileFacts
from ..parts.states import Part
from ..storage.memory import GENERATORS, SLOTS, STATE, CopyFolder, CopyRecord
from .staging import Staging

logger = logging.getLogger(__name__)

SETTING = "--memory_copies_every"
_HEADER_BYTES = 4096
_CHUNK = 1 << 28


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The run whose state is copied."""

    runtime: Runtime
    strategy: Strategy
    optimizers: Sequence[Any]
    parts: Callable[[], list[Part]]
    """Return all parts as this rank holds them, its generators last."""
    group: Callable[[], CheckpointGroup]


@dataclass(frozen=True, kw_only=True)
class CopyPlacement:
    """The part of one rank in the copies: [Note: who keeps what]. Ranks are those of the start of the run."""

    rank: int
    num_processes: int
    machine: int
    """The first rank of the machine."""
    processes_here: int
    owner: int
    """The first of the ranks that have the same state."""
    writes_state: bool
    is_elsewhere: bool
    """Another machine has the same state."""
    states_here: int
    """How many different states the ranks of this machine have."""

    @classmethod
    def of(cls, runtime: Runtime, strategy: Strategy) -> CopyPlacement:
        """Determine who has the same state as this rank, and on which machine they are."""
        process, member = runtime.process, runtime.member
        replicas = list(strategy.replicas[0]) or [process.rank]
        owner = min(replicas) if member is None else member.rank % member.shards  # replicas may be missing
        machine = process.rank - process.local_rank
        here = [rank for rank in replicas if machine <= rank < machine + process.local_world_size]
        return cls(
            rank=process.rank,
            num_processes=process.world_size,
            machine=machine,
            processes_here=process.local_world_size,
            owner=owner,
            writes_state=process.rank == min(here),
            is_elsewhere=len(here) < len(replicas),
            states_here=-(-process.local_world_size // len(here)),
        )

    @property
    def sends(self) -> bool:
        """Whether there is another machine to send to."""
        return self.num_processes > self.processes_here


@dataclass(frozen=True, kw_only=True)
class CopyCost:
    """What one copy has cost this rank."""

    num_bytes: int
    seconds_in_loop: float
    seconds_in_background: float = 0.0


class MemoryCopies(Instrument):
    """Make the copies of one rank, between two steps and in the background."""

    def __init__(self, run: RunState, every: int, folder: Path) -> None:
        if every < 1:
            raise ValueError(f"{SETTING} is {every}: it must be 1 or more.")
        self.run = run
        self.every = every
        self.folder = CopyFolder(folder)
        self.folder.create()
        self.is_prepared = False
        """The script has called `resume()`, where copies are taken up."""
        self.costs: list[CopyCost] = []
        self.staging = Staging()
        self._seen = 0
        self._copied_at = 0
        self._has_room = False
        self._has_ended = False
        self._keys: set[tuple[str, int]] = set()
        self._group: Any = None
        self._pending: Future[None] | None = None
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="copies", initializer=devices.activate, initargs=(run.runtime.device,)
        )

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps."""
        return max((optimizer.steps_taken for optimizer in self.run.optimizers), default=0)

    def begin(self) -> None:
        """Count from the present step; `resume()` calls it."""
        self.is_prepared = True
        self._seen = self._copied_at = self.steps

    def body_ended(self, loader: PreparedLoader) -> None:
        """Make a copy if one is due and the body of the training loop is complete, not that of a loop inside of it."""
        steps = self.steps
        if steps == self._seen or not loader.gradient_state.is_outermost(loader):
            return
        self._seen = steps
        if not self._has_room:
            self._require_room()
        was_awaited = self._pending is None  # in an earlier step: [Note: two slots]
        if steps >= self._copied_at + self.every - 1:
            self.wait()
        if was_awaited and steps // self.every > self._copied_at // self.every:
            with phases.during(phases.SAVING):
                self._copy(steps)

    def _copy(self, step: int) -> None:
        began = perf_counter()
        run, place = self.run, CopyPlacement.of(self.run.runtime, self.run.strategy)
        if place.sends and self._group is None and run.runtime.member is None:
            timeout = run.runtime.init_handler.timeout
            self._group = dist.new_group(backend="gloo", timeout=timeout)  # of its own: it is used in the background
        parts = run.parts()
        state = (
            {part.name: self.staging.copy(part.name, part.capture()) for part in parts} if place.writes_state else {}
        )
        generators = parts[-1].capture()
        cost = CopyCost(num_bytes=self.staging.num_bytes, seconds_in_loop=perf_counter() - began)
        self._copied_at = step
        self._pending = self._background.submit(self._write, step, place, state, generators, cost)
        if self.every == 1:
            self.wait()

    def _write(self, step: int, place: CopyPlacement, state: dict[str, Any], generators: Any, cost: CopyCost) -> None:
        """Write the files of a copy, and exchange them with the neighbours. Training goes on after an error."""
        began = perf_counter()
        try:
            self.staging.synchronize()
            records = [self._put(GENERATORS, place.rank, step, place, lambda path: _save(generators, path))]
            if state:
                records.append(self._put(STATE, place.owner, step, place, lambda path: _save(state, path)))
            if self._group is not None:
                kept_here = place.is_elsewhere
                self._exchange([record for record in records if not (kept_here and record.kind == STATE)], place)
        except Exception as error:
            logger.warning(
                "Rank %d has made no copy of step %d in memory, and the one before it stays: %s: %s",
                place.rank,
                step,
                type(error).__name__,
                f"{self.folder.path} is full" if self.folder.is_full() else error,
            )
        else:
            cost = CopyCost(
                num_bytes=cost.num_bytes,
                seconds_in_loop=cost.seconds_in_loop,
                seconds_in_background=perf_counter() - began,
            )
            self.costs = [*self.costs[-99:], cost]
            logger.debug("Rank %d copied step %d to memory: %s", place.rank, step, cost)

    def _put(
        self, kind: str, owner: int, step: int, place: CopyPlacement, write: Callable[[Path], FileFacts]
    ) -> CopyRecord:
        self._keys.add((kind, owner))
        return self.folder.put(kind, owner, step, place.num_processes, write)

    # --- neighbours ---------------------------------------------------------------------------------------------------

    def _exchange(self, records: list[CopyRecord], place: CopyPlacement) -> None:
        """Send files to the next machine, and keep those of the machine before."""
        next_rank = (place.rank + place.processes_here) % place.num_processes
        previous_rank = (place.rank - place.processes_here) % place.num_processes
        header = _header(records)
        files = [mapped(self.folder.file_of(record), record.size) for record in records]
        pieces = [header, *(piece for file in files for piece in torch.split(file, _CHUNK))]
        works = [dist.isend(piece, next_rank, group=self._group) for piece in pieces]
        theirs = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        dist.recv(theirs, previous_rank, group=self._group)
        for record in _records_in(theirs):

            def receive(path: Path, record: CopyRecord = record) -> FileFacts:
                return received(path, record, previous_rank, self._group)

            self._put(record.kind, record.owner, record.step, place, receive)
        for work in works:
            work.wait()  # type: ignore[union-attr]

    # --- limits -------------------------------------------------------------------------------------------------------

    def _require_room(self) -> None:
        """Raise, after the first step, if the copies cannot be made or taken up."""
        self._has_room = True
        run, place = self.run, CopyPlacement.of(self.run.runtime, self.run.strategy)
        if not self.is_prepared:
            raise UnsupportedSettingError(
                f"{SETTING} in a script that does not call accelerator.resume()",
                "restarted processes take the copies up in that call.",
                "Call it after prepare(), and begin the loop over epochs with the loader's `iteration`.",
            )
        if not place.writes_state:
            return
        tensors = {id(leaf): leaf for part in run.parts() for leaf in leaves(part.capture()) if _is_tensor(leaf)}
        own = sum(local(tensor.detach()).nbytes for tensor in tensors.values())
        received = 2 if place.sends and not place.is_elsewhere else 1
        needed = own * place.states_here * received * len(SLOTS)
        room = self.folder.free_bytes() + self.folder.used_bytes()
        if needed > room:
            raise UnsupportedSettingError(
                SETTING,
                f"the copies of this machine need {_size(needed)}, two of every state that it keeps, and "
                f"{self.folder.path} has room for {_size(room)}.",
                "Enlarge that tmpfs (mount -o remount,size=...; docker run --shm-size=...), give a folder in a larger "
                "one by --memory_copies_dir, or leave the option out.",
            )

    # --- the end ------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the copy in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def end(self) -> None:
        """Take note that the run has ended well, so that nobody needs its copies."""
        self._has_ended = True

    def shut_down(self) -> None:
        """Finish before the process group is destroyed; after the end of the run, delete what this rank has written."""
        self.wait()
        if self._has_ended:
            for record in self.folder.records():
                if record.key in self._keys:
                    self.folder.delete(record)


def _save(state: Any, path: Path) -> FileFacts:
    codec.write(state, path)
    return facts_of(path)


def facts_of(path: Path) -> FileFacts:
    """Return the size and the checksum of a file."""
    with ThreadPoolExecutor(THREADS) as checkers:
        return codec.facts_of(path, checkers)


def mapped(path: Path, size: int) -> Tensor:
    """Return the bytes of a file as a tensor."""
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def sent(path: Path, record: CopyRecord, rank: int, group: Any) -> None:
    """Send a file to a rank."""
    for piece in torch.split(mapped(path, record.size), _CHUNK):
        dist.send(piece, rank, group=group)


def received(path: Path, record: CopyRecord, rank: int, group: Any) -> FileFacts:
    """Receive a file from a rank; raise if it is damaged."""
    path.unlink(missing_ok=True)  # a mapping does not shorten a file
    content = torch.from_file(str(path), shared=True, size=record.size, dtype=torch.uint8)
    for piece in torch.split(content, _CHUNK):
        dist.recv(piece, rank, group=group)
    facts = facts_of(path)
    if facts != record.facts:
        raise ValueError(f"{record.file} was damaged on its way from rank {rank}")
    return facts


def _header(records: Sequence[CopyRecord]) -> Tensor:
    text = json.dumps([asdict(record) for record in records]).encode().ljust(_HEADER_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _records_in(header: Tensor) -> list[CopyRecord]:
    what = "the list of copies of another rank"
    return build(list[CopyRecord], parse_json(header.numpy().tobytes(), what), what)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
