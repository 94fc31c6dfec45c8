"""Blocks step in the backward pass where that gives the same result, and errors say where it would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import Accelerator, OffloadConfig
from tests.parallel.replicas.offload.training import Stack, train


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"max_norm": 0.1}, False), ({"gradient_accumulation_steps": 2}, False)],
    ids=["nothing between", "clipping", "accumulation"],
)
def test_the_first_step_tells_whether_blocks_step_in_the_backward_pass(options: Any, expected: bool) -> None:
    assert train(offload="host", **options)["steps_in_backward"] is expected


def prepared(**options: Any) -> tuple[Accelerator, Stack, Any]:
    accelerator = Accelerator(offload=OffloadConfig(**options))
    model = Stack(3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def backward(accelerator: Accelerator, model: Stack) -> None:
    accelerator.backward(model(torch.ones(2, 4)).sum())


def test_parameters_of_blocks_have_changed_when_the_backward_pass_ends() -> None:
    accelerator, model, optimizer = prepared(step_in_backward=True)
    before = [param.detach().clone() for param in model.blocks.parameters()]
    backward(accelerator, model)
    assert not all(map(torch.equal, before, model.blocks.parameters()))
    stepped = [param.detach().clone() for param in model.blocks.parameters()]
    optimizer.step()
    assert all(map(torch.equal, stepped, model.blocks.parameters())), "once"
    assert all(param.grad is not None for param in model.parameters()), "as after any other step"


def test_clipping_after_blocks_have_stepped_is_an_error() -> None:
    accelerator, model, _ = prepared(step_in_backward=True)
    backward(accelerator, model)
    with pytest.raises(RuntimeError, match=r"clipped.*step_in_backward=False"):
        accelerator.clip_grad_norm_(model.parameters(), 0.1)


def test_a_second_backward_pass_after_blocks_have_stepped_is_an_error() -> None:
    accelerator, model, _ = prepared(step_in_backward=True)
    backward(accelerator, model)
    with pytest.raises(RuntimeError, match=r"before optimizer.step.*step_in_backward=False"):
        backward(accelerator, model)


def test_blocks_do_not_step_in_the_backward_pass_where_it_is_switched_off() -> None:
    accelerator, model, optimizer = prepared(step_in_backward=False)
    for _ in range(2):
        before = [param.detach().clone() for param in model.blocks.parameters()]
        backward(accelerator, model)
        assert all(map(torch.equal, before, model.blocks.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        assert not all(map(torch.equal, before, model.blocks.parameters()))
