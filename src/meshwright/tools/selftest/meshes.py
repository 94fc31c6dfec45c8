"""The checks of `meshwright test --report` for meshes: each kind that fits is built, and trains like one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .checks import Check, UnexpectedResult, expect

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...accelerator import Accelerator
    from .script import Bench

Sizes = dict[str, int]
"""Axis of the mesh -> its size."""

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_FEATURES = 8
_STEPS = 4
_TOLERANCE = 1e-4
"""Of losses, norms and parameters: sums are taken in another order, on some devices in TF32."""


def mesh_checks(world_size: int) -> dict[str, Check]:
    """Return the checks that a world of this size can run."""
    if world_size == 1:
        return {}
    half = world_size // 2
    ways: dict[str, Sizes] = {
        "FSDP2": {"dp_shard": world_size},
        "tensor parallel": {"tp": world_size},
        "pipeline": {"pp": world_size},
    }
    if world_size % 2 == 0 and world_size > 2:
        ways["HSDP"] = {"dp_replicate": 2, "dp_shard": half}
        ways["FSDP2 x TP"] = {"dp_shard": half, "tp": 2}
        ways["pipeline x FSDP2"] = {"pp": 2, "dp_shard": half}
    checks: dict[str, Check] = {name: partial(_train_like_one_process, sizes=sizes) for name, sizes in ways.items()}
    return {"meshes": build_meshes, **checks}


def build_meshes(bench: Bench) -> str:
    """Every kind of mesh can be made, one after the other in one process, and every axis of it communicates."""
    import torch
    import torch.distributed as dist

    from ...config.plugins.parallelism import ParallelismConfig

    kinds = list(_kinds_of_meshes(bench.world_size))
    for sizes in kinds:
        bench.reopen_group()
        mesh = ParallelismConfig(**_fields(sizes)).build_device_mesh(bench.device.type)
        assert mesh is not None  # every kind has an axis
        for axis in sizes:
            ones = torch.ones(1, device=bench.device)
            dist.all_reduce(ones, group=mesh.get_group(axis))
            expect(f"processes of {axis} in the mesh {_as_text(sizes)}", int(ones.item()), sizes[axis])
    bench.reopen_group()
    return f"{len(kinds)} kinds: {', '.join(map(_as_text, kinds))}"


def _kinds_of_meshes(world_size: int) -> Iterator[Sizes]:
    """Yield one mesh per axis, one per pair of axes, and one of three, where the world can be split so."""
    yield from ({axis: world_size} for axis in _AXES)
    if world_size % 2 == 0 and world_size > 2:
        yield from ({first: 2, second: world_size // 2} for first, second in itertools.combinations(_AXES, 2))
    if world_size % 4 == 0 and world_size > 4:
        yield {"pp": 2, "dp_shard": world_size // 4, "tp": 2}


def _fields(sizes: Sizes) -> dict[str, Any]:
    return {f"{axis}_size": size for axis, size in sizes.items()}


def _as_text(sizes: Sizes) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def _train_like_one_process(bench: Bench, sizes: Sizes) -> str:
    """Losses, gradient norms and parameters on a mesh are those of one process with the same global batches."""
    import torch

    from ...config.plugins.parallelism import ParallelismConfig

    data_ranks = math.prod(size for axis, size in sizes.items() if axis.startswith("dp_"))
    batches = [_batch(bench, 4 * data_ranks, step) for step in range(_STEPS)]
    expected, expected_model = _train_alone(bench, batches)

    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if "tp" in sizes else None
    config = ParallelismConfig(tp_plan=plan, **_fields(sizes))
    bench.reopen_group(mixed_precision="no", parallelism_config=config)
    found, state = _train_on_mesh(bench.accelerator, _model(bench.world_size), batches, pipelined="pp" in sizes)
    bench.reopen_group()
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for what, one, other in zip(("loss", "gradient norm"), ours, theirs, strict=True):
            if not abs(one - other) <= _TOLERANCE * max(1.0, abs(other)):
                raise UnexpectedResult(f"{what} of step {step}: {one:.6g}, on one process {other:.6g}")
    difference = 0.0
    for name, parameter in expected_model.named_parameters() if state else ():
        difference = max(difference, torch.max(torch.abs(state[name].to(bench.device) - parameter)).item())
    if not difference <= _TOLERANCE:
        raise UnexpectedResult(f"parameters differ by {difference:.1e} from those of one process")
    return f"{_as_text(sizes)}: as one process; parameters within {difference:.0e}"


def _train_alone(bench: Bench, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[float, float]], nn.Module]:
    import torch

    model = _model(bench.world_size).to(bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for inputs, targets in batches:
        loss = _loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, model


def _train_on_mesh(
    accelerator: Accelerator, model: Any, batches: list[tuple[Tensor, Tensor]], *, pipelined: bool
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train with this process's share of each batch; return losses and norms, and the parameters where they are."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(*(torch.cat(part).cpu() for part in zip(*batches, strict=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
    found = []
    for inputs, targets in loader:
        if pipelined:
            loss = accelerator.forward_backward(model, inputs, target=targets, loss_fn=_loss)
        else:
            loss = _loss(model(inputs), targets)
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = accelerator.reduce(loss.detach(), "mean")
        found.append((mean.item(), float(norm)))
    return found, accelerator.get_state_dict(model)


def _model(world_size: int) -> nn.Module:
    """Return a model with a block per process, for pipelines, and layers that every process can have a part of."""
    import torch
    from torch import nn

    class TinyBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(_FEATURES, 4 * world_size)
            self.down = nn.Linear(4 * world_size, _FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            changed: Tensor = self.down(torch.tanh(self.up(x)))
            return x + changed

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(TinyBlock() for _ in range(max(2, world_size)))
            self.head = nn.Linear(_FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            output: Tensor = self.head(x)
            return output

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Stack()


def _batch(bench: Bench, num_samples: int, step: int) -> tuple[Tensor, Tensor]:
    import torch

    inputs = torch.randn(num_samples, _FEATURES, generator=torch.Generator().manual_seed(step))
    inputs = inputs.to(bench.device)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    from torch.nn.functional import mse_loss

    return mse_loss(outputs, targets)
