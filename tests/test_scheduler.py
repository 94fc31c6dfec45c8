"""The prepared scheduler follows the optimizer's real steps, once per process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import meshwright.scheduler
from meshwright import AcceleratedScheduler, Accelerator, GradScalerKwargs
from tests.ranks import run_on_ranks
from tests.training import loss_of, make_data, make_model


def learning_rates(steps: int = 4, **options: object) -> list[float]:
    accelerator = Accelerator(cpu=True, **options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, make_data(4)[:]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return rates


def test_on_one_process_it_advances_once_per_step() -> None:
    assert learning_rates() == [1, 2, 3, 4]


def test_it_stands_still_while_gradients_accumulate() -> None:
    assert learning_rates(gradient_accumulation_steps=2) == [0, 1, 1, 2]


def test_on_several_processes_it_advances_once_per_process_unless_batches_are_split() -> None:
    assert run_on_ranks(2, learning_rates) == [[2, 4, 6, 8]] * 2
    assert run_on_ranks(2, learning_rates, split_batches=True) == [[1, 2, 3, 4]] * 2


def test_it_can_be_freed_from_the_optimizer() -> None:
    rates = learning_rates(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    assert rates == [1, 2, 3, 4]
    assert run_on_ranks(2, learning_rates, step_scheduler_with_optimizer=False) == [[1, 2, 3, 4]] * 2


def one_cycle_to_its_end() -> float:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()[0]


def test_a_schedule_of_fixed_length_stops_at_its_end_instead_of_raising() -> None:
    alone = one_cycle_to_its_end()
    assert run_on_ranks(2, one_cycle_to_its_end) == [pytest.approx(alone, abs=1e-6)] * 2


def messages_about_advancing() -> list[str]:
    meshwright.scheduler._has_logged = False
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("meshwright.scheduler")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    learning_rates()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return records


def test_that_it_advances_more_than_once_per_step_is_said_once_to_those_who_ask() -> None:
    on_main, on_other = run_on_ranks(2, messages_about_advancing)
    assert on_main == ["INFO: LambdaLR advances 2 times per optimizer step: once for the batch of each process."]
    assert on_other == []
    assert messages_about_advancing() == [], "one process: nothing to say"


def warnings_of_a_schedule(length: int, steps: int, kind: str = "linear") -> list[str]:
    """Train with a warm-up and a linear decay to zero, or one cycle, and return what is warned of."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own: Any = LambdaLR(optimizer, lambda step: min(step / 4, max(0, length - step) / length))
    if kind == "one cycle":
        own = OneCycleLR(optimizer, max_lr=1.0, total_steps=length)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    return [
        f"{Path(warning.filename).name}: {warning.message}" for warning in caught if "its end" in str(warning.message)
    ]


@pytest.mark.parametrize("kind", ["linear", "one cycle"])
def test_a_schedule_that_is_over_while_training_goes_on_is_warned_of(kind: str) -> None:
    on_main, on_other = run_on_ranks(2, warnings_of_a_schedule, length=40, steps=40, kind=kind)  # counts its steps
    assert len(on_main) == 1
    assert on_main[0].startswith("test_scheduler.py: ")
    assert "advances 2 times per optimizer step" in on_main[0]
    assert on_other == []
    for steps in (20, 21):  # for two processes, whose last round may have been filled up
        assert run_on_ranks(2, warnings_of_a_schedule, length=40, steps=steps, kind=kind) == [[], []]
    assert warnings_of_a_schedule(length=40, steps=40, kind=kind) == []


def test_a_skipped_optimizer_step_is_not_counted() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(loss_of(model, make_data(4)[:]))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0]


def test_it_hands_on_everything_else() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    own = LambdaLR(optimizer, lambda step: 0.5**step)
    scheduler = accelerator.prepare(own)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert scheduler.base_lrs == [1.0]
    assert scheduler.get_lr() == own.get_lr()
    saved = scheduler.state_dict()
    optimizer.step()
    own.step()
    scheduler.load_state_dict(saved)
    assert own.last_epoch == 0
    assert accelerator.prepare(scheduler) is scheduler
