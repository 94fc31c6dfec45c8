"""A loader whose main process reads all data and scatters each rank's part of every round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...runtime import phases
from ...runtime.collectives.nested import (
    TensorInformation,
    concatenate,
    find_batch_size,
    get_data_structure,
    leaves,
    recursively_apply,
)
from ...runtime.collectives.operations import sendable
from ...runtime.group.runtime import Runtime
from ..order.orders import SynchronizedRandomSampler
from ..order.position import Position
from ..order.sharding import BatchSamplerOfAll
from .base import PreparedLoader, marking_last
from .stateful import stateful_class
from .streams import BatchOfLastRound, IterableDatasetShard

_STOP, _TENSORS, _OBJECTS, _FAILED = 0, 1, 2, 3
_NOTHING = object()


class DataLoaderDispatcher(PreparedLoader):
    """A loader whose main process reads the batches of all processes and scatters them.

    The batches are those that the processes would read as shards: samples are divided, and the last round is padded,
    before they are made into batches, so a batch may hold anything. Before each round the ranks receive a header of a
    few numbers. Tensors of equal shape are scattered as they are; a round with anything else (strings, ragged tensors)
    travels pickled. The layout of a round is sent when it changes.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            self.__class__ = stateful_class(type(self))
        runtime = Runtime.current()
        self.split_batches = split_batches
        super().__init__(
            dataset,
            device=device,
            skip_batches=skip_batches,
            drops_last=_drop_last,
            non_blocking=_non_blocking,
            iteration=iteration,
            num_processes=runtime.num_processes,
            **kwargs,
        )
        self.slice_fn = slice_fn
        """How the user wants a round to be divided; None leaves the batches as they were read."""
        self.bytes_scattered = 0
        """Bytes of batches that the main process has sent to other ranks."""
        self.draws_as_reader = False
        """Every rank draws random numbers to open the data, and not only the one that reads."""
        self._runtime = runtime
        self._layout: Any = None
        self._state_before_round: Any = None
        self._sampler = self.get_sampler()
        if isinstance(self._sampler, SynchronizedRandomSampler):
            self._sampler.reads_for_all = True

    @property
    def total_batch_size(self) -> int:
        """Return the samples that all processes consume in one step."""
        own = self.base_batch_size or 1
        return own if self.split_batches else own * self.num_processes

    @property
    def base_batch_size(self) -> int | None:
        """Return the samples of a batch of the plain loader."""
        if isinstance(self.dataset, IterableDataset):
            return None if self.batch_size is None else self.batch_size * self.reads_per_round // self.batches_per_round
        own: int | None = getattr(self.batches, "batch_size", None) or self.batch_size
        return own

    @property
    def reads_per_round(self) -> int:
        """Return the number of batches that the main process reads per step: one for each process."""
        return self.num_processes

    def _indices_to_read(self, indices: Any) -> Any:
        makes_batches = self.batch_sampler is not None or isinstance(self.sampler, BatchSampler)
        if self.num_processes == 1 or isinstance(self.dataset, IterableDataset) or not makes_batches:
            return indices
        return BatchSamplerOfAll(indices, self.num_processes, self.split_batches)

    def __len__(self) -> int:
        if isinstance(self.index_source.samples, BatchSamplerOfAll):
            return self.index_source.samples.num_rounds_from(self.skip_batches)
        rounds, rest = divmod(DataLoader.__len__(self), self.reads_per_round)
        rounds += rest > 0 and not self._drop_last
        return max(0, rounds - self.skip_batches // self.batches_per_round)

    def _mode(self) -> str:
        return "the main process reads and sends every other process its part"

    def _real_samples_in_last_round(self) -> int:
        if self._drop_last:
            return -1
        try:
            return (self.total_dataset_length - self._start * (self.base_batch_size or 1)) % self.total_batch_size
        except TypeError:
            return -1

    @property
    def phase(self) -> int:
        """The phase that waiting for a batch is counted as: every rank waits for the one that reads."""
        return phases.WAITING

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        place = self._placement()
        if self.num_processes == 1:
            sent = self._own_rounds(resume)
        else:
            sent = self._sent_rounds(resume) if self._runtime.is_main_process else self._received_rounds()
            if self.draws_as_reader and not self._runtime.is_main_process and not (resume is not None and resume.begun):
                self._draw_as_reader()
        for part, is_last, counts in sent:
            self.partial_round = None if counts is None else self._partial_round(counts, part)
            if is_last:
                self._mark_last(self.partial_round)
            self.cursor.batches += self.batches_per_round
            self.gradient_state._activate_dataloader(self)
            yield part if place is None else place(part)

    def _own_rounds(self, resume: Position | None) -> Iterator[tuple[Any, bool, list[int] | None]]:
        """Read for a single process: nothing is sent, and a short last batch stays short."""
        for (batch,), is_last in marking_last(self._read_rounds(resume)):
            yield batch, is_last, self._count_of_last(batch) if is_last else None

    def _count_of_last(self, batch: Any) -> list[int] | None:
        """Return the number of samples in a short last batch, or None for a full one."""
        size, full = self.remainder, self.base_batch_size
        if size < 0:  # the length of the data is not known
            size = find_batch_size(batch) or 0
        return [size] if full is not None and 0 < size < full else None

    # --- main process ---------------------------------------------------------------------------------------------

    def _sent_rounds(self, resume: Position | None) -> Iterator[tuple[Any, bool, list[int] | None]]:
        others_wait = True  # for the header of the next round or of the end
        try:
            for batches, is_last in marking_last(self._read_rounds(resume)):
                parts, counts = self._parts_of(batches, is_last)
                part = self._send(parts, is_last, counts)
                others_wait = False  # a loop that breaks now breaks on every rank: no header is expected
                yield part, is_last, counts
                others_wait = not is_last
        except Exception:
            if others_wait:
                self._broadcast_header(_FAILED)
            raise
        if others_wait:
            self._broadcast_header(_STOP)

    def _read_rounds(self, resume: Position | None) -> Iterator[list[Any]]:
        batches = self._open(resume)
        while True:
            self._snapshot_state()
            taken = list(islice(batches, self.reads_per_round))
            if not taken or (self._drop_last and len(taken) < self.reads_per_round):
                return
            yield taken

    def _snapshot_state(self) -> None:
        super()._snapshot_state()
        if isinstance(self.dataset, IterableDatasetShard) and self.dataset.keeps_states:
            self._state_before_round = copy.deepcopy(self.dataset.dataset.state_dict())

    def _dataset_state(self) -> Any:
        return self._state_before_round  # the state before the prefetched round, which was not yielded yet

    def _parts_of(self, batches: list[Any], is_last: bool) -> tuple[list[Any], list[int] | None]:
        """Return the part of every rank, and the number of its real samples; None if the round is full."""
        parts = [batch.batch if isinstance(batch, BatchOfLastRound) else batch for batch in batches]
        counts = self._counts_of(batches, is_last)
        missing = self.num_processes - len(parts)
        if missing:  # the last round of several workers: ranks without a batch repeat one
            parts += [parts[0]] * missing
        return (parts if self.slice_fn is None else self._cut(concatenate(parts), self.slice_fn)), counts

    def _counts_of(self, batches: list[Any], is_last: bool) -> list[int] | None:
        """Return the number of real samples of every rank in a round; None if it is full."""
        indices = self.index_source.samples
        if isinstance(indices, BatchSamplerOfAll):
            if not is_last:
                return None
            real = indices.real_samples_in_last_round(self._start)
            return indices.counted_in_last_round if real is None else self._shares_of(real)
        if isinstance(batches[0], BatchOfLastRound) and getattr(self.dataset, "reads_for_all", False):
            return self._shares_of(batches[0].num_real)  # every batch is marked with the samples of the whole round
        share = self.total_batch_size // self.num_processes
        counts = [batch.num_real if isinstance(batch, BatchOfLastRound) else share for batch in batches]
        return counts + [0] * (self.num_processes - len(counts))

    def _cut(self, batch: Any, slice_fn: Callable[..., Any]) -> list[Any]:
        share = (find_batch_size(batch) or 0) // self.num_processes
        return [
            slice_fn(
                batch,
                slice(rank * share, (rank + 1) * share),
                process_index=rank,
                num_processes=self.num_processes,
            )
            for rank in range(self.num_processes)
        ]

    def _send(self, parts: list[Any], is_last: bool, counts: list[int] | None) -> Any:
        only_tensors = all(isinstance(leaf, Tensor) for part in parts for leaf in leaves(part))
        layouts = [get_data_structure(part) for part in parts] if only_tensors else []
        if not only_tensors or any(layout != layouts[0] for layout in layouts):
            self._broadcast_header(_OBJECTS, is_last, counts=counts)
            received: list[Any] = [None]
            dist.scatter_object_list(received, parts, src=0)
            return parts[0]
        changed = layouts[0] != self._layout
        self._broadcast_header(_TENSORS, is_last, changed, counts)
        if changed:
            self._layout = layouts[0]
            dist.broadcast_object_list([self._layout], src=0)
        flat = [leaves(part) for part in parts]
        for tensors in zip(*flat, strict=True):
            staged = [tensor.to(self._comm_device, non_blocking=True).contiguous() for tensor in tensors]
            dist.scatter(sendable(torch.empty_like(staged[0])), [sendable(tensor) for tensor in staged], src=0)
            self.bytes_scattered += sum(tensor.nbytes for tensor in staged[1:])
        return parts[0]

    def _draw_as_reader(self) -> None:
        """Draw what the reading rank draws to open its data: the seed of workers, and what `iter` of a stream draws."""
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if isinstance(self.dataset, IterableDatasetShard) and self.num_workers == 0:
            iter(self.dataset.dataset)

    # --- other processes ------------------------------------------------------------------------------------------

    def _received_rounds(self) -> Iterator[tuple[Any, bool, list[int] | None]]:
        is_last = False
        while not is_last:
            part, is_last, counts = self._received_round()
            if part is _NOTHING:
                return
            yield part, is_last, counts

    def _received_round(self) -> tuple[Any, bool, list[int] | None]:
        kind, is_last, changed, *counted = self._broadcast_header()
        counts = counted if counted[0] >= 0 else None
        if kind == _STOP:
            return _NOTHING, True, None
        if kind == _FAILED:
            raise RuntimeError(
                f"Rank {self._runtime.process_index} waits for data, but reading failed on rank 0, which reads for all "
                "(dispatch_batches): its own error says why."
            )
        if kind == _OBJECTS:
            received: list[Any] = [None]
            dist.scatter_object_list(received, None, src=0)
            return received[0], bool(is_last), counts
        if changed:
            layout: list[Any] = [None]
            dist.broadcast_object_list(layout, src=0)
            self._layout = layout[0]
        part = recursively_apply(
            self._receive, self._layout, test_type=lambda leaf: isinstance(leaf, TensorInformation)
        )
        return part, bool(is_last), counts

    def _receive(self, info: TensorInformation) -> Tensor:
        tensor = torch.empty(info.shape, dtype=info.dtype, device=self._comm_device)
        dist.scatter(sendable(tensor), None, src=0)
        return tensor

    @property
    def _comm_device(self) -> torch.device:
        """The device that the process group communicates on."""
        return self._runtime.device

    def _broadcast_header(
        self, kind: int = 0, is_last: bool = False, changed: bool = False, counts: list[int] | None = None
    ) -> list[int]:
        """Broadcast the main process's header for the next round, with the seed of its order; return the header.

        It ends with the number of real samples of every rank, or -1 for each in a full round.
        """
        seed = getattr(self._sampler, "seed", None)
        counted = [-1] * self.num_processes if counts is None else counts
        numbers = [-1 if seed is None else seed, kind, is_last, changed, *counted]
        header = torch.tensor(
            [int(number) for number in numbers], dtype=torch.int64, device=self._runtime.device_of_numbers
        )
        dist.broadcast(header, src=0)
        seed, *fields = header.tolist()
        if isinstance(self._sampler, SynchronizedRandomSampler):
            self._sampler.seed = seed
        return fields
