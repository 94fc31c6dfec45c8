"""Counted sizes against real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.inference.estimating.batches import ModelArguments
from meshwright.inference.estimating.sizes import Sizes, blocks_of
from tests.parallel.small_transformer import Transformer


def weights_of(model: nn.Module) -> int:
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Convolutions(nn.Module):
    """Buffers of two dtypes, a parameter outside of all modules, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 5)
        self.register_buffer("table", torch.ones(7), persistent=False)
        self.body[0].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(images).mean((2, 3))) * self.scale
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "tied": lambda: Transformer(tied=True),
    "convolutions": Convolutions,
    "torch's encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_exact(name: str, dtype: str) -> None:
    real = MODELS[name]().to(getattr(torch, dtype))
    assert Sizes(on_meta(MODELS[name]), dtype).total() == weights_of(real)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of float32"):
        Sizes(nn.Linear(2, 2), "int2")


def test_the_largest_layer_is_a_block_or_what_is_outside_of_them() -> None:
    assert Sizes(on_meta(Transformer), "float32").largest_layer() == ("blocks.0", weights_of(Transformer().blocks[0]))
    wide = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    assert Sizes(wide, "float16").largest_layer() == ("0", 8000)
    assert Sizes(nn.Linear(2, 3, bias=False), "float32").largest_layer() == ("", 24)


def test_blocks_may_be_named_by_the_model_and_need_not_exist() -> None:
    model = Transformer(layers=3)
    assert blocks_of(model) == list(model.blocks)
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    assert all(isinstance(block, nn.Linear) for block in blocks_of(model))
    model._no_split_modules = ["Elsewhere"]  # type: ignore[assignment]
    assert blocks_of(model) == list(model.blocks)


@pytest.mark.parametrize(
    ("value", "batch"),
    [
        ((1, 2), ModelArguments(args=(1, 2))),
        ([1], ModelArguments(args=(1,))),
        ({"x": 1}, ModelArguments(kwargs={"x": 1})),
        ("one", ModelArguments(args=("one",))),
    ],
)
def test_what_a_function_returned_becomes_the_arguments_of_a_call(value: Any, batch: ModelArguments) -> None:
    assert ModelArguments.of(value) == batch == ModelArguments.of(batch)
