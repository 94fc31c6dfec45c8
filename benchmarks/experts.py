"""One step with experts spread over two processes: a prepared model, and the same by hand in torch.

By hand: `fully_shard` on the dense layers, which ignores the experts; experts as DTensors, which checkpoints need; an
all-to-all with its backward pass by torch's functional collectives; gradients of experts divided by a hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from .contenders.accelerate import steps as our_steps
from .contenders.bare import full_precision, my_share
from .interleave import Comparison, compare, timed
from .processes import WORLD_SIZE, run_on_two
from .task import CLASSES, WIDTH

EXPERTS, CHOICES, LAYERS, TOKENS = 8, 2, 2, 256


class Experts(nn.Module):
    """MLPs whose weights are in one parameter each."""

    def __init__(self, held: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(held, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(held, 4 * WIDTH, WIDTH) / WIDTH**0.5 / 2)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts of each token return."""
        pairs = index.reshape(-1)
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=len(self.up)).tolist()
        rows = tokens[order // index.shape[1]]
        parts = [
            (part @ up).relu() @ down for part, up, down in zip(rows.split(counts), self.up, self.down, strict=True)
        ]
        results = torch.cat(parts) * weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // index.shape[1], results)


class ExpertsByHand(Experts):
    """The same, of which this process holds some."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send tokens to their experts, and return the weighted sums of the results."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        world: Any = dist.group.WORLD
        pairs = index.reshape(-1)
        order = pairs.argsort(stable=True)
        sent = pairs.bincount(minlength=EXPERTS).view(WORLD_SIZE, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        outgoing, incoming = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens[order // CHOICES], incoming, outgoing, world)
        held = torch.arange(EXPERTS // WORLD_SIZE).repeat(WORLD_SIZE).repeat_interleave(received.flatten())
        spread = dict(self._parameters)
        self._parameters |= {name: param.to_local() for name, param in spread.items()}  # type: ignore[union-attr]
        results = super().forward(arrived, held.unsqueeze(1), torch.ones(len(arrived), 1))
        self._parameters |= spread
        returned = all_to_all_single_autograd(results, outgoing, incoming, world)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (returned[back].view(-1, CHOICES, WIDTH) * weights.unsqueeze(-1)).sum(1)


class Layer(nn.Module):
    """A dense layer, and experts that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next hidden state."""
        tokens = tokens + self.linear(tokens).relu()
        weights, index = self.router(tokens).softmax(-1).topk(CHOICES)
        return tokens + self.experts(tokens, index, weights)  # type: ignore[no-any-return]


def run(rounds: int) -> list[Comparison]:
    """Measure plain steps."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            "step with experts on 2 processes, FSDP2, AdamW",
            lambda: timed(steps_by_hand(), dist.barrier),
            lambda: timed(our_step(), dist.barrier),
            rounds=rounds,
            target=1.05,
        )
    ]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Layer() for _ in range(LAYERS))), nn.Linear(WIDTH, CLASSES))


def batches() -> DataLoader[Any]:
    samples = 20 * TOKENS
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,)))
    return DataLoader(data, batch_size=TOKENS)


def steps_by_hand() -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    net = model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    ignored = set()
    for layer in net[0]:  # type: ignore[union-attr]
        layer.experts.__class__ = ExpertsByHand
        for name, param in layer.experts.named_parameters():
            own = nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)]))
            own.register_hook(lambda gradient: gradient / WORLD_SIZE)  # type: ignore[no-untyped-call]
            setattr(layer.experts, name, own)
            ignored.add(own)
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(net, mesh=mesh, ignored_params=ignored)
    return full_precision(net, AdamW(net.parameters()), my_share(batches()))


def our_step() -> Iterator[None]:
    from meshwright import ParallelismConfig

    net = model()
    mesh = ParallelismConfig(dp_shard_size=WORLD_SIZE, ep_size=WORLD_SIZE, ep_plan={"0.*.experts": "experts"})
    return our_steps(net, AdamW(net.parameters()), batches(), parallelism_config=mesh)
