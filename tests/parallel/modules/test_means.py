"""What a loss was divided by is read from its graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.parallel.modules.means import divisors_of, is_sum

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
LABELS = torch.tensor([0, 1, -100, 3, -100, 2])


def numbers(loss: Tensor) -> list[float]:
    return [float(each) for each in divisors_of(loss)]


@pytest.mark.parametrize(
    ("loss", "divisors"),
    [
        (F.cross_entropy(LOGITS, LABELS), [4]),
        (F.mse_loss(LOGITS, torch.zeros(6, 4)), [24]),
        (LOGITS.mean(), [24]),
        (LOGITS.sum() / torch.tensor(5.0), [5]),
        (LOGITS.mean() + F.cross_entropy(LOGITS, LABELS), [24, 4]),
        (0.5 * LOGITS.mean() + LOGITS[:2].mean(), [24, 8]),
        (LOGITS.mean(-1).sum(), []),
        (LOGITS.sum(), []),
        (F.cross_entropy(LOGITS, LABELS, reduction="sum"), []),
        (LOGITS.sum() / LOGITS.mean(), [24]),
    ],
    ids=range(10),
)
def test_divisors(loss: Tensor, divisors: list[float]) -> None:
    assert sorted(numbers(loss)) == sorted(divisors)


def test_a_loss_without_a_graph_has_none_and_a_long_one_is_given_up() -> None:
    assert divisors_of(torch.tensor(1.0)) == []
    loss = LOGITS.mean()
    for _ in range(30):
        loss = -loss
    assert numbers(loss) == [24]
    for _ in range(2):
        loss = -loss
    assert numbers(loss) == []


def test_a_sum_is_known() -> None:
    assert is_sum(LOGITS.sum())
    assert is_sum(F.cross_entropy(LOGITS, LABELS, reduction="sum"))
    assert not is_sum(LOGITS.mean())
    assert not is_sum(F.cross_entropy(LOGITS, LABELS))
    assert not is_sum(torch.tensor(1.0))
