"""What torch does not take of sharded and split parameters: the launcher's panel names what works, and it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.launch.processes.verdict import Ending, judge, remedy
from tests.ranks import ranks

PLAN = {"up": "colwise", "down": "rowwise"}
WAYS = ["fsdp2", "tp"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def make_accelerator(way: str) -> Accelerator:
    if way == "tp":
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=PLAN))
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def add_term(model: Any) -> None:
    (model(batch()).mean() + model.up.weight.norm()).backward()


Mistakes = dict[str, tuple[Callable[[Any], Any], str]]
UNDER_TP: Mistakes = {
    "clip_grad_norm_": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1), "accelerator.clip_grad_norm_"),
    "clip_grad_value_": (lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1), "clip_grad_value_ instead"),
    "a loss term": (add_term, "param.full_tensor()"),
    "parameters_to_vector": (lambda m: nn.utils.parameters_to_vector(m.parameters()), "full_tensor()"),
}
UNDER_FSDP2: Mistakes = {
    "deepcopy": (copy.deepcopy, "before prepare()"),
    "AveragedModel": (AveragedModel, "accelerator.prepare_model(averaged.module)"),
}


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_the_panel_names_what_works(way: str) -> None:
    accelerator = make_accelerator(way)
    model = accelerator.prepare(Net())
    accelerator.backward(model(batch()).mean())
    for mistake, (wrong, advice) in (UNDER_TP if way == "tp" else UNDER_FSDP2).items():
        with pytest.raises((RuntimeError, AssertionError)) as raised:
            wrong(model)
        record = {"type": raised.type.__name__, "text": str(raised.value), "cause": None, "frames": [], "time": 1.0}
        ending = Ending(rank=0, local_rank=0, exit_code=1, record=record)
        assert advice in remedy(ending, judge([ending], out_of_memory=False)), f"{mistake}: {raised.value}"


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_a_loss_term_of_full_tensors_is_that_of_one_process(way: str) -> None:
    plain, accelerator = Net(), make_accelerator(way)
    model = accelerator.prepare(Net())
    for each, backward in ((plain, Tensor.backward), (model, accelerator.backward)):
        backward(each(batch()).square().mean() + 0.1 * sum(full(param).norm() for param in each.parameters()))
    for name, param in plain.named_parameters():
        assert torch.allclose(full(model.get_parameter(name).grad), param.grad, atol=1e-6), name


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_an_average_of_weights_is_that_of_one_process(way: str) -> None:
    average: dict[str, Any] = {"avg_fn": get_ema_avg_fn(0.9)}
    if way == "fsdp2":
        average = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    plain, own, accelerator = Net(), Net(), make_accelerator(way)
    averages = [AveragedModel(plain, **average), AveragedModel(own, **average)]
    optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, own)]
    model, optimizers[1] = accelerator.prepare(own, optimizers[1])
    averages[1].module = accelerator.prepare_model(averages[1].module)
    for _ in range(3):
        for each, optimizer, averaged in zip((plain, model), optimizers, averages, strict=True):
            accelerator.backward(each(batch()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(each)
    assert torch.allclose(full(averages[1](batch())), averages[0](batch()), atol=1e-6)
