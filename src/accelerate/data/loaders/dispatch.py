"""A loader whose main process reads all data and scatters each rank's part of every round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...runtime import phases
from ...runtime.collectives.nested import (
    TensorInformation,
    concatenate,
    find_batch_size,
    get_data_structure,
    leaves,
    map_children,
    recursively_apply,
    slice_tensors,
)
from ...runtime.collectives.operations import sendable
from ...runtime.group.runtime import Runtime
from ..order.orders import SynchronizedRandomSampler
from ..order.position import Position
from .base import PreparedLoader, marking_last
from .stateful import stateful_class
from .streams import IterableDatasetShard

_STOP, _TENSORS, _OBJECTS, _FAILED = 0, 1, 2, 3
_NOTHING = object()


class DataLoaderDispatcher(PreparedLoader):
    """A loader whose main process reads every batch and scatters the parts.

    Before each round the ranks receive a header of a few numbers. Tensors of equal shape are scattered as they are; a
    round with anything else (strings, ragged tensors) travels pickled. The layout of a round is sent when it changes.
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
        self.split_batches = split_batches
        self.slice_fn = slice_fn or slice_batch
        self.bytes_scattered = 0
        """Bytes of batches that the main process has sent to other ranks."""
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
        own: int | None = getattr(self.batches, "batch_size", None) or self.batch_size
        return own

    @property
    def batches_per_read(self) -> int:
        """Return 1: one process reads all batches."""
        return 1

    @property
    def samples_per_read(self) -> int:
        """Return the samples of a batch of the plain loader."""
        return self.base_batch_size or 1

    def __len__(self) -> int:
        batches = DataLoader.__len__(self) - self.skip_batches
        rounds, rest = divmod(max(0, batches), self.batches_per_round)
        return rounds if rest == 0 or self._drop_last else rounds + 1

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
    def _phase(self) -> int:
        return phases.WAITING

    def _rounds(self, resume: Position | None) -> Iterator[Any]:
        place = self._placement()
        if self.num_processes == 1:
            sent = self._own_rounds(resume)
        else:
            sent = self._sent_rounds(resume) if self._runtime.is_main_process else self._received_rounds()
        for part, is_last, num_real in sent:
            self.partial_round = self._partial_round(self.total_batch_size if num_real < 0 else num_real)
            if is_last:
                self._mark_last(self.partial_round)
            self.cursor.batches += self.batches_per_round
            self.gradient_state._activate_dataloader(self)
            yield part if place is None else place(part)

    def _own_rounds(self, resume: Position | None) -> Iterator[tuple[Any, bool, int]]:
        """Read for a single process: nothing is sent, and a short last batch stays short."""
        for (batch,), is_last in marking_last(self._read_rounds(resume)):
            yield batch, is_last, self._samples_of_last(batch) if is_last else -1

    def _samples_of_last(self, batch: Any) -> int:
        """Return the number of samples in a short last batch, or -1 for a full one."""
        if self.remainder >= 0:  # the length of the data is known
            return self.remainder or -1
        size, full = find_batch_size(batch), self.base_batch_size
        return size if size is not None and full is not None and size < full else -1

    # --- main process ---------------------------------------------------------------------------------------------

    def _sent_rounds(self, resume: Position | None) -> Iterator[tuple[Any, bool, int]]:
        first_round: list[Any] = []
        others_wait = True  # for the header of the next round or of the end
        try:
            for batches, is_last in marking_last(self._read_rounds(resume)):
                first_round = first_round or batches
                parts, num_real = self._parts_of(batches, first_round, is_last)
                part = self._send(parts, is_last, num_real)
                others_wait = False  # a loop that breaks now breaks on every rank: no header is expected
                yield part, is_last, num_real
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
            taken = list(islice(batches, self.batches_per_round))
            if not taken or (self._drop_last and len(taken) < self.batches_per_round):
                return
            yield taken

    def _snapshot_state(self) -> None:
        super()._snapshot_state()
        if isinstance(self.dataset, IterableDatasetShard) and self.dataset.keeps_states:
            self._state_before_round = copy.deepcopy(self.dataset.dataset.state_dict())

    def _dataset_state(self) -> Any:
        return self._state_before_round  # the state before the prefetched round, which was not yielded yet

    def _parts_of(self, batches: list[Any], first_round: list[Any], is_last: bool) -> tuple[list[Any], int]:
        """Split a round into one part per rank; also return the number of real samples, -1 for a full round."""
        custom_sizes = not is_last and not isinstance(self.dataset, IterableDataset)  # those of a custom sampler
        if custom_sizes or self._is_full(batches):
            return (self._cut(batches[0]) if self.split_batches else batches), -1
        if self.base_batch_size is None or not _is_sliceable(batches):
            return self._filled_by_batches(batches, first_round)
        return self._filled_by_samples(batches, first_round)

    def _is_full(self, batches: list[Any]) -> bool:
        full = self.base_batch_size
        sized = full is None or all(find_batch_size(batch) == full for batch in batches)
        return sized and len(batches) == self.batches_per_round

    def _filled_by_samples(self, batches: list[Any], first_round: list[Any]) -> tuple[list[Any], int]:
        """Pad a round of tensors with samples of the first round."""
        merged = concatenate(batches)
        num_real = find_batch_size(merged) or 0
        head = concatenate(first_round)
        while (find_batch_size(merged) or 0) < self.total_batch_size:
            missing = self.total_batch_size - (find_batch_size(merged) or 0)
            merged = concatenate([merged, slice_tensors(head, slice(0, missing))])
        return self._cut(merged), num_real

    def _filled_by_batches(self, batches: list[Any], first_round: list[Any]) -> tuple[list[Any], int]:
        """Pad a round whose batches cannot be concatenated: ranks without a batch get one of the first round."""
        if self.split_batches:
            return self._cut(batches[0]), -1
        num_real = len(batches) if self.data_makes_batches else sum(_length(batch) for batch in batches)
        missing = self.batches_per_round - len(batches)
        filling = [first_round[index % len(first_round)] for index in range(missing)]
        return [*batches, *filling], num_real

    def _cut(self, batch: Any) -> list[Any]:
        share = (find_batch_size(batch) or _length(batch)) // self.num_processes
        return [
            self.slice_fn(
                batch,
                slice(rank * share, (rank + 1) * share),
                process_index=rank,
                num_processes=self.num_processes,
            )
            for rank in range(self.num_processes)
        ]

    def _send(self, parts: list[Any], is_last: bool, num_real: int) -> Any:
        layouts = [get_data_structure(part) for part in parts]
        alike = all(layout == layouts[0] for layout in layouts) and all(
            isinstance(leaf, Tensor) for leaf in leaves(parts[0])
        )
        if not alike:
            self._broadcast_header(_OBJECTS, is_last, num_real)
            received: list[Any] = [None]
            dist.scatter_object_list(received, parts, src=0)
            return parts[0]
        changed = layouts[0] != self._layout
        self._broadcast_header(_TENSORS, is_last, num_real, changed)
        if changed:
            self._layout = layouts[0]
            dist.broadcast_object_list([self._layout], src=0)
        flat = [leaves(part) for part in parts]
        for tensors in zip(*flat, strict=True):
            staged = [tensor.to(self._comm_device).contiguous() for tensor in tensors]
            dist.scatter(sendable(torch.empty_like(staged[0])), [sendable(tensor) for tensor in staged], src=0)
            self.bytes_scattered += sum(tensor.nbytes for tensor in staged[1:])
        return parts[0]

    # --- other processes ------------------------------------------------------------------------------------------

    def _received_rounds(self) -> Iterator[tuple[Any, bool, int]]:
        is_last = False
        while not is_last:
            part, is_last, num_real = self._received_round()
            if part is _NOTHING:
                return
            yield part, is_last, num_real

    def _received_round(self) -> tuple[Any, bool, int]:
        kind, is_last, num_real, changed = self._broadcast_header()
        if kind == _STOP:
            return _NOTHING, True, -1
        if kind == _FAILED:
            raise RuntimeError(
                f"Rank {self._runtime.process_index} waits for data, but reading failed on rank 0, which reads for all "
                "(dispatch_batches): its own error says why."
            )
        if kind == _OBJECTS:
            received: list[Any] = [None]
            dist.scatter_object_list(received, None, src=0)
            return received[0], bool(is_last), num_real
        if changed:
            layout: list[Any] = [None]
            dist.broadcast_object_list(layout, src=0)
            self._layout = layout[0]
        part = recursively_apply(
            self._receive, self._layout, test_type=lambda leaf: isinstance(leaf, TensorInformation)
        )
        return part, bool(is_last), num_real

    def _receive(self, info: TensorInformation) -> Tensor:
        tensor = torch.empty(info.shape, dtype=info.dtype, device=self._comm_device)
        dist.scatter(sendable(tensor), None, src=0)
        return tensor

    @property
    def _comm_device(self) -> torch.device:
        """The device that the process group communicates on."""
        return self._runtime.device

    def _broadcast_header(
        self, kind: int = 0, is_last: bool = False, num_real: int = -1, changed: bool = False
    ) -> list[int]:
        """Broadcast the main process's header for the next round, with the seed of its order; return the header."""
        seed = getattr(self._sampler, "seed", None)
        numbers = [kind, is_last, num_real, changed, -1 if seed is None else seed]
        header = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device=self._comm_device)
        dist.broadcast(header, src=0)
        *fields, seed = header.tolist()
        if isinstance(self._sampler, SynchronizedRandomSampler):
            self._sampler.seed = seed
        return fields


def slice_batch(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Slice every tensor, and every list of one plain value per sample (strings, ids)."""
    if isinstance(data, Tensor):
        return data[tensor_slice] if data.dim() else data
    if _is_list_of_samples(data):
        return data[tensor_slice]
    mapped = map_children(lambda child: slice_batch(child, tensor_slice), data)
    return data if mapped is None else mapped


def _is_sliceable(batches: list[Any]) -> bool:
    """Return whether batches consist only of tensors with a batch dimension."""
    return all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(batches))


def _is_list_of_samples(data: Any) -> bool:
    """Return whether this is a list with one plain value per sample: no tensors, no containers."""
    if not isinstance(data, list) or not data:
        return False
    return not any(isinstance(item, Tensor) or map_children(lambda child: child, item) is not None for item in data)


def _length(batch: Any) -> int:
    """Return the number of samples in a batch that may hold no tensor."""
    size = find_batch_size(batch)
    if size is not None:
        return size
    found: list[int] = []

    def walk(node: Any) -> Any:
        if _is_list_of_samples(node):
            found.append(len(node))
            return node
        map_children(walk, node)
        return node

    walk(batch)
    return found[0] if found else 1
