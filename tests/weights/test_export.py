"""`weights.save` writes what `save_model` writes on one process, and nothing where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.parallel.small_transformer import model
from tests.ranks import ranks

from .test_weights import odd


@ranks(1, 2)
def test_the_files_are_those_of_one_process_byte_for_byte(tmp_path: Path, world_size: int) -> None:
    net = odd()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if world_size > 1 else None)
    if accelerator.is_main_process:
        from meshwright.checkpoint.formats.model_files import save_model_files

        for folder, limit in (("one", "50GB"), ("several", "1MB")):
            save_model_files(net.state_dict(), tmp_path / folder, max_shard_size=limit, safe_serialization=True)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.weights(net).save(tmp_path / "mine one")
    accelerator.weights(net).save(tmp_path / "mine several", max_shard_size="1MB")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        assert load_file(tmp_path / "mine one" / "model.safetensors").keys()
        for folder in ("one", "several"):
            theirs = {path.name: path for path in (tmp_path / folder).iterdir()}
            mine = {path.name: path for path in (tmp_path / f"mine {folder}").iterdir()}
            assert theirs.keys() == mine.keys()
            assert (len(theirs) == 1) == (folder == "one")
            assert all(theirs[name].read_bytes() == mine[name].read_bytes() for name in theirs)


@ranks(2)
def test_a_save_that_fails_raises_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    net = accelerator.prepare(model())
    weights = accelerator.weights(net)
    (tmp_path / "taken").touch()
    with pytest.raises((OSError, RuntimeError), match="taken"):
        weights.save(tmp_path / "taken" / "inside")
    assert accelerator.gather(torch.ones(1)).sum() == 2, "the ranks are in step"
    weights.save(tmp_path / "free")
    accelerator.wait_for_everyone()
    assert [path.name for path in (tmp_path / "free").iterdir()] == ["model.safetensors"]


def test_files_of_an_earlier_save_are_replaced(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    accelerator.weights(net).save(tmp_path, max_shard_size="17KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("model-*.safetensors")}
    accelerator.weights(net).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
