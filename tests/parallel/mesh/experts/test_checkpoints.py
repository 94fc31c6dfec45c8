"""One checkpoint of a model with experts loads at every `ep_size`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.sizes import at_night

from . import moe

STEPS = 2
ONE: dict[str, int] = {}
SAVED: list[Any] = [
    ("SHARDED_STATE_DICT", 4, {"dp_shard_size": 4, "ep_size": 2}),
    ("FULL_STATE_DICT", 2, {"dp_shard_size": 2, "ep_size": 2}),
    at_night("SHARDED_STATE_DICT", 4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}),
    at_night("SHARDED_STATE_DICT", 1, ONE),
    at_night("FULL_STATE_DICT", 8, {"dp_shard_size": 4, "tp_size": 2, "ep_size": 8}),
]
LOADED: list[tuple[int, dict[str, int]]] = [
    (1, ONE),
    (2, {"dp_shard_size": 2, "ep_size": 2}),
    (4, {"dp_shard_size": 4, "ep_size": 1}),
    (4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}),
]
LOADED_AT_NIGHT: list[tuple[int, dict[str, int]]] = [
    (4, {"dp_shard_size": 4, "ep_size": 2}),
    (4, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
    (8, {"dp_shard_size": 8, "ep_size": 8}),
    (8, {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": 4}),
]


def losses_of(
    sizes: dict[str, int], steps: int, *, first: int = 0, form: str = "SHARDED_STATE_DICT", **paths: str
) -> list[float]:
    """Train, from a checkpoint or into one; return the mean losses."""
    if "cp_size" in sizes:
        from ..context import cpu_attention

        cpu_attention.register()
    spread: dict[str, Any] = {
        "parallelism_config": moe.mesh(**sizes),
        "fsdp_plugin": FullyShardedDataParallelPlugin(state_dict_type=form),
    }
    accelerator = Accelerator(cpu=True, **(spread if sizes else {}))
    net = moe.model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if "load" in paths:
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)  # what is loaded must replace it
        accelerator.load_state(paths["load"])
    losses = []
    for step in range(first, first + steps):
        loss = moe.own_loss(accelerator, net, *moe.batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss, "mean").item())
    if "save" in paths:
        accelerator.save_state(paths["save"])
        accelerator.save_model(net, f"{paths['save']}_model")
    return losses


@cache
def uninterrupted() -> list[float]:
    [losses] = run_on_ranks(1, losses_of, sizes=ONE, steps=2 * STEPS)
    return losses


@pytest.mark.parametrize(("form", "world_size", "sizes"), SAVED)
def test_a_checkpoint_goes_on_at_every_size(
    form: str, world_size: int, sizes: dict[str, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = str(tmp_path / "saved")
    for losses in run_on_ranks(world_size, losses_of, sizes=sizes, steps=STEPS, form=form, save=path):
        assert losses == pytest.approx(uninterrupted()[:STEPS], abs=1e-5)
    saved = load_file(tmp_path / "saved_model" / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in moe.model().state_dict().items()
    }
    at_any_size = request.node.get_closest_marker("nightly") is not None
    for number, here in LOADED + LOADED_AT_NIGHT if at_any_size else LOADED[:: 1 if form[0] == "S" else 3]:
        for losses in run_on_ranks(number, losses_of, sizes=here, steps=STEPS, first=STEPS, form=form, load=path):
            assert losses == pytest.approx(uninterrupted()[STEPS:], abs=1e-5), here
