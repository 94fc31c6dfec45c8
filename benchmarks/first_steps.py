"""The check of the first steps: what it costs once, for a model of many tensors, and what a step costs afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from meshwright import Accelerator
from meshwright.config.environment import patch_environment
from meshwright.tools.first_steps.instrument import FirstSteps

from .contenders.accelerate import steps as our_steps
from .interleave import Comparison, Lap, compare, timed
from .task import loader, model

BLOCKS, WIDTH = 200, 512
"""Twice as many tensors, and 52 million parameters."""


def run(rounds: int) -> list[Comparison]:
    """Measure a steady step with and without, and the seconds of the processor that the check takes once."""
    torch.set_num_threads(1)
    row = compare(
        "step after the check of the first steps / without",
        lambda: lap_of("off"),
        lambda: lap_of("warn"),
        rounds=rounds,
        target=1.01,
    )
    costs = sorted(cost_once() for _ in range(5))
    return [replace(row, notes=[f"the check takes {costs[2] * 1e3:.1f} ms of the processor once (target 50)"])]


def lap_of(mode: str) -> Lap:
    """Return steps of a run with or without the check, its first two left out."""
    with patch_environment(meshwright_first_steps=mode):
        FirstSteps.current = None
        net = model()
        step = timed(our_steps(net, SGD(net.parameters(), 0.1), loader()))
        for _ in range(3):
            step()
    return step


def cost_once() -> float:
    """Return the seconds of the processor within the check, over two steps of a large model."""
    with patch_environment(meshwright_first_steps="off"):
        accelerator = Accelerator(cpu=True)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    net, optimizer = accelerator.prepare(net, SGD(net.parameters(), 1e-3))
    check, seconds = FirstSteps(accelerator.state._runtime), 0.0

    def timed_event(event: Callable[..., Any], *arguments: Any) -> None:
        nonlocal seconds
        start = time.process_time()
        event(*arguments)
        seconds += time.process_time() - start

    timed_event(check.attached, accelerator)
    for _ in range(2):
        loss = net(torch.randn(1, WIDTH)).square().mean()
        timed_event(check.backward_started, accelerator, loss)
        accelerator.backward(loss)
        timed_event(check.backward_ended, accelerator, loss)
        timed_event(check.step_started, optimizer)
        optimizer.step()
        timed_event(check.step_ended, optimizer, False)
        optimizer.zero_grad()
    assert check.is_over
    return seconds
