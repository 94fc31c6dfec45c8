"""A shuffled order in constant memory: random access into a permutation of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_BLOCK = 2048  # positions computed together when the permutation is read in order
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)  # odd constants with well spread bits, for multiplicative mixing
_MIX_2 = np.uint64(0x9E3779B97F4A7C15)


class Permutation(Sequence[int]):
    """A pseudorandom permutation of 0 .. length-1, keyed by seed and epoch, with random access.

    A Feistel network permutes the numbers of `bits` bits for any mixing function. Numbers outside the length are
    mapped again until they fall inside (cycle walking), which keeps it a permutation. `bits` is the smallest number
    that holds the length, so this takes less than two steps on average.
    """

    def __init__(self, length: int, seed: int, epoch: int = 0) -> None:
        self.length = length
        bits = max(2, (length - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2
        rounds = 12 if bits >= 16 else 24  # few bits need more rounds to look random
        digest = hashlib.shake_128(f"{seed}:{epoch}".encode()).digest(8 * rounds)
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            numbers: list[int] = self.at(np.arange(*position.indices(self.length))).tolist()
            return numbers
        if not -self.length <= position < self.length:
            raise IndexError(f"position {position} is outside a permutation of {self.length}")
        return int(self.at(np.array([position % self.length]))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.length, _BLOCK):
            yield from self[start : start + _BLOCK]

    def at(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers at many positions."""
        values = self._scramble(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._scramble(values[outside])
            outside = outside[values[outside] >= self.length]
        return values

    def finish(self) -> None:
        """Do nothing at the end of the epoch."""

    def _scramble(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Apply the Feistel network: each round mixes one half into the other, which is invertible."""
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        low, high = values & _mask(low_bits), values >> low_bits
        for key in self._keys:
            # Mix `high` into `low`, then swap them and their sizes.
            low = (low ^ _mixed(high, key)) & _mask(low_bits)
            low, high, low_bits, high_bits = high, low, high_bits, low_bits
        scrambled: npt.NDArray[Any] = (high << low_bits) | low
        return scrambled


def _mask(bits: Any) -> Any:
    return np.uint64((1 << int(bits)) - 1)


def _mixed(values: npt.NDArray[Any], key: np.uint64) -> npt.NDArray[Any]:
    mixed: npt.NDArray[Any] = (values ^ key) * _MIX_1
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(29)
    return mixed
