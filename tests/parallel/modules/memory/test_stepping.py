"""Optimizers that step in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    recompute_activations,
    step_in_backward,
)
from meshwright.errors import UnsupportedSettingError
from tests.parallel.modules.memory.counting import peak_of
from tests.ranks import ranks

WIDTH = 16
MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


class Model(nn.Module):
    """Blocks between two layers that share a weight."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))
        self.head = nn.Linear(width, 20)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(1, -1).flatten())


def sharding() -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Sequential"])
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": [param for param in model.parameters() if param.dim() > 1]}, {"params": vectors, "lr": 0.003}]


class Run:
    """A model, its optimizer and a schedule, prepared."""

    def __init__(self, early: bool, accelerator: Accelerator | None = None, make: Any = None, model: Any = None):
        self.accelerator = accelerator or Accelerator(cpu=True)
        model = model or Model()
        optimizer = (make or MAKERS["AdamW"])(groups_of(model))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, step_in_backward(optimizer) if early else optimizer, schedule
        )
        self.steps = 0

    def backward(self, **options: Any) -> None:
        torch.manual_seed(10 * self.steps + self.accelerator.process_index)
        self.accelerator.backward(self.model(torch.randint(20, (2, 8))), **options)

    def train(self, steps: int = 3) -> list[Tensor]:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return list(self.accelerator.get_state_dict(self.model).values())


def assert_equal(own: list[Tensor], expected: list[Tensor]) -> None:
    assert len(own) == len(expected)
    assert all(map(torch.equal, own, expected))


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_are_equal_to_the_bit_and_no_gradient_is_left(name: str) -> None:
    run = Run(True, make=MAKERS[name])
    before = [param.detach().clone() for param in run.model.parameters()]
    run.backward()
    assert all(param.grad is None for param in run.model.parameters())
    assert not any(map(torch.equal, before, run.model.parameters()))
    run.optimizer.step()
    assert_equal(Run(True, make=MAKERS[name]).train(), Run(False, make=MAKERS[name]).train())


def test_gradients_are_freed_one_by_one() -> None:
    def peak(early: bool) -> int:
        run = Run(early, model=Model(12, 128), make=MAKERS["SGD"])
        run.train(1)
        return peak_of(lambda: run.train(1))

    gradients = sum(param.nbytes for param in Model(12, 128).parameters())
    assert peak(False) - peak(True) > 0.8 * gradients


def test_recomputed_blocks_step_in_the_backward_pass() -> None:
    assert_equal(Run(True, model=recompute_activations(Model())).train(), Run(False).train())


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    run = Run(True)
    run.train(2)
    run.accelerator.save_state(tmp_path / "state")
    went_on = run.train(2)
    again = Run(True)
    again.steps = 2
    again.accelerator.load_state(tmp_path / "state")
    assert_equal(again.train(2), went_on)
    late = Run(False)
    late.steps = 2
    late.accelerator.load_state(tmp_path / "state")
    assert_equal(late.train(2), went_on)


def test_backward_takes_the_learning_rate_of_the_step() -> None:
    def trained(early: bool) -> list[Tensor]:
        run = Run(early, make=MAKERS["SGD"])
        for rate in (0.2, 0.05):
            if early:
                run.backward(learning_rate=rate)
            else:
                run.backward()
                for group in run.optimizer.param_groups:
                    group["lr"] = rate
            run.optimizer.step()
            run.optimizer.zero_grad()
        return list(run.model.parameters())

    assert_equal(trained(True), trained(False))


def test_a_sum_of_losses_with_its_number_of_items_steps_too() -> None:
    def trained(early: bool) -> list[Tensor]:
        run = Run(early)
        run.backward(num_items=7)
        run.optimizer.step()
        return list(run.model.parameters())

    assert_equal(trained(True), trained(False))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@ranks(2)
def test_shards_step_after_their_gradients_are_reduced(mixed_precision: str) -> None:
    def trained(early: bool) -> list[Tensor]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Sequential"])
        run = Run(early, Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision))
        parameters = run.train()
        run.backward()
        assert all((param.grad is None) == early for param in run.model.parameters())
        return parameters

    assert_equal(trained(True), trained(False))


@ranks(2)
def test_shards_resume_exactly(tmp_path: Path) -> None:
    run = Run(True, sharding())
    run.train(1)
    run.accelerator.save_state(tmp_path / "state")
    went_on = run.train(1)
    run.accelerator.load_state(tmp_path / "state")
    run.steps = 1
    assert_equal(run.train(1), went_on)


class Mlp(nn.Module):
    """Two layers that tensor parallelism splits, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


@ranks(2)
def test_split_layers_step_in_the_backward_pass() -> None:
    def trained(early: bool) -> list[Tensor]:
        plan = {"up": "colwise", "down": "rowwise"}
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=plan))
        model = Mlp()
        optimizer = MAKERS["AdamW"](model.parameters())
        model, optimizer = accelerator.prepare(model, step_in_backward(optimizer) if early else optimizer)
        for step in range(3):
            torch.manual_seed(step)
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return list(accelerator.get_state_dict(model).values())

    assert_equal(trained(True), trained(False))


@ranks(2)
def test_ddp_is_refused_because_its_buckets_stay() -> None:
    with pytest.raises(UnsupportedSettingError, match=r"step_in_backward with this strategy.*gradient_as_bucket_view"):
        Run(True)


@ranks(2)
def test_parameters_that_nobody_shards_and_shards_on_the_host_are_refused() -> None:
    on_host = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    with pytest.raises(UnsupportedSettingError, match="cpu_offload=True"):
        Run(True, Accelerator(cpu=True, fsdp_plugin=on_host))
    whole = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="1")
    with pytest.raises(UnsupportedSettingError, match="ignored_modules are averaged after"):
        Run(True, Accelerator(cpu=True, fsdp_plugin=whole), model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_settings_that_need_all_gradients_are_refused() -> None:
    for options, name in (
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps > 1"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"offload": "host", "mixed_precision": "no"}, r"this strategy.*OffloadConfig\(step_in_backward"),
    ):
        with pytest.raises(UnsupportedSettingError, match=f"step_in_backward with {name}"):
            Run(True, Accelerator(cpu=True, **options))
    run = Run(True)
    for clip in (run.accelerator.clip_grad_norm_, run.accelerator.clip_grad_value_):
        with pytest.raises(UnsupportedSettingError, match=r"clip_grad_\w+\(\) with step_in_backward"):
            clip(run.model.parameters(), 1.0)
    run.accelerator.gradient_accumulation_steps = 2
    with run.accelerator.accumulate(run.model), pytest.raises(UnsupportedSettingError, match="with gradient accum"):
        run.backward()


def test_an_optimizer_that_may_not_treat_parameters_alone_is_refused() -> None:
    class Own(torch.optim.SGD):
        """An optimizer of a script."""

    for make in (Own, torch.optim.LBFGS):
        with pytest.raises(UnsupportedSettingError, match=rf"step_in_backward\({make.__name__}\)"):
            step_in_backward(make(Model().parameters(), lr=0.1))


def test_a_second_gradient_before_the_step_is_an_error() -> None:
    run = Run(True)
    run.backward()
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer\.step"):
        run.backward()


def test_a_learning_rate_that_changes_after_the_backward_pass_is_an_error() -> None:
    run = Run(True)
    run.backward()
    run.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="changed after the backward"):
        run.optimizer.step()


def test_another_accelerator_takes_over_without_a_second_step() -> None:
    run, other = Run(True), Run(False)
    accelerator = Accelerator(cpu=True)
    run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
    run.accelerator = accelerator
    assert_equal(run.train(2), other.train(2))
