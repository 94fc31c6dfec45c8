from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from tests.launching import run_accelerate
from tests.parallel.small_transformer import model
from tests.ranks import ranks, run_on_ranks


def trained(**fields: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**fields))
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    return accelerator, net, optimizer


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@ranks(2)
def test_what_a_trainer_saves_by_itself_it_loads_again(form: str, tmp_path: Path) -> None:
    accelerator, net, optimizer = trained(state_dict_type=form)
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, net, tmp_path)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, tmp_path)
    expected = "pytorch_model_fsdp_0" if form.startswith("SHARDED") else "pytorch_model_fsdp.bin"
    assert (tmp_path / expected).exists()
    weights = {name: param.full_tensor().clone() for name, param in net.named_parameters()}
    moment = optimizer.state[net.head.weight]["exp_avg"].full_tensor().clone()
    for param in net.parameters():
        optimizer.state[param]["exp_avg"].mul_(0)
        param.data.mul_(0)
    load_fsdp_model(plugin, accelerator, net, tmp_path)
    load_fsdp_optimizer(plugin, accelerator, optimizer, net, tmp_path)
    assert all(torch.equal(param.full_tensor(), weights[name]) for name, param in net.named_parameters())
    assert torch.equal(optimizer.state[net.head.weight]["exp_avg"].full_tensor(), moment)


@ranks(2)
def test_only_what_is_trained_is_saved_of_a_model_with_adapters(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT"))
    net = model().requires_grad_(False)
    net.head.requires_grad_(True)
    net = accelerator.prepare(net)
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, net, tmp_path, adapter_only=True)
    assert list(torch.load(tmp_path / "pytorch_model_fsdp.bin")) == ["head.weight"]
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, net, tmp_path, adapter_only=True)


@ranks(2)
def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    accelerator, net, _ = trained()
    with pytest.raises(FileNotFoundError, match=r"no pytorch_model_fsdp\.bin"):
        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, net, tmp_path)


def save_for_merging(folder: str) -> None:
    accelerator, *_ = trained()
    accelerator.save_state(folder)


def test_shards_are_merged_into_a_file_without_the_models_code(tmp_path: Path) -> None:
    run_on_ranks(2, save_for_merging, folder=str(tmp_path / "saved"))
    merged = run_accelerate("merge-weights", tmp_path / "saved", tmp_path / "merged", directory=tmp_path)
    assert merged.code == 0, merged.complaints
    assert "are in" in merged.printed
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    model().load_state_dict(weights)
    assert weights["head.weight"].shape == (32, 16)
    merge_fsdp_weights(
        tmp_path / "saved" / "pytorch_model_fsdp_0", tmp_path / "pickled", False, remove_checkpoint_dir=True
    )
    assert torch.equal(torch.load(tmp_path / "pickled" / "pytorch_model.bin")["head.weight"], weights["head.weight"])
    assert not (tmp_path / "saved" / "pytorch_model_fsdp_0").exists()


def test_a_folder_without_shards_says_what_was_expected(tmp_path: Path) -> None:
    failed = run_accelerate("merge-weights", tmp_path, tmp_path / "merged", directory=tmp_path)
    assert failed.code == 1
    assert "holds no shards: expected .metadata and *.distcp files" in failed.complaints


@ranks(2)
def test_the_published_helpers_work_on_a_sharded_model() -> None:
    from accelerate.utils import fsdp_utils

    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = model()
    is_unit = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, net)
    assert is_unit(net.blocks[0])
    assert not is_unit(net.tokens)
    full = net.state_dict()
    net = fsdp_utils.fsdp2_prepare_model(accelerator, net)
    for param in net.parameters():
        param.data.mul_(0)
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, net, full)
    assert torch.equal(net.head.weight.full_tensor(), model().head.weight)
    assert list(fsdp_utils.fsdp2_canonicalize_names({"a._checkpoint_wrapped_module.b": 1})) == ["a.b"]
    plain = model()
    assert len(fsdp_utils.get_parameters_from_modules(r"blocks\.0\.up", plain, torch.device("cpu"))) == 2
