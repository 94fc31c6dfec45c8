"""The position of a prepared loader: global, so that it is valid on any number of processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class PositionError(ValueError):
    """Report a position in the data that cannot be kept exactly.

    The batch size, the number of processes or the data differ from those of the checkpoint, and the position falls
    inside a batch. Use one of the sizes that the message lists, or begin the epoch again.
    """


@dataclass(frozen=True, kw_only=True)
class Position:
    """An epoch, its order, and the number of consumed batches of the plain loader ("base batches").

    One step of N processes consumes N base batches, or one with `split_batches`.
    """

    epoch: int = 0
    batches: int = 0
    batch_size: int | None = None
    """Samples in a base batch."""
    begun: bool = True
    """The epoch has drawn its numbers from torch's generator; False between two epochs."""
    order: dict[str, Any] = field(default_factory=dict)
    """The key of this epoch's order."""
    dataset: Any = None
    """The state of a stateful iterable data set."""
    num_processes: int = 1
    """The number of processes when this was saved."""
    first_seed: int | None = None
    """What the seeds of all epochs are derived from, where members come and go."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: value for name, value in asdict(self).items() if name != "first_seed" or value is not None}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Position:
        """Read what `to_dict` wrote."""
        unknown = set(state) - set(cls.__dataclass_fields__)
        if unknown:
            raise PositionError(f"This is not the state of a prepared data loader: unexpected {sorted(unknown)}.")
        return cls(**state)

    def batches_of(self, batch_size: int | None) -> int:
        """Return this position in base batches of another size."""
        if batch_size == self.batch_size or self.batches == 0:
            return self.batches
        if batch_size is None or self.batch_size is None:
            raise PositionError(
                f"The position was saved with batch_size={self.batch_size} and this loader has {batch_size}: batches "
                "without a size can only be continued with the batch sampler they were begun with."
            )
        samples = self.batches * self.batch_size
        if samples % batch_size:
            raise PositionError(
                f"{samples} samples of epoch {self.epoch} were consumed in batches of {self.batch_size}; batches of "
                f"{batch_size} cannot begin there. Sizes that work: {_some_divisors(samples, near=batch_size)}."
            )
        return samples // batch_size


def _some_divisors(number: int, near: int) -> str:
    """List the divisors of a number that are nearest to another number."""
    divisors = [candidate for candidate in range(1, min(number, 64 * near) + 1) if number % candidate == 0]
    nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - near))[:6])
    return ", ".join(map(str, nearest))
