from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from meshwright import FullyShardedDataParallelPlugin
from meshwright.parallel.modules.wrapping import ignored_modules, units_of

from ..small_transformer import Block, model


def names(net: nn.Module, **fields: Any) -> list[str]:
    by_identity = {id(module): name for name, module in net.named_modules()}
    return [by_identity[id(unit)] for unit in units_of(net, FullyShardedDataParallelPlugin(**fields))]


def test_repeated_blocks_are_found() -> None:
    assert names(model()) == ["blocks.0", "blocks.1"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_no_split_modules_names_the_blocks() -> None:
    net = model()
    net._no_split_modules = ["LayerNorm"]
    assert names(net) == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"]


@pytest.mark.parametrize("wanted", [["Block"], ["blocks.*"], "Block", ["Block", "NotThere"]])
def test_units_are_named_by_class_or_by_pattern(wanted: Any) -> None:
    chosen = names(model(), auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=wanted)
    assert chosen == ["blocks.0", "blocks.1"]


def test_a_list_of_lists_is_not_itself_a_block() -> None:
    pairs = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
    assert names(nn.Sequential(pairs, nn.Linear(2, 2))) == ["0.0", "0.1"]


def test_a_name_that_is_not_there_lists_the_classes_there_are() -> None:
    with pytest.raises(ValueError, match=r"no module of such a class or name. It has Linear \(13\)"):
        names(model(), transformer_cls_names_to_wrap=["GPT2Block"])
    with pytest.raises(ValueError, match="needs the classes of the blocks"):
        names(model(), auto_wrap_policy="transformer_based_wrap")


def test_units_are_chosen_by_size_from_the_inside() -> None:
    assert names(model(), auto_wrap_policy="size_based_wrap", min_num_params=1000) == [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.0",
        "blocks.1.up",
        "blocks.1.down",
        "blocks.1",
    ]
    assert names(model(), auto_wrap_policy="size_based_wrap", min_num_params=10**6) == []


def test_no_units_and_units_by_a_function() -> None:
    assert names(model(), auto_wrap_policy="no_wrap") == []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, Block)

    assert names(model(), auto_wrap_policy=policy) == ["blocks.0", "blocks.1"]


def test_modules_that_share_a_weight_stay_with_the_model() -> None:
    net = model(tied=True)
    chosen = names(net, transformer_cls_names_to_wrap=["Block", "Embedding", "Linear"])
    assert "tokens" not in chosen
    assert "head" not in chosen
    assert {"positions", "blocks.0", "blocks.0.up"} <= set(chosen)


def test_modules_are_ignored_by_name_or_as_objects() -> None:
    net = model()
    by_name = ignored_modules(net, FullyShardedDataParallelPlugin(ignored_modules=r"blocks\.0\.up"))
    as_objects = ignored_modules(net, FullyShardedDataParallelPlugin(ignored_modules=[net.blocks[0].up]))
    assert by_name == as_objects == [net.blocks[0].up]
    with pytest.raises(ValueError, match="matches the name of no module"):
        ignored_modules(net, FullyShardedDataParallelPlugin(ignored_modules="nothing"))
