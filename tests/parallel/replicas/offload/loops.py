"""Training loops as scripts write them, each with the error that refuses it if offloaded training cannot do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import Accelerator, AcceleratorState, OffloadConfig
from tests.simulated_accelerator.faults import moves_in_place

Numbers = list[float]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.zeros(1))

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * self.inner(x)


class Model(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.chosen():
            x = self.call(block, x)
        out: Tensor = self.head(x)
        return out

    def chosen(self) -> Iterable[Any]:
        return self.blocks

    def call(self, block: Any, x: Tensor) -> Any:
        return block(x)


class Plain:
    """What a loop calls of an `Accelerator`, in plain torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, params: Any, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def unwrap_model(self, model: Any) -> Any:
        return model


class Training:
    """A model and what trains it."""

    def __init__(self, accelerator: Any, model: Any, optimizers: list[Any]) -> None:
        self.accelerator, self.model = accelerator, model
        self.optimizer, self.optimizers = optimizers[0], optimizers
        self.blocks = accelerator.unwrap_model(model).blocks
        numbers = torch.Generator().manual_seed(1)
        self.data = [
            tuple(torch.randn(4, n, generator=numbers).to(accelerator.device) for n in (5, 3)) for _ in range(8)
        ]

    def loss(self, number: int) -> Tensor:
        inputs, targets = self.data[number % 8]
        return nn.functional.mse_loss(self.model(inputs), targets)

    def backward(self, number: int) -> float:
        loss = self.loss(number)
        self.accelerator.backward(loss)
        return loss.item()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def steps(self, first: int = 0, last: int = 4, between: Callable[[int], Any] | None = None) -> Numbers:
        losses = []
        for number in range(first, last):
            losses.append(self.backward(number))
            if between is not None:
                between(number)
            self.step()
        return losses


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


@dataclass(frozen=True)
class Loop:
    run: Callable[[Training], Numbers]
    model: Callable[[], nn.Module] = Model
    optimizers: Callable[[Any], list[torch.optim.Optimizer]] = adamw
    refused: str | None = None
    """The message of the error, if offloaded training cannot do this."""
    refused_on_devices: str | None = None
    """The same, but on a CPU it can."""


LOOPS: dict[str, Loop] = {}


def loop(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        LOOPS[run.__name__] = Loop(run, **options)
        return run

    return add


def loop_with(change: Callable[[Any], Any], kind: type[nn.Module] = Model, **options: Any) -> Loop:
    """Train a model that was changed before `prepare`."""

    def make() -> nn.Module:
        model = kind()
        change(model)
        return model

    return Loop(lambda training: training.steps(), make, **options)


def run_loop(name: str, step_in_backward: bool | None = None, placement: str | None = "host") -> dict[str, Any]:
    """Run a loop; return the numbers that it saw, and the model's state."""
    each = LOOPS[name]
    torch.manual_seed(0)
    model = each.model()
    device = Accelerator().device
    in_place = nullcontext() if device.type == "cpu" else moves_in_place()
    if placement is None:
        with in_place:
            model.to(device)
        training = Training(Plain(device), model, each.optimizers(model))
    else:
        optimizers = each.optimizers(model)
        AcceleratorState._reset_state()
        accelerator = Accelerator(offload=OffloadConfig(placement=placement, step_in_backward=step_in_backward))
        with in_place:
            model, *optimizers = accelerator.prepare(model, *optimizers)
        training = Training(accelerator, model, optimizers)
    torch.manual_seed(1)
    numbers = each.run(training)
    state = training.accelerator.unwrap_model(model).state_dict()
    return {"numbers": numbers, "state": {name: value.cpu().clone() for name, value in state.items()}}


# --- frozen parameters ----------------------------------------------------------------------------------------------


def freeze(*prefixes: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            if name.startswith(prefixes):
                param.requires_grad_(False)

    return change


def freeze_every_second(model: nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)


class Adapted(Block):
    """A block with adapters of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = super().inner(x) + self.high(self.low(x))
        return out


class Quantised(Block):
    """A block with frozen numbers of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (8, 8), dtype=torch.int8), requires_grad=False)

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) @ (self.codes.to(x.dtype) / 9)


class WithAdapters(Model):
    block = Adapted


class WithCodes(Model):
    block = Quantised


LOOPS |= {
    "plain": Loop(lambda training: training.steps()),
    "frozen parameters in blocks": loop_with(freeze_every_second),
    "frozen blocks": loop_with(freeze("blocks.1.", "blocks.3.")),
    "only the head is trained": loop_with(freeze("embedding", "blocks")),
    "only the embedding is trained": loop_with(freeze("head", "blocks")),
    "frozen up to a block": loop_with(freeze("embedding", "blocks.0.", "blocks.1.")),
    "adapters": loop_with(freeze("embedding", "head"), WithAdapters),
    "frozen parameters of integers": loop_with(lambda model: None, WithCodes),
    "frozen parameters in the optimizer": loop_with(freeze("blocks.1."), optimizers=sgd),
}


@loop()
def frozen_midway(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    training.blocks[1].requires_grad_(False)
    return losses + training.steps(3, 6)


@loop(model=LOOPS["frozen up to a block"].model, optimizers=sgd)
def unfrozen_midway(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    training.blocks.requires_grad_(True)
    return losses + training.steps(3, 6)


@loop()
def frozen_between_forward_and_backward(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        loss = training.loss(number)
        training.blocks[2].up.requires_grad_(False)
        training.accelerator.backward(loss)
        training.blocks[2].up.requires_grad_(True)
        training.step()
        losses.append(loss.item())
    return losses


# --- hooks ----------------------------------------------------------------------------------------------------------


def more(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01) * 3 + 0.01


def more_accumulated(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(3).add_(0.01)


def tie_within_a_block(model: Any) -> None:
    block = model.blocks[1]
    block.down.weight = nn.Parameter(block.up.weight.detach().t().contiguous())
    block.norm.weight = block.norm.bias


def tie_blocks(model: Any) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


LOOPS |= {
    "register_hook before prepare": loop_with(lambda m: m.blocks[1].up.weight.register_hook(more)),
    "register_post_accumulate_grad_hook before prepare": loop_with(
        lambda m: m.blocks[1].up.weight.register_post_accumulate_grad_hook(more_accumulated)
    ),
    "forward hooks": loop_with(lambda m: m.blocks[1].register_forward_hook(lambda _, args, out: out * 1.1)),
    "forward hooks inside": loop_with(
        lambda m: m.blocks[2].up.register_forward_pre_hook(lambda _, args: (args[0] * 0.9,))
    ),
    "backward hooks": loop_with(
        lambda m: m.blocks[1].register_full_backward_hook(lambda _, inner, outer: (inner[0] * 0.5,))
    ),
    "backward hooks inside": loop_with(
        lambda m: m.blocks[1].up.register_full_backward_pre_hook(lambda _, outer: (outer[0] * 2,))
    ),
    "tied within a block": loop_with(tie_within_a_block),
    "tied blocks": loop_with(tie_blocks),
}


@loop()
def register_hook(training: Training) -> Numbers:
    losses = training.steps(0, 2)
    handle = training.blocks[1].up.weight.register_hook(more)
    losses += training.steps(2, 5)
    handle.remove()
    return losses + training.steps(5, 7)


@loop()
def register_post_accumulate_grad_hook(training: Training) -> Numbers:
    losses = training.steps(0, 2)
    handle = training.blocks[1].up.weight.register_post_accumulate_grad_hook(more_accumulated)
    losses += training.steps(2, 5)
    handle.remove()
    return losses + training.steps(5, 7)


@loop()
def hooks_with_accumulation(training: Training) -> Numbers:
    training.blocks[1].up.weight.register_hook(more)
    training.blocks[1].down.weight.register_post_accumulate_grad_hook(more_accumulated)
    return training.steps(between=lambda number: training.backward(number + 1))


@loop()
def a_hook_for_several_gradients(training: Training) -> Numbers:
    seen: Numbers = []
    torch.autograd.graph.register_multi_grad_hook(
        list(training.blocks[1].parameters()),
        lambda gradients: seen.extend(each.norm().item() for each in gradients if each is not None),
    )
    return training.steps() + seen


@loop(optimizers=sgd)
def steps_in_post_accumulate_hooks(training: Training) -> Numbers:
    def step(param: Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.01)
        param.grad = None

    for param in training.model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return training.steps()


# --- graphs ---------------------------------------------------------------------------------------------------------


class Repeating(Model):
    def chosen(self) -> Iterable[Any]:
        return [*self.blocks, *self.blocks]


class Changing(Model):
    passes = 0

    def chosen(self) -> Iterable[Any]:
        self.passes += 1
        return list(self.blocks)[::-1] if self.passes % 2 else list(self.blocks)[1:]


class CallingInside(Model):
    def call(self, block: Any, x: Tensor) -> Any:
        return x + block.inner(x)


class UsingWeights(Model):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.blocks[0].up.weight
        return super().forward(x) + weight.square().mean().to(x.device)


class Recomputing(Model):
    def call(self, block: Any, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)


class RecomputingReentrantly(Model):
    def call(self, block: Any, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=True)


class RecomputingInside(Model):
    class block(Block):
        def inner(self, x: Tensor) -> Tensor:
            return checkpoint(super().inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class RecomputingReentrantlyInside(Model):
    class block(Block):
        def inner(self, x: Tensor) -> Tensor:
            return checkpoint(super().inner, x, use_reentrant=True)  # type: ignore[no-any-return]


class RecomputingTwice(RecomputingInside):
    call = Recomputing.call


class RepeatingReentrantly(RecomputingReentrantly):
    chosen = Repeating.chosen  # type: ignore[assignment]


class Normalising(Model):
    class block(Block):
        def inner(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.div_(self.up.weight.norm())
            return super().inner(x)


LOOPS |= {
    "blocks that are used twice": loop_with(lambda m: None, Repeating),
    "blocks that are left out and reordered": loop_with(lambda m: None, Changing),
    "modules of blocks that are called alone": loop_with(
        lambda m: None, CallingInside, refused_on_devices="same device"
    ),
    "weights that are used outside of their block": loop_with(lambda m: None, UsingWeights),
    "recomputed blocks": loop_with(lambda m: None, Recomputing),
    "reentrantly recomputed blocks": loop_with(lambda m: None, RecomputingReentrantly),
    "recomputation inside of blocks": loop_with(lambda m: None, RecomputingInside),
    "reentrant recomputation inside of blocks": loop_with(lambda m: None, RecomputingReentrantlyInside),
    "recomputation inside of recomputed blocks": loop_with(lambda m: None, RecomputingTwice),
    "reentrantly recomputed blocks that are used twice": loop_with(lambda m: None, RepeatingReentrantly),
    "weights that change in the forward pass": loop_with(lambda m: None, Normalising),
}


@loop(refused="create_graph=True")
def a_gradient_penalty(training: Training) -> Numbers:
    inputs = training.data[0][0].requires_grad_(True)
    outputs = training.model(inputs)
    [gradient] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    training.accelerator.backward(gradient.square().sum())
    return []


@loop(refused="create_graph=True")
def a_backward_pass_with_create_graph(training: Training) -> Numbers:
    training.accelerator.backward(training.loss(0), create_graph=True)
    return []


@loop()
def gradients_of_parameters(training: Training) -> Numbers:
    numbers = []
    for number in range(3):
        gradients = torch.autograd.grad(training.loss(number), list(training.model.parameters()))
        numbers += [gradient.norm().item() for gradient in gradients] + training.steps(number, number + 1)
    return numbers


@loop()
def gradients_of_inputs(training: Training) -> Numbers:
    numbers = []
    for number in range(3):
        inputs = training.data[number][0].requires_grad_(True)
        [gradient] = torch.autograd.grad(training.loss(number), [inputs])
        numbers += [gradient.norm().item(), *training.steps(number, number + 1)]
    return numbers


@loop()
def a_penalty_after_the_forward_pass(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        loss = training.loss(number)
        loss = loss + sum(param.square().sum().to(loss.device) for param in training.model.parameters())
        training.accelerator.backward(loss)
        training.step()
        losses.append(loss.item())
    return losses


@loop()
def a_penalty_before_the_forward_pass(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        penalty = sum(param.square().sum().cpu() for param in training.model.parameters())
        loss = training.loss(number)
        loss = loss + penalty.to(loss.device)  # type: ignore[union-attr]
        training.accelerator.backward(loss)
        training.step()
        losses.append(loss.item())
    return losses


@loop()
def evaluation_between_forward_and_backward(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        loss = training.loss(number)
        with torch.no_grad():
            losses.append(training.loss(number + 1).item())
        training.accelerator.backward(loss)
        training.step()
    return losses


@loop()
def evaluation_between_steps(training: Training) -> Numbers:
    losses = []
    for number in range(3):
        losses += training.steps(number, number + 1)
        training.model.eval()
        with torch.no_grad():
            losses.append(training.loss(number + 1).item())
        training.model.train()
    return losses


@loop()
def two_forward_passes(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        loss = training.loss(number) + training.loss(number + 1)
        training.accelerator.backward(loss)
        training.step()
        losses.append(loss.item())
    return losses


@loop()
def two_losses(training: Training) -> Numbers:
    for number in range(4):
        first, second = training.loss(number), training.loss(number + 1)
        training.accelerator.backward(first)
        training.accelerator.backward(second)
        training.step()
    return []


@loop()
def two_backward_passes_of_a_graph(training: Training) -> Numbers:
    for number in range(4):
        loss = training.loss(number)
        training.accelerator.backward(loss, retain_graph=True)
        training.accelerator.backward(loss)
        training.step()
    return []


# --- between the backward pass and the step -------------------------------------------------------------------------


def change_options(training: Training, **options: Any) -> Callable[[int], None]:
    def change(number: int) -> None:
        for group in training.optimizer.param_groups:
            for name, value in options.items():
                group[name] = value / (number + 2)

    return change


@loop()
def a_learning_rate_that_is_set_before_the_step(training: Training) -> Numbers:
    return training.steps(between=change_options(training, lr=1e-2))


@loop()
def a_weight_decay_that_is_set_before_the_step(training: Training) -> Numbers:
    return training.steps(between=change_options(training, weight_decay=0.1))


@loop()
def a_scheduler_before_the_step(training: Training) -> Numbers:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain(training.optimizer), 0.5)
    return training.steps(between=lambda number: scheduler.step())


@loop()
def a_scheduler_after_the_step(training: Training) -> Numbers:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain(training.optimizer), 0.5)
    losses = []
    for number in range(4):
        losses += training.steps(number, number + 1)
        scheduler.step()
    return losses


def plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


@loop(refused=r"learning rate.*changed.*step_in_backward=False")
def a_learning_rate_that_is_set_later_on(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    return losses + training.steps(3, 6, between=change_options(training, lr=1e-2))


def change_gradients(training: Training, change: Callable[[Any], Any]) -> Callable[[int], None]:
    def changes(number: int) -> None:
        for param in training.model.parameters():
            if param.grad is not None:
                change(param)

    return changes


def replace_gradient(param: Any) -> None:
    param.grad = param.grad * 0.5


GRADIENT_CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda param: param.grad.mul_(0.5),
    "data.clamp_": lambda param: param.grad.data.clamp_(-1e-3, 1e-3),
    "a clamp that does nothing at first": lambda param: param.grad.data.clamp_(-1e3, 1e3),
    "a view": lambda param: param.grad.view(-1)[:1].zero_(),
    "out=": lambda param: torch.mul(param.grad, 0.5, out=param.grad),
    "*=": lambda param: param.grad.__imul__(0.5),
    "an item": lambda param: param.grad.view(-1).__setitem__(0, 0.0),
    "foreach": lambda param: torch._foreach_mul_([param.grad], 0.5),
    "numpy": lambda param: param.grad.cpu().numpy().clip(-1e-3, 1e-3),
    "another tensor": replace_gradient,
    "None": lambda param: setattr(param, "grad", None),
}


def changing_gradients(change: Callable[[Any], Any], first: int) -> Callable[[Training], Numbers]:
    def run(training: Training) -> Numbers:
        losses = training.steps(0, first)
        return losses + training.steps(first, first + 3, between=change_gradients(training, change))

    return run


for _name, _change in GRADIENT_CHANGES.items():
    LOOPS[f"gradients are changed: {_name}"] = Loop(changing_gradients(_change, 0))
    if _name != "numpy":
        LOOPS[f"gradients are changed later on: {_name}"] = Loop(
            changing_gradients(_change, 3), refused=r"Gradients.*changed.*step_in_backward=False"
        )


@loop()
def clipping(training: Training) -> Numbers:
    norms: Numbers = []

    def clip(number: int) -> None:
        norms.append(training.accelerator.clip_grad_norm_(training.model.parameters(), 0.1).item())

    return training.steps(between=clip)


@loop(refused=r"Gradients.*clipped.*step_in_backward=False")
def clipping_later_on(training: Training) -> Numbers:
    def clip(number: int) -> None:
        if number > 2:
            training.accelerator.clip_grad_norm_(training.model.parameters(), 0.1)

    return training.steps(0, 6, between=clip)


@loop()
def gradients_that_are_read(training: Training) -> Numbers:
    norms: Numbers = []

    def read(number: int) -> None:
        norms.extend(param.grad.norm().item() for param in training.model.parameters())

    return training.steps(between=read) + norms


@loop()
def gradients_that_are_kept(training: Training) -> Numbers:
    kept: list[Tensor] = []
    training.steps(between=lambda number: kept.extend(param.grad for param in training.model.parameters()))
    return [gradient.norm().item() for gradient in kept]


@loop()
def parameters_that_change_before_the_step(training: Training) -> Numbers:
    def change(number: int) -> None:
        with torch.no_grad():
            for param in training.model.parameters():
                param.mul_(0.9)

    return training.steps(between=change)


@loop(refused=r"Parameters were changed.*step_in_backward=False")
def parameters_that_change_before_a_later_step(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    return losses + parameters_that_change_before_the_step(training)


@loop(refused=r"a forward pass began before optimizer.step.*step_in_backward=False")
def a_step_that_is_skipped(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    losses.append(training.backward(3))
    training.optimizer.zero_grad()
    return losses + training.steps(4, 6)


@loop()
def a_first_step_that_is_skipped(training: Training) -> Numbers:
    losses = [training.backward(3)]
    training.optimizer.zero_grad()
    return losses + training.steps(0, 3)


@loop(refused=r"a forward pass began before optimizer.step.*step_in_backward=False")
def an_evaluation_before_the_step(training: Training) -> Numbers:
    def evaluate(number: int) -> None:
        if number > 2:
            with torch.no_grad():
                training.loss(number)

    return training.steps(0, 5, between=evaluate)


@loop(refused=r"state_dict.* before optimizer.step.*step_in_backward=False")
def a_state_dict_before_the_step(training: Training) -> Numbers:
    return training.steps(between=lambda number: training.model.state_dict())


@loop()
def accumulation(training: Training) -> Numbers:
    return training.steps(between=lambda number: training.backward(number + 1))


@loop(refused=r"before optimizer.step.*step_in_backward=False")
def accumulation_later_on(training: Training) -> Numbers:
    return training.steps(0, 2) + training.steps(2, 4, between=lambda number: training.backward(number + 1))


# --- between steps --------------------------------------------------------------------------------------------------


@loop()
def a_learning_rate_that_is_set_before_the_backward_pass(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        change_options(training, lr=1e-2)(number)
        losses += training.steps(number, number + 1)
    return losses


def changing_parameters(change: Callable[[Any], Any]) -> Loop:
    def run(training: Training) -> Numbers:
        losses = []
        for number in range(4):
            losses += training.steps(number, number + 1)
            for param in training.model.parameters():
                change(param)
        return losses

    return Loop(run)


@torch.no_grad()
def clamp(param: Any) -> None:
    param.clamp_(-0.05, 0.05)


@torch.no_grad()
def copy_half(param: Any) -> None:
    param.copy_(param * 0.5)


LOOPS |= {
    "parameters change in place": changing_parameters(clamp),
    "parameters are copied": changing_parameters(copy_half),
    "data changes in place": changing_parameters(lambda param: param.data.mul_(0.9)),
    "data is replaced": changing_parameters(lambda param: setattr(param, "data", param.data * 0.9)),
}


@loop()
def averages_that_are_swapped_in(training: Training) -> Numbers:
    params = list(training.model.parameters())
    averages = [param.detach().clone() for param in params]
    losses = []
    for number in range(4):
        losses += training.steps(number, number + 1)
        for average, param in zip(averages, params, strict=True):
            average.mul_(0.9).add_(param.detach(), alpha=0.1)
        kept = [param.data for param in params]
        for average, param in zip(averages, params, strict=True):
            param.data = average
        with torch.no_grad():
            losses.append(training.loss(number).item())
        for data, param in zip(kept, params, strict=True):
            param.data = data
    return losses


@loop()
def averages_that_are_swapped_in_before_the_backward_pass(training: Training) -> Numbers:
    params = list(training.model.parameters())
    losses = []
    for number in range(3):
        loss = training.loss(number)
        kept = [param.data for param in params]
        for param in params:
            param.data = param.data * 0.5
        with torch.no_grad():
            losses.append(training.loss(number).item())
        for data, param in zip(kept, params, strict=True):
            param.data = data
        training.accelerator.backward(loss)
        training.step()
    return losses


@loop()
def a_state_dict_that_is_loaded(training: Training) -> Numbers:
    saved = {name: value.clone() for name, value in training.model.state_dict().items()}
    losses = training.steps(0, 3)
    training.model.load_state_dict(saved)
    return losses + training.steps(3, 6)


@loop()
def zeroed_gradients(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        losses.append(training.backward(number))
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
    return losses


@loop()
def gradients_that_are_cleared_first(training: Training) -> Numbers:
    losses = []
    for number in range(4):
        training.model.zero_grad()
        losses.append(training.backward(number))
        training.optimizer.step()
    return losses


@loop(optimizers=lambda model: [torch.optim.SGD([*model.head.parameters(), *model.blocks[0].parameters()], lr=0.1)])
def a_group_that_is_added(training: Training) -> Numbers:
    losses = training.steps(0, 3)
    plain(training.optimizer).add_param_group({"params": list(training.blocks[1].parameters()), "lr": 0.05})
    return losses + training.steps(3, 6)


@loop(optimizers=lambda model: [torch.optim.SGD([*model.head.parameters(), *model.blocks[0].parameters()], lr=0.1)])
def a_group_that_is_added_before_the_step(training: Training) -> Numbers:
    def add(number: int) -> None:
        if number == 2:
            plain(training.optimizer).add_param_group({"params": list(training.blocks[1].parameters()), "lr": 0.05})

    return training.steps(0, 5, between=add)


@loop(
    optimizers=lambda model: [
        torch.optim.AdamW(model.blocks.parameters(), lr=1e-2),
        torch.optim.SGD([*model.embedding.parameters(), *model.head.parameters()], lr=0.1),
    ]
)
def two_optimizers(training: Training) -> Numbers:
    return training.steps()


@loop(
    optimizers=lambda model: [
        torch.optim.AdamW(model.blocks[:2].parameters(), lr=1e-2),
        torch.optim.SGD(model.blocks[2:].parameters(), lr=0.1),
    ]
)
def two_optimizers_of_blocks(training: Training) -> Numbers:
    return training.steps()


@loop(optimizers=sgd)
def closures(training: Training) -> Numbers:
    def closure() -> float:
        training.optimizer.zero_grad()
        return training.backward(0)

    return [training.optimizer.step(closure) for _ in range(4)]
