"""The weights of a model are the same full tensors on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, OffloadConfig, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.parallel.small_transformer import model
from tests.parallel.ways import WAYS
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night

MORE = {
    **WAYS,
    "interleaved pp2": (2, lambda: {"parallelism_config": _pipeline(stages_per_rank=2, schedule="interleaved")}),
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
        self.lower = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("passing", torch.ones(2), persistent=False)


class Scaled(nn.Linear):
    """A layer with state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"scale": 1}


def odd() -> Odd:
    torch.manual_seed(1)
    return Odd()


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pairs}


def check_against(net: nn.Module, accelerator: Accelerator, expected: dict[str, Tensor]) -> None:
    weights = accelerator.weights(net, bucket_size=200_000)
    metas = weights.metadata()
    for _ in range(2):  # a pass can be repeated
        found = copied(weights)
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
    net = model(tied=tied, layers=4)
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


def hand_over_odd(way: str) -> None:
    net = odd()
    expected = expected_of(net)
    accelerator = Accelerator(cpu=True, **MORE[way][1]())
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    check_against(net, accelerator, expected)
    assert "passing" not in expected
    assert len(accelerator.weights(net).groups()) == 13, "what is before, eleven blocks in order, and the rest"


@pytest.mark.parametrize("way", ["one", "ddp2", "fsdp2", "fsdp4", at_night("hsdp2x2"), at_night("offloaded blocks")])
def test_uneven_frozen_large_and_scalar_tensors_arrive_whole(way: str) -> None:
    run_on_ranks(MORE[way][0], hand_over_odd, way=way)


@ranks(2)
def test_tensors_are_converted_before_they_are_sent() -> None:
    net = odd()
    expected = expected_of(net)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    weights = accelerator.weights(accelerator.prepare(net), dtype=torch.bfloat16)
    metas = {meta.name: meta for meta in weights.metadata()}
    for name, tensor in weights:
        wanted = expected[name].bfloat16() if expected[name].is_floating_point() else expected[name]
        assert torch.equal(tensor, wanted)
        assert metas[name].dtype == tensor.dtype == wanted.dtype


@ranks(2)
def test_a_compiled_and_trained_model_is_handed_over_as_it_is_now() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    compiled = torch.compile(net, backend="eager")
    weights = accelerator.weights(compiled)
    before = copied(weights)
    accelerator.backward(compiled(torch.ones(2, 4)).square().mean())
    optimizer.step()
    after = copied(weights)
    assert before.keys() == after.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    full = {name: param.full_tensor() for name, param in net.named_parameters()}
    assert all(torch.equal(after[name], full[name]) for name in after)
    assert not torch.equal(before["1.bias"], after["1.bias"])


@ranks(2)
def test_ranks_with_other_tensors_raise_together_before_the_first_one() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(3, 2 + accelerator.process_index)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have other tensors than rank 0"):
        next(iter(accelerator.weights(net)))
    assert accelerator.gather(torch.ones(1)).sum() == 2, "the ranks are in step"


@ranks(2)
def test_what_one_rank_cannot_hand_over_raises_on_all() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(3, 2, device="meta" if accelerator.process_index else "cpu")
    with pytest.raises((ValueError, RuntimeError), match="weight is on the meta device and has no value"):
        accelerator.weights(net).metadata()
    assert accelerator.gather(torch.ones(1)).sum() == 2


@ranks(2)
def test_a_model_that_has_changed_raises_on_all_ranks_before_the_first_tensor() -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(3, 2))
    weights = accelerator.weights(net)
    weights.metadata()
    if accelerator.process_index:
        net.module.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"bias is \[5\] of torch.float32, and was \[2\]"):
        next(iter(weights))


@ranks(2)
def test_unfinished_sums_and_composed_tensors_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(3, 2, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Partial()]))
    with pytest.raises(UnsupportedSettingError, match=r"weight, which is .*sums that were not made"):
        accelerator.weights(net).metadata()
    with pytest.raises(UnsupportedSettingError, match="_extra_state, a dict"):
        accelerator.weights(Scaled(3, 2)).metadata()


def test_options_that_mean_nothing_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="adapter='none' is not known"):
        accelerator.weights(nn.Linear(1, 1), adapter="none")
    with pytest.raises(ValueError, match=r"dtype=torch.int8 is not a floating-point dtype"):
        accelerator.weights(nn.Linear(1, 1), dtype=torch.int8)
    with pytest.raises(ValueError, match="1 parsec"):
        accelerator.weights(nn.Linear(1, 1), bucket_size="1 parsec")
    with pytest.raises(UnsupportedSettingError, match="0 adapters of PEFT"):
        accelerator.weights(nn.Linear(1, 1), adapter="only").metadata()
