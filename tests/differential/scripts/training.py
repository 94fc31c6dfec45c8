"""Losses, weights, learning rates: what training does, step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from ..registry import Observer, script


def rows(count: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader of inputs and targets that are the same everywhere."""
    inputs = torch.linspace(-1, 1, count * 3).reshape(count, 3)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2), batch_size=batch_size, **options)


def network() -> nn.Module:
    """Return a small model with the same weights everywhere."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def weights(model: nn.Module) -> list[Any]:
    """Return all weights of a model as numbers."""
    return [parameter.detach().float().flatten().tolist() for parameter in model.parameters()]


def fit(observe: Observer, accelerator: Any, optimizer_class: Any = torch.optim.SGD, count: int = 18) -> nn.Module:
    """Train two epochs and note losses and weights."""
    own = network()
    model, optimizer, loader = accelerator.prepare(own, optimizer_class(own.parameters(), lr=0.1), rows(count))
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            observe(loss=loss.item(), synced=accelerator.sync_gradients)
    observe(weights=weights(own))
    return own


@script("one", "two")
def plain_training(observe: Observer) -> None:
    from accelerate import Accelerator

    fit(observe, Accelerator())


@script("one", "two")
def training_with_adam(observe: Observer) -> None:
    from accelerate import Accelerator

    fit(observe, Accelerator(), torch.optim.AdamW, count=16)


@script("one", "two")
def training_in_bf16(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    observe(precision=accelerator.mixed_precision, scaler=accelerator.scaler is None)
    model = accelerator.prepare(network())
    observe(output=model(torch.ones(2, 3)), weight=next(model.parameters()).dtype)
    fit(observe, accelerator)


@script("one", "two")
def training_in_fp16(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    observe(scaler=accelerator.scaler is None, precision=accelerator.mixed_precision)
    fit(observe, accelerator)


@script("one", "two")
def accumulating(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=3)
    observe(steps=accelerator.gradient_accumulation_steps)
    fit(observe, accelerator)


@script("one", "two")
def accumulating_across_epochs(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    fit(observe, Accelerator(gradient_accumulation_plugin=plugin))


@script("one", "two")
def accumulating_but_synchronising_each_batch(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    fit(observe, Accelerator(gradient_accumulation_plugin=plugin))


@script("one", "two")
def accumulation_changed_midway(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(network(), rows(24, 2))
    for step, (inputs, _) in enumerate(loader):
        if step == 3:
            accelerator.gradient_accumulation_steps = 4
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
        observe(synced=accelerator.sync_gradients, steps=accelerator.gradient_accumulation_steps)


@script("one", "two")
def two_steps_asked_for_twice(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2)
    observe.raises("both", Accelerator, gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin)


@script("one", "two")
def accumulating_two_models(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    left, right, left_step, right_step, loader = accelerator.prepare(first, second, *optimizers, rows(20))
    for inputs, targets in loader:
        with accelerator.accumulate(left, right):
            loss = nn.functional.mse_loss(left(inputs) + right(inputs), targets)
            accelerator.backward(loss)
            for optimizer in (left_step, right_step):
                optimizer.step()
                optimizer.zero_grad()
        observe(loss=loss.item(), synced=accelerator.sync_gradients)
    observe(first=weights(first), second=weights(second))


@script("one", "two")
def no_sync_by_hand(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model = accelerator.prepare(own)
    inputs = torch.full((2, 3), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs).sum())
    observe(apart=own[0].weight.grad)
    accelerator.backward(model(inputs).sum())
    observe(together=own[0].weight.grad)


@script("one", "two")
def sync_triggered_in_backward(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model = accelerator.prepare(own)
    inputs = torch.full((2, 3), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        loss = model(inputs).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    observe(gradient=own[0].weight.grad)


@script("one", "two")
def clipping(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), rows(16))
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets) * 10)
        observe(norm=accelerator.clip_grad_norm_(model.parameters(), 0.5).item(), clipped=own[0].weight.grad)
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        observe(values=own[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    observe(weights=weights(own), infinite=accelerator.clip_grad_norm_(own.parameters(), 1.0, norm_type=float("inf")))


@script("one", "two")
def clipping_while_accumulating(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    own = network()
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), rows(16, 2))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets) * 10)
            if accelerator.sync_gradients:
                observe(norm=accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    observe(weights=weights(own))


@script("one", "two")
def clipping_a_part_of_the_sum(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    own = network()
    model, loader = accelerator.prepare(own, rows(16, 2))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets) * 10)
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
        observe(gradient=own[0].weight.grad)
        break


def rates(observe: Observer, accelerator: Any, make: Any, count: int = 26, epochs: int = 2) -> None:
    """Train and note the learning rate after every step."""
    own = network()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer, loader, scheduler = accelerator.prepare(own, optimizer, rows(count, 2), make(optimizer))
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            observe(rate=scheduler.get_last_lr(), skipped=accelerator.optimizer_step_was_skipped)
    observe(state=scheduler.state_dict()["last_epoch"])


@script("one", "two")
def schedule_in_steps(observe: Observer) -> None:
    from accelerate import Accelerator

    rates(observe, Accelerator(), lambda optimizer: StepLR(optimizer, 3, gamma=0.5))


@script("one", "two")
def schedule_with_warmup_while_accumulating(observe: Observer) -> None:
    from accelerate import Accelerator

    def make(optimizer: Any) -> Any:
        return LambdaLR(optimizer, lambda step: min(1.0, step / 10))

    rates(observe, Accelerator(gradient_accumulation_steps=3), make)


@script("one", "two")
def schedule_not_adjusted_to_accumulation(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    rates(observe, Accelerator(gradient_accumulation_plugin=plugin), lambda optimizer: StepLR(optimizer, 3, gamma=0.5))


@script("one", "two")
def schedule_with_split_batches(observe: Observer) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    rates(observe, accelerator, lambda optimizer: StepLR(optimizer, 3, gamma=0.5))


@script("one", "two")
def schedule_stepped_by_hand(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(step_scheduler_with_optimizer=False, gradient_accumulation_steps=2)
    rates(observe, accelerator, lambda optimizer: StepLR(optimizer, 3, gamma=0.5))


@script("one", "two")
def schedule_with_a_length(observe: Observer) -> None:
    from accelerate import Accelerator

    rates(observe, Accelerator(), lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=8), count=16, epochs=1)


@script("two")
def schedule_with_a_length_and_an_uneven_end(observe: Observer) -> None:
    from accelerate import Accelerator

    rates(observe, Accelerator(), lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=7), count=14, epochs=1)


@script("one", "two")
def schedule_stepped_once_per_epoch(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    plain = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer, loader, scheduler = accelerator.prepare(own, plain, rows(8), StepLR(plain, 1, gamma=0.5))
    for _ in range(3):
        for inputs, _ in loader:
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        observe(rate=scheduler.get_last_lr())


@script("one", "two")
def optimizer_outside_accumulation(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model, optimizer = accelerator.prepare(own, torch.optim.Adam(own.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    observe(
        groups=len(optimizer.param_groups), rate=optimizer.param_groups[0]["lr"], keys=sorted(optimizer.state_dict())
    )
    observe(
        state=len(optimizer.state), skipped=optimizer.step_was_skipped, own=isinstance(optimizer, torch.optim.Optimizer)
    )
    optimizer.zero_grad()
    observe(gone=own[0].weight.grad is None, weights=weights(own))


@script("one", "two")
def gradients_scaled_by_accumulation(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4)
    own = network()
    model = accelerator.prepare(own)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    observe(gradient=own[0].weight.grad)


@script("one", "two")
def local_sgd(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator()
    own = network()
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), rows(20, 2))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            observe(weights=weights(own))
    observe(end=weights(own))


@script("one", "two")
def join_uneven_inputs(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), rows(12))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            observe(size=len(inputs))
    observe(weights=weights(own), even=accelerator.even_batches)


@script("one", "two")
def autocast(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import AutocastKwargs

    accelerator = Accelerator(mixed_precision="bf16")
    matrix = torch.ones(2, 2)
    with accelerator.autocast():
        observe(inside=(matrix @ matrix).dtype)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        observe(disabled=(matrix @ matrix).dtype)
    observe(outside=(matrix @ matrix).dtype)


@script("one", "two")
def unwrapping(observe: Observer) -> None:
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    for precision in ("no", "bf16"):
        accelerator = Accelerator(mixed_precision=precision)
        own = network()
        keys = list(own.state_dict())
        model = accelerator.prepare(own)
        observe(wrapped=type(model).__name__, unwrapped=accelerator.unwrap_model(model) is own)
        observe(extracted=extract_model_from_parallel(model) is own, keys=list(own.state_dict()) == keys)
        observe(state=list(accelerator.get_state_dict(model)))
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        observe(output=plain(torch.ones(1, 3)).dtype)
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()


@script("one", "two")
def evaluation_model(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare_model(network(), evaluation_mode=True)
    observe(kind=type(model).__name__, output=model(torch.ones(1, 3)))


@script("one", "two")
def memory_freed(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    model, optimizer, loader = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), rows(8))
    model, optimizer = accelerator.free_memory(model, optimizer)
    observe(model=model, optimizer=optimizer, models=len(accelerator._models), loaders=len(accelerator._dataloaders))
    loader = accelerator.clear(loader)
    observe(step=accelerator.step, kind=type(loader).__name__)


@script("one", "two")
def prepared_in_another_order(observe: Observer) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    own = network()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    things = accelerator.prepare(rows(8), StepLR(optimizer, 1), optimizer, own)
    observe(kinds=[type(thing).__name__ for thing in things])
    observe(single=type(accelerator.prepare(rows(4))).__name__, nothing=accelerator.prepare(None, None))
    observe(
        other=accelerator.prepare("text", 3),
        placements=accelerator.prepare(rows(2), device_placement=[False]) is not None,
    )
    observe.raises("too many placements", accelerator.prepare, rows(8), device_placement=[True, False])


@script("one", "two")
def ddp_options(observe: Observer) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, inputs: Any) -> Any:
            return self.used(inputs)

    torch.manual_seed(1)
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    own = Lazy()
    model = accelerator.prepare(own)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 2) * (accelerator.process_index + 1)).sum())
    observe(used=own.used.weight.grad, unused=own.unused.weight.grad is None)
