from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from meshwright import Accelerator, FullyShardedDataParallelPlugin, merge_fsdp_weights
from meshwright.checkpoint.formats.model_files import read_model_files, save_model_files
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


def save_for_merging(folder: str, **fields: Any) -> None:
    accelerator, *_ = trained(**fields)
    torch.manual_seed(1)
    critic = torch.nn.Linear(4, 2)
    critic.bias.requires_grad_(False)
    accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    accelerator.save_state(folder)


def test_the_shards_of_every_model_are_merged_into_a_file_without_its_code(tmp_path: Path) -> None:
    run_on_ranks(2, save_for_merging, folder=str(tmp_path / "saved"))
    merged = run_accelerate("merge-weights", tmp_path / "saved", tmp_path / "merged", directory=tmp_path)
    assert merged.code == 0, merged.complaints
    assert "merged: model.safetensors, model_1.safetensors." in merged.printed
    weights, critic = (load_file(tmp_path / "merged" / name) for name in ("model.safetensors", "model_1.safetensors"))
    model().load_state_dict(weights)
    assert weights["head.weight"].shape == (32, 16)
    torch.manual_seed(1)
    assert {name: value.tolist() for name, value in critic.items()} == {
        name: value.tolist() for name, value in torch.nn.Linear(4, 2).state_dict().items()
    }
    shards = tmp_path / "saved" / "pytorch_model_fsdp_1"
    assert merge_fsdp_weights(shards, tmp_path / "pickled", False, remove_checkpoint_dir=True) == ["pytorch_model.bin"]
    assert torch.equal(torch.load(tmp_path / "pickled" / "pytorch_model.bin")["weight"], critic["weight"])
    assert not shards.exists()


def test_a_model_larger_than_a_file_has_an_index_of_its_own_number(tmp_path: Path) -> None:
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    for index in (0, 1, 0):  # a second save of the first model leaves the other one alone
        save_model_files(state, tmp_path, max_shard_size=16, safe_serialization=True, index=index)
    assert read_model_files(tmp_path / "model_1.safetensors.index.json").keys() == state.keys()
    assert read_model_files(tmp_path / "model.safetensors.index.json").keys() == state.keys()


def test_models_that_are_saved_whole_are_merged_too(tmp_path: Path) -> None:
    run_on_ranks(2, save_for_merging, folder=str(tmp_path / "saved"), state_dict_type="FULL_STATE_DICT")
    written = merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged", safe_serialization=False)
    assert written == ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert torch.load(tmp_path / "merged" / "pytorch_model_1.bin").keys() == {"weight", "bias"}


def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_model_files({"a": torch.ones(1)}, tmp_path, max_shard_size="1GB", safe_serialization=True)
    (tmp_path / "pytorch_model_1").mkdir()
    with pytest.raises(ValueError, match="files of DeepSpeed's engine"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")
    (tmp_path / "pytorch_model_1").rmdir()
    with pytest.raises(ValueError, match="would be deleted with the checkpoint"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged", remove_checkpoint_dir=True)
    assert not (tmp_path / "merged").exists()


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
