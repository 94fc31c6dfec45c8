"""The training script of the published rows really trains, in every family and with every option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.sizes import cases

from .shapes import import_script

LLAMA = {"kv_heads": 2}
ON_ONE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, fused": {**LLAMA, "fused": True, "loss": "chunked-fused", "grouped": True},
    "mpt": {"family": "mpt", "packed": True, "tied": True},
    "neox": {"family": "neox", "packed": True, "shared_norm": True},
    "bf16": {"precision": "bf16", "loss": "fused"},
    "master weights": {"precision": "master", "clip": False, "accumulation": 2},
    "full recompute": {"recompute": "full"},
    "offloaded recompute": {"recompute": "full", "offload": True},
    "selective recompute": {"recompute": "selective"},
    "optimizer in backward": {"optimizer": "adamw-in-backward", "clip": False},
    "8-bit optimizer": {"optimizer": "adamw-8bit"},
    "LoRA": {"lora_rank": 4, "lora_dropout": 0.1, "packed": True, "loss": "chunked", "chunk": 16},
    "QLoRA": {"lora_rank": 4, "lora_targets": "all", "nf4": True, "precision": "bf16"},
}
ON_TWO: dict[str, dict[str, Any]] = {
    "sharded": {**LLAMA, "dp_shard": 2, "recompute": "selective", "accumulation": 2},
    "sharded, weights kept": {"dp_shard": 2, "reshard": False, "precision": "mixed-bf16", "recompute": "full"},
    "reduced every time": {"dp_shard": 2, "accumulation": 2, "sync_each": True},
    "copies": {"dp_replicate": 2, "reshard": False},
    "tensor": {**LLAMA, "tp": 2, "fused": True, "precision": "master", "clip": False},
    "tensor, split loss": {**LLAMA, "tp": 2, "fused": True, "precision": "master", "clip": False, "loss": "fused"},
    "tensor, autocast": {**LLAMA, "tp": 2, "recompute": "selective"},
    "context": {**LLAMA, "cp": 2, "recompute": "full"},
    "pipeline": {"pp": 2, "accumulation": 4, "precision": "master", "clip": False},
    "pipeline, recompute": {"pp": 2, "accumulation": 4, "schedule": "interleaved", "recompute": "full", "layers": 4},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "tensor x sharded": {**LLAMA, "tp": 2, "dp_shard": 2, "recompute": "full"},
    "tensor x pipeline": {
        **LLAMA,
        "tp": 2,
        "pp": 2,
        "fused": True,
        "accumulation": 2,
        "precision": "master",
        "clip": False,
    },
    "sharded x pipeline": {**LLAMA, "dp_shard": 2, "pp": 2, "accumulation": 2, "reshard": False, "tied": False},
    "context x tensor": {**LLAMA, "cp": 2, "tp": 2, "fused": True, "reshard": False},
}


def train(fields: dict[str, Any]) -> float:
    """Run the script in this process."""
    script, options = import_script("train")
    torch.manual_seed(0)
    loss: float = script.main(options.Options(**fields))
    return loss


ALL = {**ON_ONE, **ON_TWO, **ON_FOUR}


@pytest.mark.nightly
def test_a_loss_over_a_split_vocabulary_is_the_same_loss() -> None:
    losses = [run_on_ranks(2, train, fields={**ON_TWO["tensor"], "loss": loss})[0] for loss in ("full", "fused")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", cases(gate=["mpt", "sharded", "tensor x pipeline"], nightly=ALL))
def test_the_script_trains(name: str) -> None:
    world_size = 1 if name in ON_ONE else 2 if name in ON_TWO else 4
    losses = run_on_ranks(world_size, train, fields=ALL[name])
    assert all(math.isfinite(loss) and 4 < loss < 7 for loss in losses), losses
    assert len(set(losses)) == 1
