"""Optimizers that need whole matrices step sharded parameters as one process does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    step_full_tensors,
    step_in_backward,
)
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.mesh.matrices import exchange
from meshwright.parallel.mesh.matrices.stepping import FullSteps
from meshwright.parallel.modules.dtensors import distribute_like
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night

from ...ways import WAYS
from .training import off_by, train, whole

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

STEPS = 20
MATRICES = 12


@cache
def alone(kind: str, steps: int = STEPS) -> dict[str, Any]:
    [result] = run_on_ranks(1, train, way="one", steps=steps, kind=kind)
    return result


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("fsdp2", "muon"),
        at_night("fsdp4", "muon"),
        ("tp2", "muon"),
        ("hsdp2x2", "muon"),
        ("fsdp2xtp2", "muon"),
        ("fsdp2", "shampoo"),
        at_night("copies2xtp2", "muon"),
        at_night("pp2xfsdp2", "muon"),
        at_night("tp2", "shampoo"),
        at_night("fsdp2xtp2", "shampoo"),
    ],
)
def test_the_parameters_are_those_of_one_process(way: str, kind: str) -> None:
    expected = alone(kind)
    results = run_on_ranks(WAYS[way][0], train, way=way, steps=STEPS, kind=kind)
    for result in results:
        assert off_by(result["parameters"], expected["parameters"]) < 1e-5
        assert result["rates"] == expected["rates"]
    if kind == "muon" and "pp" not in way:  # every matrix has its state on one process, and all have about the same
        stated = [result["stated"][0] for result in results]
        assert sum(stated) == MATRICES
        assert max(stated) - min(stated) <= 2


def test_accumulation_and_clipping_are_those_of_one_process() -> None:
    options: dict[str, Any] = {"accumulation": 2, "clip": 0.5, "steps": 3}
    [expected] = run_on_ranks(1, train, way="one", **options)
    for result in run_on_ranks(2, train, way="fsdp2", **options):
        assert off_by(result["parameters"], expected["parameters"]) < 1e-9


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [
        ("fsdp4", "fsdp2", "muon"),
        at_night("fsdp2", "fsdp2xtp2", "shampoo"),
        ("fsdp2 whole", "tp2", "shampoo"),
        ("one", "fsdp2 whole", "muon"),
        at_night("fsdp2 whole", "one", "muon"),
        at_night("tp2", "fsdp4", "muon"),
    ],
)
def test_a_checkpoint_goes_on_on_other_processes(saved: str, loaded: str, kind: str, tmp_path: Path) -> None:
    expected = alone(kind, steps=5)
    run_on_ranks(WAYS[saved][0], train, way=saved, steps=3, kind=kind, save_to=tmp_path / "state")
    resumed = run_on_ranks(
        WAYS[loaded][0], train, way=loaded, steps=2, kind=kind, first=3, load_from=tmp_path / "state"
    )
    for result in resumed:
        assert off_by(result["parameters"], expected["parameters"]) < 1e-9
        assert result["rates"] == expected["rates"]


def test_a_checkpoint_on_as_many_processes_goes_on_to_the_bit(tmp_path: Path) -> None:
    straight = run_on_ranks(2, train, way="fsdp2", steps=5)
    run_on_ranks(2, train, way="fsdp2", steps=3, save_to=tmp_path / "state")
    resumed = run_on_ranks(2, train, way="fsdp2", steps=2, first=3, load_from=tmp_path / "state")
    for one, other in zip(straight, resumed, strict=True):
        assert off_by(one["parameters"], other["parameters"]) == 0
        assert one["stated"] == other["stated"]


# --- one step, with given gradients ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Matrices that no number of processes divides, in two dtypes, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = [(7, 5), (3, 9), (1, 4), (10, 6), (2, 2)]
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(size, generator=generator)) for size in sizes)
        self.halves = nn.ParameterList(nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16()) for _ in "ab")
        self.unused = nn.Parameter(torch.randn(4, 3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x


def give_gradients(net: nn.Module, step: int) -> None:
    for index, (name, param) in enumerate(net.named_parameters()):
        if "unused" not in name:
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = distribute_like(gradient, param)


def sharded(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), **options)


@pytest.mark.parametrize("round_bytes", [2**28, 64])
@ranks(2, 4)
def test_a_step_is_that_of_one_process_to_the_bit_in_any_number_of_rounds(round_bytes: int) -> None:
    before, exchange.ROUND_BYTES = exchange.ROUND_BYTES, round_bytes
    try:
        plain, net = Odd(), Odd()
        by_itself = torch.optim.Muon(plain.parameters(), lr=0.1)
        net, optimizer = sharded().prepare(net, torch.optim.Muon(net.parameters(), lr=0.1))
        calls = []
        optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(3):
            give_gradients(plain, step)
            give_gradients(net, step)
            by_itself.step()
            assert optimizer.step(lambda: 7.0) == 7.0
    finally:
        exchange.ROUND_BYTES = before
    assert len(calls) == 3
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(param), expected.detach())
    assert net.unused not in optimizer.state


class Uneven(nn.Module):
    """Layers whose parts on two processes cannot be divided by two again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@ranks(4)
def test_parts_of_parts_that_differ_in_size_come_together() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_plan=plan)
    plain, net = Uneven().double(), Uneven().double()
    by_itself = torch.optim.Muon(plain.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    net, optimizer = accelerator.prepare(net, torch.optim.Muon(net.parameters(), lr=0.1))
    inputs = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for model, each in ((plain, by_itself), (net, optimizer)):
            accelerator.backward(model(inputs).square().mean())
            each.step()
            each.zero_grad()
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert float((whole(param) - expected).detach().abs().max()) < 1e-9


@ranks(2)
def test_an_optimizer_that_has_stepped_keeps_its_state_on_the_owners() -> None:
    plain, net = Odd(), Odd()
    by_itself, optimizer = (torch.optim.Muon(each.parameters(), lr=0.1) for each in (plain, net))
    for step in range(4):
        if step == 2:
            net, optimizer = sharded().prepare(net, optimizer)
        give_gradients(plain, step)
        give_gradients(net, step)
        by_itself.step()
        optimizer.step()
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(param), expected.detach())
    assert len(optimizer.state) < len(by_itself.state)
    optimizer.load_state_dict(by_itself.state_dict())  # of one process: the rest is dropped
    assert 0 < len(optimizer.state) < len(by_itself.state)


@ranks(2)
def test_fp16_skips_a_step_that_overflows_on_one_process_only() -> None:
    accelerator = sharded(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    net = Odd().float()
    net, optimizer = accelerator.prepare(net, torch.optim.Muon(net.parameters(), lr=0.1))
    accelerator.scaler.scale(torch.ones(()))
    give_gradients(net, 0)
    if accelerator.is_main_process:
        net.matrices[0].grad.to_local().fill_(float("inf"))
    before = [whole(param) for param in net.parameters()]
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(torch.equal(whole(param), value) for param, value in zip(net.parameters(), before, strict=True))
    give_gradients(net, 1)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(whole(net.matrices[0]), before[0])


# --- refusals -------------------------------------------------------------------------------------------------------


class Estimating(Optimizer):
    """Estimate its learning rate over all parameters, as Prodigy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = sum(float(param.grad.norm()) for param in group["params"] if param.grad is not None)


@ranks(2)
def test_an_optimizer_whose_options_depend_on_all_parameters_is_refused() -> None:
    net = Odd()
    net, optimizer = sharded().prepare(net, step_full_tensors(Estimating(net.parameters())))
    give_gradients(net, 0)
    with pytest.raises(UnsupportedSettingError, match=r"Estimating .* 'd' depends on the parameters"):
        optimizer.step()


def test_what_needs_all_parameters_at_once_is_refused() -> None:
    with pytest.raises(UnsupportedSettingError, match="LBFGS"):
        step_full_tensors(torch.optim.LBFGS(Odd().parameters()))


@ranks(2)
def test_steps_in_the_backward_pass_are_refused() -> None:
    net = Odd()
    with pytest.raises(UnsupportedSettingError, match="step_in_backward with Muon on sharded parameters"):
        sharded().prepare(net, step_in_backward(torch.optim.Muon(net.parameters())))


def test_offloaded_shards_are_refused() -> None:
    shard: Any = SimpleNamespace(
        device_mesh=SimpleNamespace(device_type="cuda"), _local_tensor=torch.zeros(2), requires_grad=True
    )
    with pytest.raises(UnsupportedSettingError, match="cpu_offload"):
        FullSteps(lambda _: True).refuse(SimpleNamespace(param_groups=[{"params": [shard]}]))  # type: ignore[arg-type]


def test_on_one_process_a_request_changes_nothing() -> None:
    net = Odd()
    optimizer = step_full_tensors(torch.optim.SGD(net.parameters(), lr=0.1))
    _, prepared = Accelerator(cpu=True).prepare(net, optimizer)
    assert prepared.optimizer is optimizer
    assert not optimizer._optimizer_step_pre_hooks
