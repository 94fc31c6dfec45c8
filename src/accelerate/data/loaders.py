"""Prepared data loaders: the same `DataLoader`, its share of the data, on the right device, knowing where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..runtime import device as devices
from ..runtime.gradient_state import GradientState
from ..runtime.nested import send_to_device
from .indices import IndexSource
from .metrics import PartialRound
from .order import OrderKeeper
from .plan import DataPlan
from .position import Position
from .streams import IterableDatasetShard


@dataclass(slots=True)
class Cursor:
    """What changes with every batch, apart from the loader: `DataLoader.__setattr__` guards its options and is slow."""

    batches: int = 0
    """Base batches handed out in this epoch."""


class PreparedLoader(DataLoader[Any]):
    """What all prepared loaders share: the position, and telling the training loop where it is."""

    device: torch.device | None
    split_batches = False

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None,
        skip_batches: int,
        drops_last: bool,
        non_blocking: bool,
        iteration: int,
        num_processes: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.num_processes = num_processes
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.remainder = -1
        self.partial_round: PartialRound | None = None
        """The current round, where it is not full."""
        self.keeper = OrderKeeper(self.get_sampler())
        self.index_source = IndexSource(super()._index_sampler, self.keeper)
        self._drop_last = drops_last
        self._non_blocking = non_blocking
        self.cursor = Cursor()
        self._began = False
        self._resume: Position | None = None
        self._start = 0

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        """Give the plain loader our source of indices, which can begin anywhere."""
        source = self.__dict__.get("index_source")
        return super()._index_sampler if source is None else source

    @property
    def total_batch_size(self) -> int:
        """Return the samples that all processes consume in one step."""
        raise NotImplementedError

    @property
    def batches_per_round(self) -> int:
        """Return how many base batches one step consumes."""
        return 1 if self.split_batches else self.num_processes

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches // self.batches_per_round)

    @property
    def base_batch_size(self) -> int | None:
        """Return the samples of a batch of the plain loader."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """Return the samples that one epoch hands out, over all processes."""
        source: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        sampler = self.get_sampler()
        sized = hasattr(sampler, "__len__") and not isinstance(source, IterableDataset)
        return len(sampler if sized else source)

    def get_sampler(self) -> Any:
        """Return the sampler that decides the order."""
        found = self.batch_sampler if self.batch_sampler is not None else self.sampler
        while (inner := getattr(found, "sampler", None)) is not None:
            found = inner
        return found

    def plan(self) -> DataPlan:
        """Return how the data is shared out: print it."""
        try:
            samples: int | None = self.total_dataset_length
            steps: int | None = len(self)
        except TypeError:
            samples = steps = None
        return DataPlan(
            samples=samples,
            num_processes=self.num_processes,
            global_batch=self.total_batch_size,
            steps=steps,
            drops_last=self._drop_last,
            fills_last=self._fills_last(),
            mode=self._mode(),
        )

    def _fills_last(self) -> bool:
        return self.num_processes > 1

    def _mode(self) -> str:
        raise NotImplementedError

    # --- where it is ----------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for whatever under this loader wants to know it."""
        self.iteration = epoch
        told: set[int] = set()
        parts: list[Any] = [self.batch_sampler, self.sampler, self.get_sampler(), self.dataset]
        parts.append(getattr(self.batch_sampler, "batch_sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch") and id(part) not in told:
                told.add(id(part))
                part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain data, global, the same on every rank."""
        if self._resume is not None:
            return self._resume.to_dict()
        if not self._began:
            position = Position(epoch=self.iteration, batches=self.skip_batches, order=self.keeper.key_of_next_epoch())
        elif self.end_of_dataloader:
            position = Position(epoch=self.iteration + 1, order=self.keeper.key_of_next_epoch())
        else:
            position = Position(
                epoch=self.iteration,
                batches=self.cursor.batches,
                order=self.keeper.key(),
                dataset=self._dataset_state(),
            )
        return {
            **position.to_dict(),
            "batch_size": self.base_batch_size,
            "num_processes": self.num_processes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from a position, saved on this or another number of processes."""
        position = Position.from_dict(state_dict)
        position.batches_of(self.base_batch_size)  # refuse now what cannot be kept
        self._resume = position

    def _dataset_state(self) -> Any:
        return None

    def begin(self) -> None:
        """Announce to the training loop that this loader is being iterated."""
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Announce that the iteration is over."""
        self.gradient_state._remove_dataloader(self)

    # --- iterating ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resume, self._resume = self._resume, None
        if resume is not None:
            self.set_epoch(resume.epoch)
            self._start = resume.batches_of(self.base_batch_size)
        else:
            self.set_epoch(self.iteration + 1 if self._began else self.iteration)
            self._start = self.skip_batches
        self._began = True
        self.cursor.batches = self._start
        self.end_of_dataloader = False
        self.partial_round = None
        self.remainder = self._real_samples_in_last_round()
        self._before_epoch()
        self.begin()
        try:
            yield from self._rounds(resume)
        finally:
            self.end()

    def _before_epoch(self) -> None:
        """Do what the processes must do together before an epoch."""

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        raise NotImplementedError

    def _real_samples_in_last_round(self) -> int:
        """Return the published `remainder`: 0 for a full last round, -1 where it is not known."""
        raise NotImplementedError

    def _mark_last(self, partial: PartialRound | None) -> None:
        """Announce the last round."""
        self.end_of_dataloader = True
        self.partial_round = partial
        if partial is not None:
            self.remainder = sum(partial.counts)

    def _partial_round(self, num_real: int, rank: int | None = None) -> PartialRound | None:
        """Deal the real samples of a round to the ranks in order; None where all are full.

        Give the rank where its batch holds no more than its real samples; else batches are filled up.
        """
        share = self.total_batch_size // self.num_processes
        if num_real == share * self.num_processes:
            return None
        counts = [min(max(num_real - rank * share, 0), share) for rank in range(self.num_processes)]
        return PartialRound(counts=counts, full=share, rows=share if rank is None else counts[rank])

    def _open(self, resume: Position | None) -> Iterator[Any]:
        """Start the plain loader at `_start`; a resumed epoch leaves torch's generator as the checkpoint left it."""
        if isinstance(self.dataset, IterableDataset):
            return super().__iter__()
        self.index_source.start = self._index_start()
        if resume is None:
            return super().__iter__()
        self.index_source.key = resume.order
        with _generator_restored():
            self.index_source.draw_first()
            return super().__iter__()

    def _index_start(self) -> int:
        return self._start

    def _placement(self) -> Callable[[Any], Any] | None:
        device = self.device
        if device is None or devices.is_cpu(device):
            return None  # batches are made on the CPU
        return lambda batch: send_to_device(batch, device, non_blocking=self._non_blocking)


@contextmanager
def _generator_restored() -> Iterator[None]:
    """Put torch's generator back afterwards: opening a loader draws numbers that a running one drew long ago."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def marking_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Pair every item with whether it is the last, reading one item ahead."""
    try:
        held = next(items)
    except StopIteration:
        return
    for item in items:
        yield held, False
        held = item
    yield held, True
