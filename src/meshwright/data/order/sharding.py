"""Shard a global order: it is split into equal rounds, and each round into one part per process.

A round is what all processes consume in one step: `num_processes` batches, or one batch split into `num_processes`
parts with `split_batches`. With `even_batches` the last round is padded from the start of the order;
`real_samples_in_last_round` returns how many of its samples are real.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from .orders import Order, read_order, sized_sampler

_BLOCK = 4096  # samples whose positions are computed together


class BatchSamplerShard(BatchSampler):
    """One process's shard of a global batch sampler."""

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
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
        self.counted_in_last_round: list[int] | None = None
        """Real samples of every process in the last round, known once a custom batch sampler is exhausted."""
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches=True cuts batches into equal parts: the batch size ({self.batch_size}) needs to be a "
                f"round multiple of the number of processes ({num_processes})."
            )

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Return the sampler of the global batch sampler, if it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Return the number of global batches."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    @property
    def batches_per_round(self) -> int:
        """Return the number of global batches per step."""
        return 1 if self.split_batches else self.num_processes

    @property
    def share(self) -> int:
        """Return the number of samples per process in a full round."""
        assert self.batch_size is not None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        return self.num_rounds_from(0)

    def num_rounds_from(self, start: int) -> int:
        """Return the number of batches of this process from global batch `start` on."""
        num_samples = self._num_samples()
        if num_samples is not None and self.batch_size is not None:
            return self._num_rounds(num_samples - start * self.batch_size)
        if self.split_batches:
            return max(0, self.total_length - start)
        whole, rest = divmod(max(0, self.total_length - start), self.num_processes)
        if self.drop_last or rest == 0:
            return whole
        return whole + 1 if self.even_batches or self.process_index < rest else whole

    def _num_samples(self) -> int | None:
        """Return the number of samples in an epoch; None if a custom batch sampler makes another number of batches."""
        if self.batch_size is None or not hasattr(self.sampler, "__len__"):
            return None
        if not hasattr(self.batch_sampler, "__len__"):
            return None
        if sized_sampler(self.batch_sampler) is None:
            whole, rest = divmod(len(self.sampler), self.batch_size)
            if self.total_length != whole + (rest > 0 and not self.drop_last):
                return None
        return len(self.sampler)

    def real_samples_in_last_round(self, start: int) -> int | None:
        """Return the number of real samples in the last round; None if it is only known by iterating."""
        num_samples = self._num_samples()
        if num_samples is None or self.batch_size is None:
            return None
        round_size = self.share * self.num_processes
        remaining = num_samples - start * self.batch_size
        return round_size if self.drop_last else (remaining % round_size or round_size)

    def takes_part_in_last_round(self, start: int) -> bool:
        """Return whether this process has a batch in the last round; without `even_batches` some may not."""
        if self.even_batches or self.drop_last:
            return True
        real = self.real_samples_in_last_round(start)
        return real is not None and real > self.process_index * self.share

    def __iter__(self) -> Iterator[list[Any]]:
        return self.iterate_from(0)

    def iterate_from(self, start: int) -> Iterator[list[Any]]:
        """Yield this process's batches from global batch `start` on."""
        self.counted_in_last_round = None
        sampler = sized_sampler(self.batch_sampler)
        if sampler is not None:  # drawn with the first batch, as the plain loader does
            yield from self._by_position(read_order(sampler), start)
            return
        for batches in self._split_stream(start) if self.split_batches else self._round_robin_stream(start):
            yield from batches[self._own_parts]

    @property
    def _own_parts(self) -> slice:
        """The parts of a round that this process reads."""
        return slice(self.process_index, self.process_index + 1)

    def _num_rounds(self, num_samples: int) -> int:
        round_size = self.share * self.num_processes
        if self.drop_last:
            return max(0, num_samples // round_size)
        if self.even_batches:
            return max(0, -(-num_samples // round_size))
        own = num_samples - self.process_index * self.share  # samples from its first one on
        return max(0, -(-own // round_size))

    def _by_position(self, order: Order, start: int) -> Iterator[list[Any]]:
        """Read this process's parts of the order: those of round k begin `k * round_size` after those of the first."""
        assert self.batch_size is not None
        share, total = self.share, len(order)
        round_size = share * self.num_processes
        num_rounds = self._num_rounds(total - start * self.batch_size)
        parts = np.arange(self.num_processes)[self._own_parts]
        samples_of_a_round = start * self.batch_size + (parts[:, None] * share + np.arange(share)).reshape(-1)
        rounds_per_block = max(1, _BLOCK // len(samples_of_a_round))
        for begin in range(0, num_rounds, rounds_per_block):
            rounds = np.arange(begin, min(begin + rounds_per_block, num_rounds))
            positions = samples_of_a_round + rounds[:, None] * round_size
            cut = share
            if positions[-1, -1] >= total:  # the last round is not full
                if not self.even_batches:
                    cut = int((positions[-1] < total).sum())
                positions %= total
            batches = order.at(positions.reshape(-1)).reshape(-1, share).tolist()
            if cut < share:
                batches[-1] = batches[-1][:cut]
            if rounds[-1] == num_rounds - 1:
                yield from batches[:-1]
                order.finish()
                yield batches[-1]
            else:
                yield from batches

    # Custom batch samplers can only be iterated.

    def _round_robin_stream(self, start: int) -> Iterator[list[list[Any]]]:
        """Yield the batches of all processes, round by round."""
        head: list[list[Any]] = []  # the batches of the first round, to pad the last
        held: list[list[Any]] = []  # the last complete round, until it is known not to be the last
        current: list[list[Any]] = []
        for index, batch in enumerate(self.batch_sampler):
            if index < self.num_processes:
                head.append(batch)
            if index < start:
                continue
            current.append(batch)
            if len(current) == self.num_processes:
                if held:
                    yield held
                held, current = current, []
        if current and held:
            yield held
        yield self._last_round(current or held, head)

    def _last_round(self, batches: list[list[Any]], head: list[list[Any]]) -> list[list[Any]]:
        complete = len(batches) == self.num_processes
        full = self.batch_size is None or all(len(batch) >= self.batch_size for batch in batches)
        if complete and (full or not self.even_batches):
            return batches
        if self.drop_last or not batches:
            return []
        if not self.even_batches:
            return batches
        if self.batch_size is None:  # the batch size is unknown: processes without a batch get a whole one
            missing = self.num_processes - len(batches)
            self.counted_in_last_round = [*map(len, batches), *([0] * missing)]
            return filled(batches, head, self.num_processes)
        real = list(chain(*batches))
        self.counted_in_last_round = shares_of(len(real), self.share, self.num_processes)
        return self._shares(filled(real, list(chain(*head)), self.share * self.num_processes))

    def _split_stream(self, start: int) -> Iterator[list[list[Any]]]:
        """Yield the parts of all processes, batch by batch."""
        head: list[Any] = []
        for index, batch in enumerate(self.batch_sampler):
            head = head or list(batch)
            if index < start:
                continue
            if len(batch) != self.batch_size:
                if self.drop_last:
                    continue
                self.counted_in_last_round = shares_of(len(batch), self.share, self.num_processes)
                if self.even_batches:
                    assert self.batch_size is not None
                    batch = filled(batch, head, self.batch_size)
            yield [part for part in self._shares(batch) if part]

    def _shares(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[rank * self.share : (rank + 1) * self.share] for rank in range(self.num_processes)]


class BatchSamplerOfAll(BatchSamplerShard):
    """The shards of all processes, one after the other, for a process that reads for all of them."""

    def __init__(self, batch_sampler: Iterable[list[Any]], num_processes: int, split_batches: bool) -> None:
        super().__init__(batch_sampler, num_processes, 0, split_batches)

    @property
    def _own_parts(self) -> slice:
        return slice(None)


def shares_of(num_real: int, share: int, num_processes: int) -> list[int]:
    """Return how many of the real samples in a round every process has, which are given out in order."""
    return [min(max(num_real - rank * share, 0), share) for rank in range(num_processes)]


def filled(samples: Any, head: list[Any], size: int) -> list[Any]:
    """Pad to `size` by repeating the first samples or batches."""
    return list(islice(chain(samples, cycle(head)), size))
