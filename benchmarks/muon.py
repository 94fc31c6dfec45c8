"""One step of Muon on sharded and on split matrices: a prepared optimizer, and the same by hand in torch.

By hand: the momentum stays in the shards, since it is elementwise; one all-to-all brings it to the process that
orthogonalises a matrix, one brings the updates back in bfloat16. This is for Muon only, and for square matrices, as
many for every process. A prepared optimizer is torch's, and it moves gradients and parameters in their own dtype.
The last row on two processes compares with torch's Muon on DTensors as it is, which computes every product of an
iteration on all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised

from meshwright import FullyShardedDataParallelPlugin, ParallelismConfig

from .contenders.accelerate import accelerator
from .interleave import Comparison, compare, timed
from .processes import WORLD_SIZE, run_on
from .task import loss_of

WIDTH, BLOCKS, CLASSES, SAMPLES = 256, 4, 8, 32
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MOMENTUM, DECAY, RATE = 0.95, 0.1, 1e-3


class Block(nn.Module):
    """Two square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks, and a head that Muon leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class MuonByHand(Optimizer):
    """Muon for square matrices that are divided evenly along their rows or columns."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})
        self.params: list[Any] = self.param_groups[0]["params"]
        self.buffers = [torch.zeros_like(_rows(param)) for param in self.params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step."""
        size = dist.get_world_size()
        gradients = [_rows(param.grad, like=param) for param in self.params]
        torch._foreach_lerp_(self.buffers, gradients, 1 - MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, self.buffers, MOMENTUM)
        outgoing = torch.stack([torch.stack(nesterov[rank::size]) for rank in range(size)])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        matrices = incoming.transpose(0, 1).flatten(1, 2)
        updates = torch.stack([orthogonalised(each, (3.4445, -4.7750, 2.0315), 5, 1e-7) for each in matrices])
        sent = updates.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, sent)
        own = [_rows(param) for param in self.params]
        torch._foreach_mul_(own, 1 - RATE * DECAY)
        for rank in range(size):
            for param, update in zip(own[rank::size], returned[rank], strict=True):
                param.add_(update, alpha=-RATE)


def _rows(tensor: Any, like: Any = None) -> Tensor:
    """Return a shard as rows: the orthogonalised transpose is the transpose of what is orthogonalised."""
    own: Tensor = tensor.to_local()
    return own.T if (like if like is not None else tensor).placements[0].dim == 1 else own


def run(rounds: int) -> list[Comparison]:
    """Measure steps under FSDP2 on two and on four processes, and under tensor parallelism."""
    return run_on(on_two, rounds) + run_on(on_four, rounds, world_size=4)


def on_two(rounds: int) -> list[Comparison]:
    by_dtensors = compare(
        "FSDP2 step, Muon, 2 processes / torch's Muon on DTensors",
        lambda: timed(steps_by_hand("fsdp", Muon), dist.barrier),
        lambda: timed(our_steps("fsdp"), dist.barrier),
        rounds=rounds,
    )
    return [beside("fsdp", rounds), beside("tp", rounds), by_dtensors]


def on_four(rounds: int) -> list[Comparison]:
    return [beside("fsdp", rounds)]


def beside(way: str, rounds: int) -> Comparison:
    name = {"fsdp": "FSDP2", "tp": "tensor parallelism"}[way]
    return compare(
        f"step, Muon, {name} on {dist.get_world_size()} processes / by hand",
        lambda: timed(steps_by_hand(way, MuonByHand), dist.barrier),
        lambda: timed(our_steps(way), dist.barrier),
        rounds=rounds,
        target=1.10,
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def steps_by_hand(way: str, make_muon: Any) -> Iterator[None]:
    net = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "tp":
        for block in net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        for unit in (*net.blocks, net):
            fully_shard(unit, mesh=mesh)
    optimizers = [make_muon(net.blocks.parameters()), AdamW(net.head.parameters())]
    return training(net, optimizers, Tensor.backward)


def our_steps(way: str) -> Iterator[None]:
    options: dict[str, Any] = (
        {"parallelism_config": ParallelismConfig(tp_size=WORLD_SIZE, tp_plan=PLAN)}
        if way == "tp"
        else {"fsdp_plugin": FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])}
    )
    accelerate = accelerator(**options)
    net = Model()
    optimizers: list[Optimizer] = [Muon(net.blocks.parameters()), AdamW(net.head.parameters())]
    net, *optimizers = accelerate.prepare(net, *optimizers)
    return training(net, optimizers, partial(accelerate.backward))


def training(net: nn.Module, optimizers: list[Optimizer], backward: Any) -> Iterator[None]:
    inputs, labels = batch()
    while True:
        backward(loss_of(net(inputs), labels))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield
