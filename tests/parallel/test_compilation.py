"""Compiled models: the same numbers and the same names, whole or by regions, alone and under DDP."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from accelerate.utils import compile_regions_deepspeed, compile_regions_fsdp2, is_compiled_module, model_has_dtensor
from benchmarks.compile import Blocks
from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    compile_regions,
    extract_model_from_parallel,
    has_compiled_regions,
)
from tests.ranks import ranks
from tests.sizes import sized
from tests.timing import ALONE

WIDTH = 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def blocks(depth: int = 2, seed: int = 0) -> Blocks:
    torch.manual_seed(seed)
    return Blocks(depth, WIDTH)


def batch(seed: int = 1, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(accelerator: Accelerator, steps: int = 5, model: nn.Module | None = None) -> tuple[nn.Module, list[float]]:
    """Train with accumulation, on data that differs between ranks; return the model and its losses."""
    model = blocks() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        with accelerator.accumulate(model):
            loss = model(batch(seed=step * 10 + accelerator.process_index)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_trains_as_the_plain_one(precision: str, regional: bool) -> None:
    options: dict[str, Any] = {"cpu": True, "mixed_precision": precision, "gradient_accumulation_steps": 2}
    plain, expected = trained(Accelerator(**options))
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    compiled, losses = trained(Accelerator(dynamo_plugin=plugin, **options))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    state = compiled.state_dict() if regional else compiled._orig_mod.state_dict()  # type: ignore[union-attr]
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


def test_one_graph_serves_all_blocks() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True, fullgraph=True)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(blocks(depth=12))
    model(batch()).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("regional", [False, True])
def test_names_and_unwrapping(regional: bool, tmp_path: Path) -> None:
    own = blocks()
    names = list(own.state_dict())
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = accelerator.prepare(own)
    assert is_compiled_module(model) is not regional
    assert has_compiled_regions(model)
    assert list(accelerator.get_state_dict(model)) == names
    assert list(accelerator.get_state_dict(model, unwrap=False)) == names
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    accelerator.save_model(model, tmp_path / "for_others")
    from safetensors import safe_open

    with safe_open(tmp_path / "for_others" / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(names)
    accelerator.save_state(tmp_path / "state")
    before = copy.deepcopy(own.state_dict())
    with torch.no_grad():
        for param in own.parameters():
            param.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


def test_a_compiled_checkpoint_loads_into_a_plain_model(tmp_path: Path) -> None:
    compiled = Accelerator(cpu=True, dynamo_backend="eager")
    own = blocks(seed=1)
    compiled.prepare(own)
    compiled.save_state(tmp_path)
    plain = Accelerator(cpu=True, dynamo_backend="no")
    model = plain.prepare(blocks(seed=2))
    plain.load_state(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))


def test_a_model_is_not_compiled_twice(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    mine = torch.compile(blocks(), backend="aot_eager")
    with caplog.at_level(logging.INFO, logger="meshwright"):
        assert accelerator.prepare(mine) is mine
    assert "compiled already" in caplog.text
    model = accelerator.prepare(blocks())
    assert accelerator.prepare(model) is model
    assert not is_compiled_module(model._orig_mod)
    regions = compile_regions(blocks(), backend="eager")
    by_hand = [block._compiled_call_impl for block in regions.layers]
    assert accelerator.prepare(regions) is regions
    assert [block._compiled_call_impl for block in regions.layers] == by_hand


def test_a_prepared_model_goes_to_another_accelerator() -> None:
    own = blocks()
    model = Accelerator(cpu=True, dynamo_backend="eager", mixed_precision="bf16").prepare(own)
    again = Accelerator(cpu=True, mixed_precision="no").prepare(model)
    assert torch.equal(again(batch()), blocks()(batch()))


def test_a_model_for_evaluation_is_compiled() -> None:
    model = Accelerator(cpu=True, dynamo_backend="eager").prepare_model(blocks(), evaluation_mode=True)
    assert torch.equal(model(batch()), blocks()(batch()))
    assert counters["stats"]["unique_graphs"] == 1


def test_no_backend_compiles_nothing() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="no")
    own = blocks()
    assert accelerator.prepare(own) is own
    assert not has_compiled_regions(own)
    assert accelerator.state.dynamo_plugin.to_kwargs() == {}


def test_the_environment_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(blocks())
    assert not is_compiled_module(model)
    assert has_compiled_regions(model)
    assert accelerator.state.dynamo_plugin.to_dict()["backend"] == "eager"
    assert accelerator.settings.origins["dynamo_backend"] == "environment variable ACCELERATE_DYNAMO_BACKEND"


def test_the_backend_is_given_in_one_place() -> None:
    with pytest.raises(ValueError, match=r"give the backend in one place, TorchDynamoPlugin\(backend=\.\.\.\)"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with pytest.raises(ValueError, match="'INDUCTR' is not a DynamoBackend: choose one of NO, EAGER"):
        Accelerator(cpu=True, dynamo_backend="inductr")


def test_the_plugin_says_what_torch_takes() -> None:
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert TorchDynamoPlugin().to_dict() == {
        "backend": "no",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }
    plugin = TorchDynamoPlugin(backend="Inductor", mode="default", dynamic=True, use_regional_compilation=True)
    assert plugin.backend == "INDUCTOR"
    assert plugin.to_kwargs() == {"backend": "inductor", "dynamic": True}


# --- regions --------------------------------------------------------------------------------------------------------


class OfTorch(nn.Module):
    """Repeat classes of torch, whose forward passes the compiler would skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    """A sequence whose elements have lists of their own, and one block that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Blocks(2, WIDTH), Blocks(2, WIDTH))
        self.last = nn.ModuleDict({"only": Blocks(2, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last["only"](self.stages(x))
        return out


def test_the_outermost_repeated_blocks_are_the_regions() -> None:
    model = Nested()
    expected = model(batch())
    assert compile_regions(model, backend="eager", fullgraph=True) is model
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["stages.0", "stages.1", "last.only.layers.0", "last.only.layers.1"]
    assert torch.equal(model(batch()), expected)


def test_a_model_without_blocks_is_compiled_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = OfTorch()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        whole = compile_regions(model, backend="eager")
    assert is_compiled_module(whole)
    assert "OfTorch has no repeated blocks" in caplog.text
    assert torch.equal(whole(batch()), model(batch()))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("make", "parts"), [(blocks, 2), (OfTorch, 1)])
def test_sharded_modules_are_compiled_in_place(make: Any, parts: int) -> None:
    model = make()
    expected = model(batch())
    assert compile_regions_fsdp2(model, backend="eager") is model
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == parts
    other = make()
    other.load_state_dict(model.state_dict())
    assert compile_regions_deepspeed(other, backend="eager") is None
    assert torch.equal(model(batch()), expected)
    assert torch.equal(other(batch()), expected)


def test_regions_survive_copies_and_pickles() -> None:
    model = compile_regions(blocks(), backend="eager")
    expected = model(batch())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(batch()), expected)
        assert not has_compiled_regions(again)


def test_a_plain_model_is_neither_compiled_nor_spread() -> None:
    assert not has_compiled_regions(blocks())
    assert not is_compiled_module(blocks())
    assert not model_has_dtensor(blocks())


@ranks(2)
def test_a_spread_parameter_is_found() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    model = blocks()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    assert model_has_dtensor(model)


# --- several processes ----------------------------------------------------------------------------------------------


@ranks(2)
def test_ddp_is_compiled_from_outside_and_trains_as_plain_ddp() -> None:
    ways = sized(gate=[(False, "no"), (True, "bf16")], nightly=product((False, True), ("no", "bf16")))
    for regional, precision in ways:
        options: dict[str, Any] = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
        plain, expected = trained(Accelerator(**options), steps=6)
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        accelerator = Accelerator(dynamo_plugin=plugin, **options)
        compiled, losses = trained(accelerator, steps=6)
        assert losses == pytest.approx(expected, rel=1e-5)
        ddp = compiled if regional else compiled._orig_mod
        assert isinstance(ddp, DistributedDataParallel)
        own = accelerator.unwrap_model(compiled, keep_torch_compile=False)
        assert type(own) is Blocks
        for name, tensor in accelerator.get_state_dict(compiled).items():
            torch.testing.assert_close(tensor, plain.module.state_dict()[name])
            gathered = accelerator.gather(tensor[None])
            assert torch.equal(gathered[0], gathered[1])
        kept = accelerator.unwrap_model(compiled)
        assert torch.equal(kept(batch()), own(batch()))
        assert (compiled if regional else compiled._orig_mod) is ddp, "unwrapping left the trained model alone"


@ranks(2)
def test_sharded_models_are_compiled() -> None:
    def sharded(**options: Any) -> tuple[Accelerator, nn.Module, list[float]]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Block"])
        accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin, **options)
        return accelerator, *trained(accelerator, steps=4)

    _, _, expected = sharded()
    for regional in (False, True):
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        accelerator, model, losses = sharded(dynamo_plugin=plugin)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert model_has_dtensor(model)
        assert has_compiled_regions(model)
        whole = accelerator.get_state_dict(model)
        assert list(whole) == (list(blocks().state_dict()) if accelerator.is_main_process else [])


@ranks(2)
def test_gradients_are_not_reduced_in_no_sync() -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(blocks())
    weight = accelerator.unwrap_model(model, keep_torch_compile=False).head.weight
    mine = batch(seed=accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(mine).square().mean())
    here, there = accelerator.gather(weight.grad[None])
    assert not torch.equal(here, there)
    with accelerator.no_sync(model):
        loss = model(mine).square().mean()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    here, there = accelerator.gather(weight.grad[None])
    assert torch.equal(here, there)


def test_unwrapping_compiled_ddp_by_hand() -> None:
    """`extract_model_from_parallel` is public: it is also given what `prepare` never saw."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        own = blocks()
        ddp = DistributedDataParallel(own)
        compiled = torch.compile(ddp, backend="eager")
        unwrapped = extract_model_from_parallel(compiled)
        assert is_compiled_module(unwrapped)
        assert unwrapped._orig_mod is own
        assert compiled._orig_mod is ddp
        assert extract_model_from_parallel(compiled, keep_torch_compile=False) is own
    finally:
        torch.distributed.destroy_process_group()


# --- cost -----------------------------------------------------------------------------------------------------------


def test_neither_importing_nor_preparing_brings_the_compiler() -> None:
    program = """
import sys, torch
from meshwright import Accelerator
import accelerate.utils
Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
print(sorted({"torch._dynamo", "torchao"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


@pytest.mark.nightly
def test_regions_compile_in_a_third_of_the_time_to_the_same_outputs() -> None:
    """Bounded: the quick backend, which compiles and captures everything but writes no machine code."""
    from benchmarks.compile import measured

    whole, regions = measured("aot_eager", regional=False), measured("aot_eager", regional=True)
    assert regions.checksum == pytest.approx(whole.checksum, rel=1e-4)
    assert regions.seconds <= (0.35 if ALONE else 0.9) * whole.seconds


def test_inductor_where_there_is_a_compiler() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    expected = trained(Accelerator(cpu=True), steps=2, model=blocks(depth=2))[1]
    compiled = trained(Accelerator(cpu=True, dynamo_plugin=plugin), steps=2, model=blocks(depth=2))[1]
    assert compiled == pytest.approx(expected, rel=1e-4)
