"""What the recorder has written, as objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...errors import InvalidDataError
from ...untrusted import build, parse_object, read_bytes
from .recorder import PARAMETERS, RECORDS

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The first line of a rank."""

    rank: int
    processes: int
    torch: str
    accelerate: str | None


@dataclass(frozen=True)
class ComparedStep:
    """One step of an optimizer. Floats are texts, because JSON has no infinity."""

    losses: list[str]
    """Every loss whose gradients went into the step."""
    gradient_norm: str
    learning_rates: list[str]
    parameters: str
    """A checksum of them after the step."""
    batches: list[tuple[int, int, int]]
    """Of every batch read since the last step: the number of its iterator, its number of samples, its checksum."""
    seconds: float

    @property
    def loss(self) -> float:
        """The sum of what was given to `backward`: with accumulation, the parts of one mean."""
        return sum(map(float, self.losses))


@dataclass(frozen=True)
class End:
    """The last line of a rank."""

    schedulers: list[int]
    peak_memory: int
    peak_device_memory: int


@dataclass(frozen=True)
class RankRecord:
    """All lines of one rank."""

    start: Start
    steps: list[ComparedStep]
    end: End

    @property
    def samples(self) -> int:
        """How many samples its loaders have read."""
        return sum(number for step in self.steps for _, number, _ in step.batches)


@dataclass(frozen=True)
class ComparedRun:
    """One run of the script."""

    ranks: list[RankRecord]
    files: list[str] = field(default_factory=list)
    """What it has written into its folder."""
    parameters: Path | None = None
    """Those of the first rank at the end."""


def read_run(folder: Path, files: list[str]) -> ComparedRun:
    """Return what all ranks of a run have written; raise InvalidDataError if one is missing or incomplete."""
    ranks = [_read_rank(file) for file in sorted((folder / RECORDS).glob("rank-*.jsonl"), key=_number)]
    if not ranks:
        raise InvalidDataError("the script has ended without a step of an optimizer")
    expected = ranks[0].start.processes
    if len(ranks) != expected:
        raise InvalidDataError(f"{len(ranks)} of {expected} processes have recorded a step")
    saved = folder / RECORDS / PARAMETERS
    return ComparedRun(ranks, files, saved if saved.is_file() else None)


def steps_so_far(folder: Path) -> int:
    """Return how many steps the first rank has made."""
    file = folder / RECORDS / "rank-0.jsonl"
    return file.read_bytes().count(b'{"kind": "step"') if file.is_file() else 0


def have_ended(folder: Path, processes: int) -> bool:
    """Tell whether all processes of a run have recorded their last step."""
    ended = [b'{"kind": "end"' in file.read_bytes() for file in (folder / RECORDS).glob("rank-*.jsonl")]
    return sum(ended) >= processes


def _number(file: Path) -> int:
    return int(file.stem.partition("-")[2])


def _read_rank(file: Path) -> RankRecord:
    what = f"the record {file.name}"
    lines = [parse_object(line, what) for line in read_bytes(file, what).splitlines()]
    starts = _of_kind(lines, "start", Start, what)
    steps = _of_kind(lines, "step", ComparedStep, what)
    ends = _of_kind(lines, "end", End, what)
    if len(starts) != 1 or len(ends) != 1 or not steps:
        raise InvalidDataError(f"{what} is incomplete: the process was killed after {len(steps)} steps")
    return RankRecord(starts[0], steps, ends[0])


def _of_kind(lines: list[dict[str, Any]], kind: str, made: type[T], what: str) -> list[T]:
    found = ({key: value for key, value in line.items() if key != "kind"} for line in lines if line.get("kind") == kind)
    return [build(made, values, what) for values in found]
