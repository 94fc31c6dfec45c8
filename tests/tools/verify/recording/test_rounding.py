"""Another order of summation changes results, forward and backward, by rounding only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.tools.verify.recording.rounding import OtherOrderOfSummation


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 8)), (16, 96)),
        (nn.Conv2d(8, 4, 3), (2, 8, 12, 12)),
        (nn.MultiheadAttention(32, 2, batch_first=True), (2, 9, 32)),
    ],
)
def test_only_rounding_changes(model: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(inputs, inputs, inputs)[0] if isinstance(model, nn.MultiheadAttention) else model(inputs)
        output.square().mean().backward()
        return [output.detach(), *(param.grad.clone() for param in model.parameters())]  # type: ignore[union-attr]

    plain = gradients()
    with OtherOrderOfSummation():
        reordered = gradients()
    assert any(not one.equal(other) for one, other in zip(plain, reordered, strict=True))
    for one, other in zip(plain, reordered, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
