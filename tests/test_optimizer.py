"""The prepared optimizer, with and without a loss scaler."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import AcceleratedOptimizer, Accelerator, GradScalerKwargs, dispatch_model
from meshwright.errors import UnsupportedSettingError
from tests.training import loss_of, make_data, make_model

HUGE = 2.0**40  # a loss scale at which fp16 gradients overflow


def prepared(
    optimizer_class: type = torch.optim.SGD, init_scale: float = 65536.0, **options: object
) -> tuple[Accelerator, torch.nn.Module, AcceleratedOptimizer]:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=init_scale)]
    )
    model = make_model()
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_it_is_an_optimizer_that_hands_on_everything_else() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accelerator.prepare(own)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is own.param_groups
    assert optimizer.defaults["momentum"] == 0.9
    optimizer.param_groups[0]["lr"] = 0.5
    assert own.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert len(own.param_groups) == 2
    assert accelerator.prepare(optimizer) is optimizer


class Averaging(torch.optim.Optimizer):
    """Wraps another optimizer, as Lookahead and SAM do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: object = None) -> None:
        self.optimizer.step()


def test_an_optimizer_around_another_one_is_an_optimizer() -> None:
    model = make_model()
    optimizer = Averaging(torch.optim.SGD(model.parameters(), lr=0.1))
    _, prepared_optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    assert isinstance(prepared_optimizer, AcceleratedOptimizer)
    assert prepared_optimizer.optimizer is optimizer


def test_its_state_can_be_saved_loaded_copied_and_pickled() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    loss_of(model, make_data(4)[:]).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.state_dict()["state"][0]["step"] == 1
    assert again.gradient_state is not None


def test_a_closure_is_called_and_its_loss_returned() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = accelerator.prepare(torch.optim.LBFGS(model.parameters(), max_iter=3))
    batch = make_data(16)[:]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


class ReadNumbers(TorchDispatchMode):
    """Count how often the host reads a number of a tensor, for which it would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_fused_optimizer_steps_without_reading_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_FIRST_STEPS", "off")  # which reads numbers in the first two
    accelerator, model, optimizer = prepared(torch.optim.AdamW, fused=True)
    for _ in range(2):
        accelerator.backward(loss_of(model, make_data(4)[:]))
        with ReadNumbers() as numbers:
            optimizer.step()
        assert numbers.count == 0
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_says_so(fused: bool) -> None:
    accelerator, model, optimizer = prepared(torch.optim.AdamW, init_scale=HUGE, fused=fused)
    before = model[0].weight.clone()
    accelerator.backward(loss_of(model, make_data(4)[:]))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model[0].weight, before)
    assert accelerator.scaler.get_scale() == HUGE / 2
    optimizer.zero_grad()
    accelerator.scaler.update(1.0)
    accelerator.backward(loss_of(model, make_data(4)[:]))
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(model[0].weight, before)


def test_a_disabled_scaler_steps_plainly() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.clone()
    accelerator.backward(loss_of(model, make_data(4)[:]))
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert not optimizer.step_was_skipped


def test_gradients_are_unscaled_before_clipping_and_only_once() -> None:
    accelerator, model, optimizer = prepared()
    reference = make_model()
    batch = make_data(8)[:]
    loss_of(reference, batch).backward()
    accelerator.backward(loss_of(model, batch))
    accelerator.unscale_gradients(optimizer)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    assert norm.item() == pytest.approx(expected.item(), rel=1e-2)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-3
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_several_optimizers_fed_by_one_backward_pass_are_unscaled_alike() -> None:
    """With torch's own scaler, updating after the first step would rescale the second's gradients wrongly."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(growth_interval=1)])
    first, second = make_model(seed=0), make_model(seed=0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    first, second, one, two = accelerator.prepare(first, second, *optimizers)
    for batch in ([t[:4] for t in make_data(8)[:]], [t[4:] for t in make_data(8)[:]]):
        accelerator.backward(loss_of(first, batch) + loss_of(second, batch))
        accelerator.clip_grad_norm_(first.parameters(), 1.0)
        accelerator.clip_grad_norm_(second.parameters(), 1.0)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert accelerator.scaler.state_dict()["scale"] == 65536.0 * 4


def test_schedule_free_optimizers_can_be_switched() -> None:
    class Switchable(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    own = Switchable(make_model().parameters(), lr=0.1)
    optimizer = Accelerator(cpu=True).prepare(own)
    optimizer.train()
    assert own.mode == "train"
    optimizer.eval()
    assert own.mode == "eval"
    plain = Accelerator(cpu=True).prepare(torch.optim.SGD(make_model().parameters(), lr=0.1))
    plain.train()
    plain.eval()


class Fused(torch.optim.SGD):
    """A stand-in for LOMO's optimizers: it steps inside the backward pass, and has no other step."""

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        """Compute gradients and update parameters at once."""
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-lr)
                param.grad = None

    def step(self, closure: object = None) -> None:
        """Raise: nobody is to call it."""
        raise NotImplementedError


def test_an_optimizer_that_steps_inside_the_backward_pass_with_a_stand_in_for_lomo() -> None:
    accelerator = Accelerator(cpu=True)
    model, alone = make_model(), make_model()
    model, optimizer = accelerator.prepare(model, Fused(model.parameters(), lr=1.0))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        accelerator.backward(loss_of(model, make_data(4)[:]), learning_rate=0.1)
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(alone, make_data(4)[:]).backward()
        plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.warns(UserWarning, match=r"clip_grad_norm_\(\) clips nothing: Fused steps inside the backward pass"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedSettingError, match="with num_items"):
        accelerator.backward(loss_of(model, make_data(4)[:]), learning_rate=0.1, num_items=4)
    other = Accelerator(cpu=True)
    other.prepare(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"is for LOMO optimizers, .* none was given"):
        other.backward(loss_of(alone, make_data(4)[:]), learning_rate=0.1)


def test_an_optimizer_of_weights_that_a_device_map_keeps_on_disk_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model = dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    with pytest.raises(ValueError, match=r"train 2 weights that .* on the host or on disk \(1\.weight, 1\.bias"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
