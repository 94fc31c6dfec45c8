"""The weights of a model are the same full tensors on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, OffloadConfig, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.parallel.small_transformer import model
from tests.parallel.ways import WAYS
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night

MORE = {
    **WAYS,
    "interleaved pp2": (2, lambda: {"parallelism_config": _pipeline(stages_per_rank=2, schedule="Interleaved1F1B")}),
    "fsdp2 on the host": (2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)}),
    "fsdp2 but one": (2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(ignored_modules="head")}),
    "offloaded blocks": (2, lambda: {"offload": OffloadConfig()}),
}


def _pipeline(**fields: Any) -> ParallelismConfig:
    from meshwright import PipelineConfig

    return ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(**fields))


class Odd(nn.Module):
    """Sizes that two and four processes do not divide, a frozen weight, buffers, a scalar, a tie, and large layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.first.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(11))
        self.large = nn.Linear(5, 100_003)
        self.even = nn.Linear(8, 40_000)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.first.weight
        self.half = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def odd() -> Odd:
    torch.manual_seed(1)
    return Odd()


def digest(pairs: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pairs}


def check_against(net: nn.Module, accelerator: Accelerator, expected: dict[str, Tensor]) -> None:
    weights = accelerator.weights(net, bucket_size=200_000)
    metas = weights.metadata()
    for _ in range(2):  # a pass can be repeated
        found = digest(weights)
        assert list(found) == [meta.name for meta in metas]
        assert found.keys() == expected.keys()
        for meta in metas:
            tensor = found[meta.name]
            assert (meta.dtype, meta.shape) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(tensor, expected[meta.name]), meta.name
    names = [names for names, _ in weights.iter_groups()]
    assert names == weights.groups()
    assert [name for group in names for name in group] == list(found)


def expected_of(net: nn.Module) -> dict[str, Tensor]:
    from meshwright.checkpoint.formats.saving import deduplicate_storage

    return {name: tensor.clone() for name, tensor in deduplicate_storage(net.state_dict()).items()}


def hand_over(way: str, tied: bool) -> None:
    net = model(tied=tied)
    with torch.no_grad():
        for param in net.parameters():
            param.normal_()
    expected = expected_of(net)
    options = MORE[way][1]()
    accelerator = Accelerator(cpu=True, **options)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    check_against(net, accelerator, expected)


@pytest.mark.parametrize("way", MORE)
@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_hands_over_what_one_process_holds(way: str, tied: bool) -> None:
    if tied and "pp" in way:
        pytest.skip("stages do not share parameters")
    run_on_ranks(MORE[way][0], hand_over, way=way, tied=tied)
