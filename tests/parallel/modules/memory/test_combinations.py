"""Every lever with every strategy that it goes with, alone and together: the table of `docs/memory.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    linear_cross_entropy,
    offload_activations,
    recompute_activations,
    step_in_backward,
    tile_mlp,
)
from tests.parallel.modules.memory.test_tiling import Block
from tests.ranks import run_on_ranks

WIDTH, CLASSES, BLOCKS = 64, 40, 2
LEVERS = ["logits", "recomputed", "offloaded activations", "tiles", "early steps"]
WAYS = {"one process": 1, "blocks on the host": 1, "DDP": 2, "FSDP2": 2, "TP": 2}
WITHOUT_EARLY_STEPS = ("DDP", "blocks on the host")


class Model(nn.Module):
    """Blocks between an embedding and a head; it returns its loss."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.chunked = chunked

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        targets = tokens.roll(1, -1)
        if self.chunked:
            return linear_cross_entropy(hidden, self.head.weight, targets, chunk_size=5)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def accelerator_of(way: str) -> Accelerator:
    if way == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Block"])
        return Accelerator(cpu=True, fsdp_plugin=plugin)
    if way == "TP":
        plan = {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=plan))
    return Accelerator(cpu=True, offload="host" if way == "blocks on the host" else None)


def train(way: str, levers: Sequence[str], make: Any = torch.optim.SGD) -> tuple[list[Tensor], set[str]]:
    """Return the parameters, and the classes of the optimizer's state."""
    accelerator = accelerator_of(way)
    model: Any = Model("logits" in levers)
    if "tiles" in levers:
        model = tile_mlp(model, ["Mlp"], num_tiles=3)
    if "recomputed" in levers:
        model = recompute_activations(model, block_classes=["Block"])
    if "offloaded activations" in levers:
        model = offload_activations(model, min_bytes=1)
    optimizer: Any = make(model.parameters(), lr=0.1)
    if "early steps" in levers:
        optimizer = step_in_backward(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        torch.manual_seed(step if way == "TP" else 10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randint(CLASSES, (2, 8))))
        optimizer.step()
        optimizer.zero_grad()
    kinds = {
        type(getattr(value, "_local_tensor", value)).__name__
        for state in optimizer.state.values()
        for value in state.values()
    }
    return [value.clone() for value in accelerator.get_state_dict(model).values()], kinds


def differences(way: str) -> dict[str, float]:
    """Return the largest difference of a parameter to training without levers, for each lever, and for all."""
    levers = [lever for lever in LEVERS if lever != "early steps" or way not in WITHOUT_EARLY_STEPS]
    expected, _ = train(way, [])
    found = {}
    for chosen in [*([lever] for lever in levers), levers]:
        own, _ = train(way, chosen)
        found[" and ".join(chosen)] = max(
            (float((one - other).abs().max()) for one, other in zip(own, expected, strict=True)), default=0.0
        )
    return found


def kinds_of_moments(way: str) -> set[str]:
    import torchao.optim

    with torch.compiler.set_stance("force_eager"):
        return train(way, [], torchao.optim.AdamW8bit)[1]


@pytest.mark.parametrize("way", WAYS)
def test_levers_alone_and_together_train_as_without_them(way: str) -> None:
    for found in run_on_ranks(WAYS[way], differences, way=way):
        for levers, difference in found.items():
            assert difference <= (0 if levers in ("recomputed", "offloaded activations", "early steps") else 1e-6), (
                levers
            )


@pytest.mark.parametrize("way", WAYS)
def test_moments_have_8_bits_with_every_strategy(way: str) -> None:
    pytest.importorskip("torchao.optim")
    for kinds in run_on_ranks(WAYS[way], kinds_of_moments, way=way):
        assert "OptimState8bit" in kinds
