"""Every loop gives the numbers of plain training, bit for bit, or is refused with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, AcceleratorState
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.modules.gradient_hooks import carry_hooks
from tests.parallel.replicas.offload.loops import LOOPS, Block, Model, adamw, freeze, more, more_accumulated, run_loop
from tests.ranks import run_on_ranks
from tests.simulated_accelerator import run_on_a_simulated_accelerator, set_delays


def check(name: str, placement: str = "host", step_in_backward: bool | None = None) -> None:
    each = LOOPS[name]
    refused = each.refused or (None if Accelerator().device.type == "cpu" else each.refused_on_devices)
    if refused is not None and ("step_in_backward" not in refused or step_in_backward is not False):
        with pytest.raises((RuntimeError, UnsupportedSettingError), match=refused):
            run_loop(name, step_in_backward, placement)
        return
    found, expected = run_loop(name, step_in_backward, placement), run_loop(name, placement=None)
    assert found["numbers"] == expected["numbers"]
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        assert torch.equal(found["state"][key], value), key


def failures(
    placement: str = "host", step_in_backward: bool | None = None, names: Sequence[str] = tuple(LOOPS)
) -> dict[str, str]:
    """Check loops in this process; return what went wrong."""
    if Accelerator().device.type != "cpu":
        set_delays(copy_latency=1e-3, kernel_time=1e-4)
    found = {}
    for name in names:
        AcceleratorState._reset_state()
        try:
            check(name, placement, step_in_backward)
        except BaseException as error:  # also pytest's
            found[name] = repr(error)[:300]
    return found


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_loop_trains_as_in_memory_or_is_refused(name: str) -> None:
    check(name)


ON_DEVICES = (
    "adapters",
    "frozen parameters of integers",
    "hooks_with_accumulation",
    "recomputation inside of recomputed blocks",
    "reentrantly recomputed blocks that are used twice",
    "modules of blocks that are called alone",
    "a_penalty_before_the_forward_pass",
    "two_forward_passes",
    "gradients_of_parameters",
    "gradients_that_are_kept",
    "averages_that_are_swapped_in_before_the_backward_pass",
    "zeroed_gradients",
)
"""Loops where a device makes a difference."""


@pytest.mark.parametrize("names", [ON_DEVICES, pytest.param(tuple(LOOPS), marks=pytest.mark.nightly)], ids=len)
def test_loops_train_as_in_memory_on_a_simulated_accelerator(names: Sequence[str]) -> None:
    assert run_on_a_simulated_accelerator(failures, names=names, time_limit=600.0) == [{}]


class Gated(Model):
    """Some ranks weigh the weights of a block themselves, outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.blocks[1].down.weight
        return super().forward(x) + (weight * x.mean().to(weight.device)).sum().to(x.device)


def on_replicas(placement: str | None) -> dict[str, Tensor]:
    """Train with hooks and uses that see the gradients of one process."""
    torch.manual_seed(0)
    accelerator = Accelerator(offload=placement)
    model: Any = Gated()
    freeze("blocks.0.", "blocks.2.up")(model)
    model.blocks[1].up.weight.register_hook(more)
    [optimizer] = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    blocks = accelerator.unwrap_model(model).blocks
    blocks[3].up.weight.register_hook(more)
    blocks[3].up.bias.register_post_accumulate_grad_hook(more_accumulated)
    torch.manual_seed(accelerator.process_index)
    for _ in range(4):
        accelerator.backward(model(torch.randn(4, 5)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return dict(accelerator.unwrap_model(model).state_dict())


@pytest.mark.parametrize("placement", ["host"])
def test_hooks_and_uses_outside_of_blocks_see_gradients_of_one_process_as_under_ddp(placement: str) -> None:
    expected = run_on_ranks(2, on_replicas, placement=None)
    for found, of_rank in zip(run_on_ranks(2, on_replicas, placement=placement), expected, strict=True):
        trained = [name for name in of_rank if "calls" not in name]
        for name in trained:
            torch.testing.assert_close(found[name], of_rank[name], msg=lambda text, name=name: f"{name}: {text}")


class Answer:
    """An output that nobody looks into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Answering(Model):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return Answer(super().forward(x))

    def call(self, block: Any, x: Tensor) -> Any:
        return block(x).tensor


def test_a_block_whose_output_hides_its_tensors_is_refused() -> None:
    accelerator = Accelerator(offload="host")
    model, _ = accelerator.prepare(Answering(), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    with pytest.raises(RuntimeError, match=r"blocks\.0.*returned a Answer"):
        model(torch.ones(2, 5))


def test_gradients_have_memory_for_what_is_trained_only() -> None:
    model = LOOPS["adapters"].model()
    accelerator = Accelerator(offload="disk")
    model, optimizer = accelerator.prepare(model, *adamw(model))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        optimizer.zero_grad()
    for block in accelerator.strategy._blocks():
        [buffer] = block.gradients.buffers
        assert buffer.numel() == sum(param.nbytes for param in block.params if param.requires_grad)
        assert buffer.numel() < block.num_bytes / 8


@pytest.mark.nightly
@pytest.mark.parametrize("step_in_backward", [None, False])
def test_loops_train_as_in_memory_from_disk(step_in_backward: bool | None) -> None:
    assert failures("disk", step_in_backward) == {}


@pytest.mark.nightly
def test_loops_train_as_in_memory_if_no_block_steps_in_the_backward_pass() -> None:
    assert failures(step_in_backward=False) == {}


def test_a_parameter_that_comes_on_a_device_keeps_its_hooks() -> None:
    old, new, seen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    old.register_hook(lambda gradient: gradient * 3)
    old.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))  # type: ignore[no-untyped-call]
    carry_hooks(old, new)
    new.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [3.0, 3.0]
    assert len(seen) == 1
