"""Steps that a planned script takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.tools.plan.trace import GRADIENTS, OPTIMIZER
from tests.tools.plan.tracing.traced import trace_of


def test_an_optimizer_that_steps_inside_of_the_backward_pass_ends_the_step_with_it(tmp_path: Path) -> None:
    source = """
model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
for param in model.parameters():
    def step_and_free(param, optimizer=torch.optim.AdamW([param])):
        optimizer.step()
        optimizer.zero_grad()
    param.register_post_accumulate_grad_hook(step_and_free)
model, loader = accelerator.prepare(model, DataLoader(torch.ones(8, 64), batch_size=2))
for batch in loader:
    accelerator.backward(model(batch).mean())
"""
    trace = trace_of(source, tmp_path, world_size=1)
    assert [(step.samples, step.passes) for step in trace.steps] == [(2, 1), (2, 1)]
    weight = 64 * 64 * 4
    state = [each for each in trace.allocations if each.owner == OPTIMIZER and each.size == weight]
    assert len(state) == 2 * 4
    gradients = [each for each in trace.allocations if each.owner == GRADIENTS]
    assert len(gradients) == 2 * 4, "every step"
    events = sorted([(each.born, 1) for each in gradients] + [(each.freed or 0, -1) for each in gradients])
    held = [sum(change for _, change in events[: count + 1]) for count in range(len(events))]
    assert max(held) <= 2, "each is freed as soon as its parameter has stepped"


TWO_MODELS = """
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
loader = DataLoader(torch.ones(64, 4), batch_size=2)
first, second, loader, *optimizers = accelerator.prepare(first, second, loader, *optimizers)
for count, batch in enumerate(loader):
"""


def test_a_step_of_networks_that_take_turns_ends_when_each_has_stepped(tmp_path: Path) -> None:
    loop = """
    for model, optimizer in zip((first, second), optimizers):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
"""
    trace = trace_of(TWO_MODELS + loop, tmp_path, world_size=1)
    assert [(step.samples, step.passes) for step in trace.steps] == [(2, 1), (2, 1)]
    state = [each for each in trace.allocations if each.owner == OPTIMIZER and each.size == 4 * 4 * 4]
    assert len(state) == 2 * 2, "of both"


def test_two_optimizers_that_step_after_one_pass_belong_to_one_step(tmp_path: Path) -> None:
    loop = """
    accelerator.backward(second(first(batch)).mean())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
    trace = trace_of(TWO_MODELS + loop, tmp_path, world_size=1)
    assert [(step.samples, step.passes) for step in trace.steps] == [(2, 1), (2, 1)]


def test_an_optimizer_that_does_not_step_is_not_waited_for_for_long(tmp_path: Path) -> None:
    loop = """
    accelerator.backward(first(batch).mean())
    optimizers[0].step()
    optimizers[0].zero_grad()
"""
    trace = trace_of(TWO_MODELS + loop, tmp_path, world_size=1)
    assert [(step.samples, step.passes) for step in trace.steps] == [(16, 1), (2, 1)]


ACCUMULATED = """
accelerator.gradient_accumulation_steps = 4
model = nn.Linear(4, 4)
loader = DataLoader(torch.ones({samples}, 4), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in {data}:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("samples", "data", "passes"),
    [
        (7 * 64, "loader", [4, 3]),  # the end of the data closes the second window
        (5 * 64, "(batch for _ in range(2) for batch in loader)", [4, 1, 4]),
        (5 * 64, "loader", [4, 1]),
        (3 * 64, "(batch for _ in range(2) for batch in loader)", [3, 3]),  # there is no longer one
    ],
)
def test_a_window_that_the_end_of_the_data_cuts_short_is_not_taken_for_the_step(
    samples: int, data: str, passes: list[int], tmp_path: Path
) -> None:
    trace = trace_of(ACCUMULATED.format(samples=samples, data=data), tmp_path, world_size=8)
    assert [step.passes for step in trace.steps] == passes
    assert trace.batches_of_step == (8 * max(passes), 0)
    assert trace.steps[-1].passes + trace.untraced_passes == max(passes)
