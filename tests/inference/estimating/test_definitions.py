"""Models by name and their batches, where no library is needed; with transformers see tests/commands."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.inference.estimating import definitions
from meshwright.inference.estimating.definitions import (
    DefinitionError,
    NoBatchError,
    create_empty_model,
    example_batch,
    on_meta,
)


def of_kind(name: str, main_input_name: str, **config: Any) -> nn.Module:
    """Return a model that describes itself as those of transformers do."""
    made: nn.Module = type(name, (nn.Module,), {})()
    made.main_input_name = main_input_name  # type: ignore[assignment]
    made.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return made


def shapes(model: nn.Module, *sizes: Any) -> dict[str, tuple[int, ...]]:
    batch = example_batch(model, *sizes)
    assert all(isinstance(value, Tensor) and value.is_meta for value in batch.kwargs.values())
    return {name: tuple(value.shape) for name, value in batch.kwargs.items()}


def test_batches_of_text() -> None:
    text = {"input_ids": (2, 512), "labels": (2, 512)}
    assert shapes(of_kind("AForCausalLM", "input_ids"), 2) == text
    assert shapes(of_kind("AForCausalLM", "input_ids", max_position_embeddings=128), 2)["labels"] == (2, 128)
    assert shapes(of_kind("AForCausalLM", "input_ids", max_position_embeddings=128), 2, 64)["labels"] == (2, 64)
    assert shapes(of_kind("AModel", "input_ids", n_positions=16), 1) == {"input_ids": (1, 16)}
    assert shapes(of_kind("AForSequenceClassification", "input_ids"), 3)["labels"] == (3,)
    assert shapes(of_kind("AForTokenClassification", "input_ids"), 3)["labels"] == (3, 512)
    assert shapes(of_kind("AForQuestionAnswering", "input_ids"), 3)["end_positions"] == (3,)
    both = shapes(of_kind("AForConditionalGeneration", "input_ids", is_encoder_decoder=True), 1, 8)
    assert both == dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), (1, 8))


def test_batches_of_images_and_sound() -> None:
    assert shapes(of_kind("AForImageClassification", "pixel_values", image_size=32, num_channels=1), 2) == {
        "pixel_values": (2, 1, 32, 32),
        "labels": (2,),
    }
    assert shapes(of_kind("AModel", "pixel_values", image_size=[8, 16]), 1)["pixel_values"] == (1, 3, 8, 16)
    assert shapes(of_kind("AModel", "pixel_values"), 1)["pixel_values"] == (1, 3, 224, 224)
    sound = of_kind(
        "AForConditionalGeneration", "input_features", num_mel_bins=80, max_source_positions=50, max_target_positions=7
    )
    assert shapes(sound, 1) == {"input_features": (1, 80, 100), "decoder_input_ids": (1, 7), "labels": (1, 7)}
    with pytest.raises(NoBatchError, match="which takes input_values"):
        example_batch(of_kind("AForCTC", "input_values"), 1)
    with pytest.raises(NoBatchError, match="--inputs module:callable"):
        example_batch(nn.Linear(2, 2), 1)


class Timm:
    """timm, with one model that reads a number from a tensor while it is made."""

    __version__ = "0"

    def list_models(self) -> list[str]:
        return ["small"]

    def create_model(self, name: str, pretrained: bool, num_classes: int = 10, width: int = 4) -> nn.Module:
        if name != "small":
            raise RuntimeError(f"Unknown model ({name})")
        made = nn.Sequential(nn.Conv2d(3, width, 1), nn.Dropout(torch.linspace(0, 1, 3)[1].item()))
        made.append(nn.Linear(width, num_classes))
        made.pretrained_cfg = {"input_size": (3, 8, 8)}  # type: ignore[assignment]
        return made


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "_package", lambda name: {"timm": Timm()}[name])


@pytest.mark.usefixtures("timm")
def test_a_model_of_timm(tmp_path: Path) -> None:
    config = {"architecture": "small", "num_classes": 5, "model_args": {"width": 6}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "config.json"):
        made = create_empty_model(str(place), None)
        assert made[2].weight.shape == (5, 6)  # type: ignore[index]
        assert all(param.is_meta for param in made.parameters())
    (batch,) = example_batch(made, 2).args
    assert batch.shape == (2, 3, 8, 8)
    assert create_empty_model("small", "timm")[2].weight.shape == (10, 4)  # type: ignore[index]
    with pytest.raises(DefinitionError, match="timm has no model 'large'"):
        create_empty_model("large", "timm")
    (tmp_path / "config.json").write_text('{"architecture": "large"}')
    with pytest.raises(DefinitionError, match="cannot make 'large'"):
        create_empty_model(str(tmp_path), None)


def test_code_of_a_models_own_is_run_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "_package", lambda name: SimpleNamespace())
    (tmp_path / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoModel": "code.Model"}}')
    with pytest.raises(DefinitionError, match="--trust_remote_code"):
        create_empty_model(str(tmp_path), None)


def test_errors_of_a_function_are_its_own() -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on_meta(fails)
