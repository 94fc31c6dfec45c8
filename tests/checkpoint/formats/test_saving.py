"""Saving one object: whole or not at all, from one process, and what safetensors can hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from meshwright import PartialState
from meshwright.checkpoint.formats.saving import clean_state_dict_for_safetensors, save
from tests.ranks import ranks


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be pickled")


def test_an_object_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = {"step": 3, "weights": torch.arange(3.0), "names": ["a"]}
    save(saved, tmp_path / "state.bin")
    save(saved, str(tmp_path / "again.bin"))
    for name in ("state.bin", "again.bin"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert (loaded["step"], loaded["weights"].tolist(), loaded["names"]) == (3, [0.0, 1.0, 2.0], ["a"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.bin", "state.bin"]


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_a_save_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path, safe_serialization: bool) -> None:
    target = tmp_path / "state"
    target.write_text("the last good one")
    with pytest.raises((RuntimeError, TypeError)):
        save({"good": torch.ones(2), "bad": Unpicklable()}, target, safe_serialization=safe_serialization)
    assert target.read_text() == "the last good one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "state.bin"
    save({"step": 1}, target)
    inode = target.stat().st_ino
    save({"step": 2}, target)
    assert torch.load(target, weights_only=True) == {"step": 2}
    assert target.stat().st_ino != inode, "written beside it and renamed, never over it"


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for safe_serialization in (False, True):
        with pytest.raises(FileNotFoundError, match=r"state: .*absent is not a directory\. Create it first"):
            save({"a": torch.ones(1)}, tmp_path / "absent" / "state", safe_serialization=safe_serialization)


@ranks(3)
def test_only_the_main_process_writes(tmp_path: Path) -> None:
    state = PartialState()
    save({"rank": state.process_index}, tmp_path / f"rank-{state.process_index}")
    save({"rank": state.process_index}, tmp_path / "one")
    state.wait_for_everyone()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "rank-0"]
    assert torch.load(tmp_path / "one", weights_only=True) == {"rank": 0}


@ranks(4)
def test_on_each_node_the_first_process_of_every_host_writes(tmp_path: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}  # two hosts of two
    state = PartialState()
    save({"a": 1}, tmp_path / f"rank-{state.process_index}", save_on_each_node=True)
    state.wait_for_everyone()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-2"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_the_model_ties_them_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert list(stored) == ["embedding.weight"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    torch.manual_seed(1)
    restored = Tied()
    missing = restored.load_state_dict(stored, strict=False)
    assert missing.missing_keys == ["head.weight"]
    assert torch.equal(restored.head.weight, model.head.weight)


def test_omitted_names_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    weight = torch.ones(2)
    save({"a": weight, "b": torch.ones(2)}, tmp_path / "x.safetensors", safe_serialization=True)
    assert not caplog.records
    save({"a": weight, "b": weight}, tmp_path / "x.safetensors", safe_serialization=True)
    assert "Removed shared tensor b while saving" in caplog.text


def test_only_the_same_memory_seen_the_same_way_is_tied() -> None:
    whole = torch.arange(6.0).view(2, 3)
    state = {
        "whole": whole,
        "same": whole.view(2, 3),
        "part": whole[:1],
        "turned": whole.t(),
        "bits": whole.view(torch.int32),
        "copy": whole.clone(),
        "empty": torch.zeros(0),
        "also empty": torch.zeros(0),
    }
    cleaned = clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["whole", "part", "turned", "bits", "copy", "empty", "also empty"]
    for name, tensor in cleaned.items():
        assert torch.equal(tensor, state[name])
        assert tensor.is_contiguous()


def test_parts_of_one_memory_are_stored_in_their_own_size(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    save({"a": big[:10], "b": big[5:15]}, tmp_path / "parts", safe_serialization=True)
    assert (tmp_path / "parts").stat().st_size < 2000
    assert load_file(tmp_path / "parts")["b"].shape == (10,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_safetensors_keep_number_formats_and_need_no_graph(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0], [0, 1]]).to(dtype).t()
    if dtype.is_floating_point:
        tensor.requires_grad_()
    save({"t": tensor}, tmp_path / "t", safe_serialization=True)
    stored = load_file(tmp_path / "t")["t"]
    assert stored.dtype == dtype
    assert torch.equal(stored, tensor.detach())


def test_safetensors_refuse_what_is_no_tensor_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"these entries are not: lr, step. .*safe_serialization=False"):
        save({"step": 1, "w": torch.ones(1), "lr": 0.1}, tmp_path / "x", safe_serialization=True)
    with pytest.raises(TypeError, match="a dict of tensors, not a list"):
        save([torch.ones(1)], tmp_path / "x", safe_serialization=True)
    assert list(tmp_path.iterdir()) == []
