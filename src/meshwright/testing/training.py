"""Small data and models, made here and the same everywhere: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_VOCABULARY = 1000
_TRAINING_PAIRS, _VALIDATION_PAIRS = 64, 24


class RegressionDataset(Dataset[dict[str, Any]]):
    """Points near the line `y = a x + b`."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=length).astype(np.float32)
        self.y = (a * self.x + b + generator.normal(scale=0.1, size=length)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The line `y = a x + b`."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output

    def forward(self, x: Tensor) -> Any:
        """Return the values of the line, twice if so asked."""
        values = x * self.a + self.b
        return (values, values) if self.double_output else values


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of training and validation data: pairs of token sequences, labelled by whether they are equal.

    Batches are dicts with `input_ids`, `token_type_ids`, `attention_mask` and `labels`, padded to their longest, and
    can be moved: `batch.to(device)`.
    """
    return _loaders([_pair(number) for number in range(_TRAINING_PAIRS + _VALIDATION_PAIRS)], batch_size)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of training and validation data for language models: `input_ids` and `attention_mask`."""
    samples = [_pair(number) for number in range(_TRAINING_PAIRS + _VALIDATION_PAIRS)]
    wanted = ("input_ids", "attention_mask")
    return _loaders([{name: sample[name] for name in wanted} for sample in samples], batch_size)


def _pair(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 12, (), generator=generator))
    first = torch.randint(1, _VOCABULARY, (length,), generator=generator)
    are_equal = number % 2 == 0
    second = first if are_equal else torch.randint(1, _VOCABULARY, (length,), generator=generator)
    return {
        "input_ids": torch.cat([first, second]),
        "token_type_ids": torch.cat([torch.zeros_like(first), torch.ones_like(second)]),
        "attention_mask": torch.ones(2 * length, dtype=torch.int64),
        "labels": torch.tensor(int(are_equal)),
    }


def _loaders(samples: list[dict[str, Tensor]], batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    training, validation = samples[:_TRAINING_PAIRS], samples[_TRAINING_PAIRS:]
    return (
        DataLoader(training, batch_size=batch_size, shuffle=True, collate_fn=_padded),  # type: ignore[arg-type]
        DataLoader(validation, batch_size=batch_size, collate_fn=_padded),  # type: ignore[arg-type]
    )


class TokenBatch(dict[str, Tensor]):
    """A batch as tokenizers make it: examples move it themselves, by `batch.to(device)`."""

    def to(self, device: str | torch.device | int, **kwargs: Any) -> TokenBatch:
        """Move the tensors of this batch, and return it."""
        self.update({name: tensor.to(device, **kwargs) for name, tensor in self.items()})
        return self

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"This batch has no {name!r}, but {', '.join(self)}.") from None


def _padded(samples: list[dict[str, Tensor]]) -> TokenBatch:
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return TokenBatch(
        {
            name: torch.stack(values) if values[0].dim() == 0 else nn.utils.rnn.pad_sequence(values, batch_first=True)
            for name, values in columns.items()
        }
    )
