"""Mistakes of a script that would pass without a word, or fail without a hint."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch

from meshwright import Accelerator
from meshwright.launch.processes.verdict import Ending, judge, remedy
from tests.training import loss_of, make_data, make_model


def test_an_optimizer_of_another_model_is_noticed_once_at_the_line_of_the_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(make_model(), torch.optim.SGD(make_model().parameters(), 0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(loss_of(model, make_data(4)[:]))
            optimizer.step()
    (warning,) = caught
    assert "none of its 4 parameters has a gradient" in str(warning.message)
    assert warning.filename == __file__


def test_optimizers_that_take_turns_and_steps_without_gradients_are_no_mistake() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(make_model(), make_model())
    optimizers = accelerator.prepare(
        torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers[0].step()  # before there are any gradients
        for model, optimizer in zip((first, second), optimizers, strict=True):
            accelerator.backward(loss_of(model, make_data(4)[:]))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("clips", [False, True])
def test_a_plain_backward_pass_in_fp16_names_the_call_to_make(clips: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loss_of(model, make_data(4)[:]).backward()
    with pytest.raises(RuntimeError, match=r"accelerator\.backward\(loss\) instead of loss\.backward\(\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0) if clips else optimizer.step()


def test_a_scheduler_that_is_prepared_twice_has_one_wrapper() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(make_model().parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer, first, second = accelerator.prepare(optimizer, scheduler, scheduler)
    assert first is second is accelerator.prepare(scheduler)
    assert accelerator._schedulers == [first]


def test_an_argument_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'gradient_accumulation'. Did you mean gradient_accumulation_steps\?"):
        Accelerator(gradient_accumulation=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'xyz'$"):
        Accelerator(xyz=4)  # type: ignore[call-arg]
    assert "gradient_accumulation_steps" in inspect.signature(Accelerator).parameters


def test_a_state_dict_instead_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save_model\(\) takes a model, and was given a OrderedDict"):
        Accelerator(cpu=True).save_model(make_model().state_dict(), tmp_path)  # type: ignore[arg-type]


def test_an_attribute_of_the_wrapped_model_is_answered_with_unwrap_model() -> None:
    text = "AttributeError: 'DistributedDataParallel' object has no attribute 'weight'"
    record = {"type": "AttributeError", "text": text, "cause": None, "frames": [], "time": 1.0}
    ending = Ending(rank=0, local_rank=0, exit_code=1, record=record)
    assert "unwrap_model" in remedy(ending, judge([ending], out_of_memory=False))
