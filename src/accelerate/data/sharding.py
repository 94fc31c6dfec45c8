"""Which samples are mine: a global order cut into equal rounds, one part of each round per process.

A round is what all processes consume in one step: `num_processes` batches, or one batch cut into
`num_processes` pieces with `split_batches`. With `even_batches` the last round is filled up from the beginning of
the order; the number of real samples in it is the loader's `remainder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler

from .order import read_order, sized_sampler


class BatchSamplerShard(BatchSampler):
    """The batches of one process, out of those of a global batch sampler."""

    def __init__(
        self,
        batch_sampler: Sampler[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches=True cuts each batch into {num_processes} equal parts, but the batch size is "
                f"{self.batch_size}: use a multiple of {num_processes}."
            )
        if self.batch_size is None and even_batches:
            raise ValueError(
                f"{type(batch_sampler).__name__} has no batch_size, so its last batches cannot be made even: pass "
                "DataLoaderConfiguration(even_batches=False), and join_uneven_inputs() if the ranks' counts differ."
            )

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Return the sampler of the global batch sampler, if it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Return the number of global batches."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        sampler = sized_sampler(self.batch_sampler)
        if sampler is not None:
            return self._num_rounds(len(sampler))  # type: ignore[arg-type]
        if self.split_batches:
            return self.total_length
        whole, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or rest == 0:
            return whole
        return whole + 1 if self.even_batches or self.process_index < rest else whole

    def __iter__(self) -> Iterator[list[Any]]:
        sampler = sized_sampler(self.batch_sampler)
        if sampler is not None:  # read with the first batch, where the plain loader draws its random numbers too
            yield from self._by_position(read_order(sampler))
        elif self.split_batches:
            yield from self._split_stream()
        else:
            yield from self._dealt_stream()

    # Positions: round k of rank r covers samples [k * round_size + r * share, + share) of the order.

    @property
    def _share(self) -> int:
        assert self.batch_size is not None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def _num_rounds(self, num_samples: int) -> int:
        round_size = self._share * self.num_processes
        if self.drop_last:
            return num_samples // round_size
        if self.even_batches:
            return -(-num_samples // round_size)
        mine = num_samples - self.process_index * self._share  # samples from my first one on
        return max(0, -(-mine // round_size))

    def _by_position(self, order: Sequence[int]) -> Iterator[list[Any]]:
        share, num_samples = self._share, len(order)
        round_size = share * self.num_processes
        for start in range(
            self.process_index * share,
            self.process_index * share + self._num_rounds(num_samples) * round_size,
            round_size,
        ):
            stop = start + share
            if stop <= num_samples or not self.even_batches:
                yield list(order[start:stop])
            else:
                yield [order[position % num_samples] for position in range(start, stop)]

    # Streams: a custom batch sampler is only known by iterating over it.

    def _dealt_stream(self) -> Iterator[list[Any]]:
        head: list[Any] = []
        held: list[list[Any]] = []  # the last complete round, until it is known not to be the last
        dealt: list[list[Any]] = []
        for batch in self.batch_sampler:
            if self.batch_size is not None and len(head) < self.batch_size * self.num_processes:
                head.extend(batch)
            dealt.append(batch)
            if len(dealt) == self.num_processes:
                if held:
                    yield held[self.process_index]
                held, dealt = dealt, []
        if dealt and held:
            yield held[self.process_index]
        yield from self._last_round(dealt or held, head)

    def _last_round(self, batches: list[list[Any]], head: list[Any]) -> Iterator[list[Any]]:
        complete = len(batches) == self.num_processes
        if complete and (not self.even_batches or all(len(batch) == self.batch_size for batch in batches)):
            yield batches[self.process_index]
        elif self.drop_last or not batches:
            return
        elif not self.even_batches:
            if self.process_index < len(batches):
                yield batches[self.process_index]
        else:
            yield self._my_share(_filled(chain(*batches), head, self._share * self.num_processes))

    def _split_stream(self) -> Iterator[list[Any]]:
        head: list[Any] = []
        for batch in self.batch_sampler:
            head = head or list(batch)
            if len(batch) != self.batch_size:
                if self.drop_last:
                    continue
                if self.even_batches:
                    assert self.batch_size is not None
                    batch = _filled(batch, head, self.batch_size)
            mine = self._my_share(batch)
            if mine:
                yield mine

    def _my_share(self, samples: list[Any]) -> list[Any]:
        return samples[self.process_index * self._share : (self.process_index + 1) * self._share]


def _filled(samples: Any, head: list[Any], size: int) -> list[Any]:
    """Fill up to `size` by repeating the first samples."""
    return list(islice(chain(samples, cycle(head)), size))


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, out of those of an iterable data set that every process reads."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True cuts each batch into {num_processes} equal parts, but the batch size is "
                f"{batch_size}: use a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the data set."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        round_size = self._round_size
        total = len(self.dataset)  # type: ignore[arg-type]
        rounds = total // round_size if self.drop_last else -(-total // round_size)
        return rounds * self._share

    @property
    def _share(self) -> int:
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def _round_size(self) -> int:
        return self._share * self.num_processes

    def __iter__(self) -> Iterator[Any]:
        mine = slice(self.process_index * self._share, (self.process_index + 1) * self._share)
        head: list[Any] = []
        samples = iter(self.dataset)
        while gathered := list(islice(samples, self._round_size)):
            head = head or gathered
            if len(gathered) < self._round_size:
                if self.drop_last:
                    return
                gathered = _filled(gathered, head, self._round_size)
            yield from gathered[mine]
