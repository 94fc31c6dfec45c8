"""A saved model is what every other tool reads: one file or shards, tied weights once, never half."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright import Accelerator
from meshwright.checkpoint.formats import codec
from meshwright.checkpoint.formats.model_files import parse_size, read_model_files
from meshwright.inference.loading import load_checkpoint_in_model
from tests.ranks import ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def same(left: nn.Module, right: nn.Module) -> bool:
    states = left.state_dict(), right.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_one_file_holds_each_memory_once_and_loads_with_the_ties(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["body.bias", "body.weight", "embedding.weight"]
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert same(model, other)
    assert other.head.weight is other.embedding.weight


def test_shards_have_an_index_and_replace_what_was_there(tmp_path: Path) -> None:
    accelerator, model, other = Accelerator(cpu=True), Tied(), Tied()
    accelerator.save_model(Tied(), tmp_path)
    accelerator.save_model(model, tmp_path, max_shard_size=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": (40 + 16 + 4) * 4}
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values())), "the single file of before is gone"
    assert all("-of-0000" in name for name in shards)
    load_checkpoint_in_model(other, tmp_path / "model.safetensors.index.json", strict=True)
    assert same(model, other)
    accelerator.save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


def test_the_old_format_can_be_asked_for(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    Accelerator(cpu=True).save_model(model, tmp_path, safe_serialization=False)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert same(model, other)


def test_a_save_that_fails_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = Accelerator(cpu=True), Tied()
    accelerator.save_model(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full_disk(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codec, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        accelerator.save_model(Tied(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@ranks(2)
def test_two_processes_write_one_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path / "model")
    accelerator.wait_for_everyone()
    other = Tied()
    load_checkpoint_in_model(other, tmp_path / "model", strict=True)
    assert same(accelerator.unwrap_model(model), other)


@pytest.mark.parametrize(
    ("size", "number"), [("10GB", 10**10), ("2GiB", 2**31), ("500 MB", 5 * 10**8), (7, 7), (7.9, 7), ("1.5KB", 1500)]
)
def test_sizes_are_read(size: float | str, number: int) -> None:
    assert parse_size(size) == number


@pytest.mark.parametrize("size", [float("inf"), -float("inf"), float("nan"), "inf", "9" * 400 + "GB", "1e3", "-1GB"])
def test_what_is_no_size_is_named(size: float | str) -> None:
    with pytest.raises(ValueError, match="not in a valid format"):
        parse_size(size)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}, {"max_shard_size": 500_000}])
def test_a_full_disk_is_named_and_leaves_no_folder(small_disk: Path, options: dict[str, Any]) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1000, 1000)
    folder = small_disk / "models" / "first"
    with pytest.raises(OSError, match="No space left on device") as error:
        accelerator.save_model(model, folder, **options)
    assert str(folder) in str(error.value)
    assert list(small_disk.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "notes").touch()
    with pytest.raises(OSError, match="No space left on device"):
        accelerator.save_model(model, folder, **options)
    assert [path.name for path in folder.iterdir()] == ["notes"], "what was there stays"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ten gigabytes"):
        parse_size("ten gigabytes")
    with pytest.raises(FileNotFoundError, match="holds no model"):
        read_model_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match="outside of its folder"):
        read_model_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        read_model_files(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Accelerator(cpu=True).save_model(Tied(), tmp_path / "file")


def test_weights_can_be_converted_on_the_way(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(Tied(), tmp_path)
    model = Tied().to(torch.bfloat16)
    model.body.to(torch.float32)
    load_checkpoint_in_model(model, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["body"])
    assert (model.head.weight.dtype, model.body.weight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", ["weight_map.index.json", "anything.index.json"])
@pytest.mark.parametrize("is_the_map", [True, False])
def test_an_index_may_have_any_name_and_be_the_map_itself(tmp_path: Path, name: str, is_the_map: bool) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    for key, value in state.items():
        save_file({key: value}, tmp_path / f"{key}.safetensors")
    weight_map = {key: f"{key}.safetensors" for key in state}
    (tmp_path / name).write_text(json.dumps(weight_map if is_the_map else {"metadata": {}, "weight_map": weight_map}))
    for place in (tmp_path, tmp_path / name):
        assert same_tensors(read_model_files(place), state)
    (tmp_path / "other.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"more than one `\.index\.json` file"):
        read_model_files(tmp_path)
    (tmp_path / "other.index.json").write_text('{"a": {"dtype": "float32"}}')
    with pytest.raises(ValueError, match=r"the index .* is damaged: a is an object"):
        read_model_files(tmp_path / "other.index.json")


def same_tensors(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}])
def test_a_quota_is_named_and_leaves_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(300, 300))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            accelerator.save_model(model, tmp_path / "saved", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
