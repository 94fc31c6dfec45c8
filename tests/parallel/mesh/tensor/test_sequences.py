"""Sequence parallelism: sequences are split between the layers that a plan splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineConfig,
    TorchTensorParallelConfig,
)
from meshwright.errors import UnsupportedSettingError
from tests.parallel.beside_one_process import off_by
from tests.parallel.small_transformer import TP_PLAN, VOCABULARY, WIDTH, model
from tests.ranks import ranks
from tests.sizes import sized

HEAD = 4
PLAN = {
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


class Attention(nn.Module):
    """Attention whose queries have a norm per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(HEAD)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> tuple[Tensor, None]:
        """Return the attended states, and nothing else."""
        heads = self.qkv(hidden).view(*hidden.shape[:-1], -1, HEAD).transpose(1, 2)
        attended = F.scaled_dot_product_attention(self.norm(heads), heads, heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2)), None


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next states."""
        result: Tensor = self.down(F.gelu(self.up(hidden)))
        return result


class Block(nn.Module):
    """Attention and an MLP, each after a norm, as models of transformers call them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
        self.widths: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next states; `widths` notes how much of the sequence is here."""
        self.widths.append(hidden.shape[1])
        hidden = hidden + self.attention(hidden=self.norm1(hidden), scale=torch.ones(1))[0]
        result: Tensor = hidden + self.mlp(self.norm2(hidden))
        return result


class Net(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def net(layers: int = 2) -> Net:
    torch.manual_seed(0)
    made = Net(layers)
    with torch.no_grad():
        for param in made.parameters():  # norms begin as ones, and equal values would hide a mistake
            param.add_(0.05 * torch.randn_like(param))
    return made


def accelerator(plan: Any = PLAN, *, fsdp: FullyShardedDataParallelPlugin | None = None, **sizes: Any) -> Accelerator:
    handler = TorchTensorParallelConfig(sequence_parallel=True)
    mesh = ParallelismConfig(tp_size=2, dp_shard_size=-1, tp_plan=plan, tp_handler=handler, **sizes)
    return Accelerator(cpu=True, parallelism_config=mesh, fsdp_plugin=fsdp)


@ranks(2)
def test_sequences_are_split_from_block_to_block_and_gradients_are_those_of_one_process() -> None:
    for plugin in (None, FullyShardedDataParallelPlugin(activation_checkpointing=True)):
        model = net()
        found = off_by(accelerator(fsdp=plugin), model, steps=sized(gate=2, nightly=5))
        assert max(found.values()) < 1e-5, found
        assert {width for block in model.blocks for width in block.widths} == {4}, "half of eight positions"


@ranks(4)
def test_every_stage_of_a_pipeline_splits_sequences_and_sums_partial_gradients() -> None:
    handler = PipelineConfig(microbatches=2)
    model = net()
    found = off_by(accelerator(pp_size=2, pp_handler=handler), model, steps=sized(gate=1, nightly=3))
    assert max(found.values()) < 1e-5, found


@ranks(2)
def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedSettingError, match=r"blocks\.0 has split layers of its own"):
        accelerator(TP_PLAN).prepare(model())
    with pytest.raises(UnsupportedSettingError, match=r"1 is in no nn\.ModuleList of blocks"):
        accelerator({"0": "colwise", "1": "rowwise"}).prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    prepared = accelerator().prepare(net())
    with pytest.raises(ValueError, match=r"blocks\.0 was given a sequence of 7 positions, which tp_size=2 does not"):
        prepared(torch.zeros(1, 7, dtype=torch.long))
