"""Weights in files: the published format, safetensors in place, and release of mapped memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from meshwright.errors import InvalidDataError
from meshwright.inference.offload.weights import SafetensorsFile, TensorFile
from meshwright.runtime.streams import mapping
from meshwright.runtime.streams.mapping import is_mapped, prefetch_pages, release_pages

WEIGHTS = {
    "a.weight": torch.randn(3, 5),
    "a.half": torch.randn(7).bfloat16(),
    "a.number": torch.tensor(3.5),
    "b.flags": torch.tensor([True, False]),
    "b.counts": torch.arange(4),
    "b.empty": torch.empty(0, 3),
}


def test_the_published_format_is_written_and_read(tmp_path: Path) -> None:
    index: dict[str, dict[str, object]] = {}
    for name, weight in WEIGHTS.items():
        assert offload_weight(weight, name, tmp_path, index) is index
    save_offload_index(index, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == index
    assert index["a.half"] == {"dtype": "bfloat16", "shape": [7]}
    raw = np.memmap(tmp_path / "a.weight.dat", dtype="float32", mode="r", shape=(3, 5))
    assert np.array_equal(raw, WEIGHTS["a.weight"].numpy())
    for name, weight in WEIGHTS.items():
        assert torch.equal(load_offloaded_weight(tmp_path / f"{name}.dat", index[name]), weight)
    assert offload_weight(torch.ones(1), "alone", tmp_path) is None
    save_offload_index({"more": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert {"more", "a.weight"} <= set(json.loads((tmp_path / "index.json").read_text()))


def test_a_mapped_weight_can_be_written_to_and_its_file_replaced(tmp_path: Path) -> None:
    index: dict[str, dict[str, object]] = {}
    offload_weight(torch.ones(4), "w", tmp_path, index)
    mapped = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    mapped.add_(1)
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", index["w"]), torch.ones(4)), "the file is as it was"
    still = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    offload_weight(torch.zeros(4), "w", tmp_path, index)
    assert torch.equal(still, torch.ones(4)), "a mapping of the old file stays valid"


def test_weights_are_read_from_memory_a_folder_or_safetensors(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "folder", {"a": torch.ones(2)})
    save_file({"stored": torch.full((2,), 3.0), "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    index = {
        **json.loads((tmp_path / "folder" / "index.json").read_text()),
        "b": {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "stored"},
        "c": {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "stored", "dtype": "float16"},
    }
    loader = OffloadedWeightsLoader({"z": torch.zeros(2)}, tmp_path / "folder", index)
    assert list(loader) == ["z", "a", "b", "c"]
    assert len(loader) == 4
    assert [float(loader[name][0]) for name in loader] == [0, 1, 3, 3]
    assert loader["c"].dtype == torch.float16
    assert is_mapped(loader["b"])
    assert not is_mapped(loader["c"]), "a copy in another dtype must not be given back as if it were a file's"
    prefixed = PrefixedDataset({"m.w": 1, "n.w": 2}, "m.")
    assert (prefixed["w"], list(prefixed)) == (1, ["m.w"])
    with pytest.raises(KeyError):
        loader["nothing"]
    with pytest.raises(ValueError, match="nowhere to load"):
        OffloadedWeightsLoader()
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match="save_folder"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [2]}})["a"]


@pytest.mark.parametrize("can_ask", [True, False])
def test_pages_are_brought_and_given_back_with_their_values(
    can_ask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_ask:
        monkeypatch.setattr(mapping, "_libc", lambda: None)
    save_file({"w": torch.arange(100_000.0), "v": torch.ones(10)}, tmp_path / "x.safetensors")
    view = SafetensorsFile(tmp_path / "x.safetensors").view("w")
    for _ in range(2):
        prefetch_pages(view)
        assert float(view.double().sum()) == 99_999 * 50_000
        release_pages(view)
    plain = torch.ones(100_000)
    release_pages(plain)
    assert float(plain.sum()) == 100_000, "memory that is not mapped is left alone"


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_file_is_read_straight_into_place(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    if suffix == ".bin":
        torch.save(WEIGHTS, path)
    else:
        save_file(WEIGHTS, path)
    file = TensorFile.open(path)
    assert set(file.names()) == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        target = torch.empty_like(weight)
        file.read_into(name, target)
        assert torch.equal(target, weight)
        assert torch.equal(file.view(name), weight)
    converted = torch.empty(3, 5, dtype=torch.float64)
    file.read_into("a.weight", converted)
    assert torch.equal(converted, WEIGHTS["a.weight"].double())


def test_old_files_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TensorFile.open(tmp_path / "old.bin").view("w"), torch.ones(2))


def test_damaged_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="incomplete"):
        SafetensorsFile(path)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="header"):
        SafetensorsFile(path)
    offload_weight(torch.ones(4), "w", tmp_path)
    with pytest.raises(ValueError, match="too short"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [5]})


def test_a_folder_goes_back_into_a_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    offload_state_dict(tmp_path, {"weight": torch.eye(2)})
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert torch.equal(model.weight, torch.eye(2))
    assert extract_submodules_state_dict({"a.b": 1, "ab.c": 2, "a": 3}, ["a"]) == {"a.b": 1, "a": 3}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"safetensors_file": "FILE", "weight_name": "none"}, "holds no weight 'none'"),
        ({"safetensors_file": "FILE"}, "holds no weight 'a'"),
        ({"safetensors_file": "FILE", "weight_name": "w", "dtype": "quint8"}, "is not a dtype of plain"),
        ({"safetensors_file": "a\0b", "weight_name": "w"}, "a name that no file can have"),
        ({"safetensors_file": "\ud800", "weight_name": "w"}, "a name that no file can have"),
        ({"dtype": "float32", "shape": [1] * 100_000 + [2]}, "has no tensor of shape"),
        ({"dtype": "float32", "shape": [0, 1 << 62]}, "has no tensor of shape"),
        ({"dtype": "float32", "shape": [-2]}, "has no tensor of shape"),
        ({"dtype": "quint8", "shape": [8]}, "is not a dtype of plain"),
    ],
)
def test_an_index_that_lies_is_refused_by_one_short_error(
    entry: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "a.dat").write_bytes(bytes(8))
    entry = {name: str(tmp_path / "x.safetensors") if value == "FILE" else value for name, value in entry.items()}
    (tmp_path / "index.json").write_text(json.dumps({"a": entry}))
    with pytest.raises(InvalidDataError, match=reason) as raised:
        _ = OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    assert len(str(raised.value)) < 1000
