"""Models spread over devices, memory and disk: what runs, what is tied, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelerate.big_modeling
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.utils import find_tied_parameters, set_module_tensor_to_device
from accelerate.utils.modeling import get_state_dict_offloaded_model, load_state_dict
from meshwright import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from meshwright.runtime.streams.mapping import is_mapped
from tests.inference.models import Scaled, Tied, tied_model
from tests.simulated_accelerator import device_module, on_a_simulated_accelerator

TOKENS = torch.arange(6)
ALL = ("embedding", "layers", "norm", "head")


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)  # type: ignore[no-any-return]


def spread(*places: Any) -> dict[str, Any]:
    return dict(zip(ALL, places, strict=True))


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        {"": "disk"},
        spread("disk", "cpu", "cpu", "disk"),
        spread("disk", "disk", "cpu", "cpu"),
        spread("cpu", "disk", "disk", "disk"),
        {"": "cpu", "layers.1": "disk"},
        {"": "disk", "layers.0": "cpu"},
    ],
)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_host_and_disk(device_map: dict[str, Any], offload_buffers: bool, tmp_path: Path) -> None:
    model = tied_model()
    expected = outputs(model)
    assert dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=offload_buffers) is model
    for _ in range(3):
        assert torch.equal(outputs(model), expected)
    assert model.hf_device_map == device_map
    remove_hook_from_submodules(model)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(outputs(model), expected)


def _on_a_device(device_map: dict[str, Any], folder: Path) -> None:
    model = tied_model()
    expected = outputs(model)
    dispatch_model(model, device_map, offload_dir=folder)
    for _ in range(3):
        actual = outputs(model)
        assert actual.device.type == "cpu", "the output is where the input was"
        assert torch.equal(actual, expected)


@on_a_simulated_accelerator
def test_devices_host_and_disk_on_a_simulated_accelerator(tmp_path: Path) -> None:
    _on_a_device(spread(0, 0, 1, 0), tmp_path)
    _on_a_device(spread(0, "cpu", 1, "disk"), tmp_path)
    _on_a_device(spread("cpu", "disk", 1, "cpu"), tmp_path)
    _on_a_device(spread("disk", "gpu:1", torch.device("gpu:0"), "disk"), tmp_path)
    with pytest.warns(UserWarning, match="different devices"):
        _on_a_device(spread(0, "cpu", 1, 1), tmp_path)


@on_a_simulated_accelerator
def test_what_is_tied_is_on_a_device_once_on_a_simulated_accelerator(tmp_path: Path) -> None:
    before = device_module.memory_allocated(0)
    model = tied_model(tokens=1000)
    dispatch_model(model, spread(0, 0, 0, 0), force_hooks=True)
    assert model.head.weight is model.embedding.weight
    assert device_module.memory_allocated(0) - before < 1.2 * model.head.weight.nbytes
    model = tied_model(tokens=1000)
    dispatch_model(model, spread(0, 0, 0, "disk"), offload_dir=tmp_path)
    assert model.head.weight is model.embedding.weight, "the head need not come from disk"
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]


@on_a_simulated_accelerator
def test_only_one_offloaded_layer_is_on_the_device_on_a_simulated_accelerator(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    layer = sum(p.nbytes for p in model[0].parameters())
    inputs = torch.randn(2, 64)
    expected = model(inputs)
    dispatch_model(model, {"": "disk"}, main_device=0, offload_dir=tmp_path)
    limit = device_module.memory_allocated(0) + layer + 4096
    with device_module.memory_limit(limit, 0), torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(inputs), expected)


def test_weights_on_disk_are_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied_model()
    disk_offload(model, tmp_path, execution_device="cpu")
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    outputs(model)
    dataset = model.layers[0]._hf_hook.weights_map.dataset
    assert is_mapped(dataset["layers.0.weight"])
    old_forward = model.layers[1]._old_forward

    def looking(x: Tensor) -> Tensor:
        seen.append(model.layers[1].weight)
        return old_forward(x)  # type: ignore[no-any-return]

    model.layers[1]._old_forward = looking
    outputs(model)
    assert seen[-1].data_ptr() == dataset["layers.1.weight"].data_ptr(), "no copy was made"


def test_the_next_layer_is_read_while_one_computes(tmp_path: Path) -> None:
    model = tied_model(layers=4)
    disk_offload(model, tmp_path, execution_device="cpu")
    stream = model.layers[0]._hf_hook._stream
    prefetched = []

    def look(*_: Any) -> None:
        ahead = stream._ahead._prefetched
        prefetched.append(ahead[0].weights.prefix if ahead else None)

    for layer in model.layers:
        old = layer._old_forward
        layer._old_forward = lambda x, old=old: (look(), old(x))[1]
    for _ in range(2):
        prefetched.clear()
        outputs(model)
        assert prefetched == ["layers.1.", "layers.2.", "layers.3.", "norm."]


def test_another_order_than_expected_is_right_too(tmp_path: Path) -> None:
    model = tied_model(layers=3)
    x = torch.randn(2, 32)
    expected = [layer(x) for layer in model.layers]
    disk_offload(model, tmp_path, execution_device="cpu")
    for index in (2, 0, 0, 1, 2, 1):
        assert torch.equal(model.layers[index](x), expected[index])


def test_offload_without_a_map(tmp_path: Path) -> None:
    for offload in (lambda m: cpu_offload(m, "cpu"), lambda m: disk_offload(m, tmp_path, offload_buffers=True)):
        model = tied_model()
        expected = outputs(model)
        assert offload(model) is model
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert torch.equal(outputs(model), expected)
        state = get_state_dict_offloaded_model(model)
        assert {name: tensor.shape for name, tensor in state.items()} == {
            name: tensor.shape for name, tensor in tied_model().state_dict().items()
        }
        assert torch.equal(state["head.weight"], tied_model().head.weight)


def test_a_model_with_tensors_of_its_own_and_preloaded_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scaled(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    x = torch.randn(2, 32)
    expected = model(x)
    for preload in (None, ["Sequential"], ["Scaled"]):
        one = copy.deepcopy(model)
        disk_offload(one, tmp_path / str(preload), execution_device="cpu", preload_module_classes=preload)
        assert torch.equal(one(x), expected)


def test_a_dispatched_model_can_be_dispatched_again(tmp_path: Path) -> None:
    model = tied_model()
    expected = outputs(model)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    dispatch_model(model, spread("disk", "cpu", "disk", "disk"), offload_dir=tmp_path / "other")
    assert torch.equal(outputs(model), expected)
    dispatch_model(tied_model(seed=1), {"": "disk"}, offload_dir=tmp_path / "other")
    fresh = dispatch_model(tied_model(), {"": "disk"}, offload_dir=tmp_path / "other")
    assert torch.equal(outputs(fresh), expected), "weights of another model in the folder are not used"
    assert torch.equal(outputs(model), expected), "and who still reads the old ones is not disturbed"


def test_what_cannot_run_is_refused_with_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="any device for 1 of the model's 11 tensors: head"):
        dispatch_model(tied_model(), {"layers": "cpu", "norm": "cpu", "embedding": "cpu"})
    with pytest.raises(ValueError, match="offload_dir"):
        dispatch_model(tied_model(), spread("cpu", "disk", "cpu", "cpu"))
    with pytest.raises(ValueError, match="no accelerator"):
        dispatch_model(tied_model(), {"": 0})
    with pytest.raises(ValueError, match="no accelerator"):
        dispatch_model(tied_model(), {"": "cpu", "head": "cuda:0"})
    with init_empty_weights():
        empty = Tied()
    with pytest.raises(ValueError, match=r"embedding\.weight .*on meta, it was not loaded"):
        dispatch_model(empty, {"": "cpu"})
    with pytest.raises(ValueError, match="have no values: embedding"):
        dispatch_model(empty, {"": "disk"}, offload_dir=tmp_path)
    with init_empty_weights(include_buffers=True):
        empty = nn.Sequential(Scaled(nn.Linear(32, 32)))  # type: ignore[assignment]
    for name, parameter in [*empty.named_parameters(), ("0.shift", empty[0].shift)]:  # type: ignore[index]
        set_module_tensor_to_device(empty, name, "cpu", value=torch.zeros(parameter.shape))
    with pytest.raises(ValueError, match=r"0\.offset .*a buffer that checkpoints leave out.*include_buffers=False"):
        dispatch_model(empty, {"": "cpu"})


@on_a_simulated_accelerator
def test_a_device_that_is_not_there_is_refused_on_a_simulated_accelerator() -> None:
    with pytest.raises(ValueError, match="head on 5, and this machine has 2 of kind gpu"):
        dispatch_model(tied_model(), spread(0, 0, 0, 5))


def test_moving_a_spread_model_is_refused(tmp_path: Path) -> None:
    model = dispatch_model(tied_model(), {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="cannot be moved"):
        model.to("cpu")
    model.to(torch.float64)
    remove_hook_from_submodules(model)
    model.to("cpu")


def test_the_check_at_the_published_path_is_the_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *arguments: called.append(arguments))
    dispatch_model(tied_model(), {"": "cpu"})
    assert called


# --- Empty models and checkpoints -------------------------------------------------------------------------------------


def test_models_are_built_without_memory() -> None:
    with init_empty_weights():
        model = Tied()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert model.head.weight is model.embedding.weight
    with init_empty_weights(include_buffers=True):
        assert all(b.is_meta for b in Tied().buffers())
    with init_on_device("cpu"):
        assert not Tied().head.weight.is_meta
    assert not Tied().head.weight.is_meta


@pytest.fixture(params=["shards", "one file", "torch's format"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    size = "5KB" if request.param == "shards" else "10GB"
    Accelerator(cpu=True).save_model(
        tied_model(), tmp_path / "model", max_shard_size=size, safe_serialization=request.param != "torch's format"
    )
    return tmp_path / "model"


@pytest.mark.parametrize(
    "device_map",
    [
        None,
        "auto",
        "sequential",
        {"": "disk"},
        spread("disk", "cpu", "cpu", "disk"),
        spread("cpu", "disk", "cpu", "disk"),
    ],
    ids=str,
)
def test_a_checkpoint_goes_where_the_map_says(device_map: Any, checkpoint: Path, tmp_path: Path) -> None:
    with init_empty_weights():
        model: nn.Module = Tied().eval()
    model = load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=tmp_path / "offload")
    for _ in range(2):
        assert torch.equal(outputs(model), outputs(tied_model()))
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
    if device_map == {"": "disk"}:
        written = list((tmp_path / "offload").glob("*.weight.dat"))
        assert bool(written) == (not (checkpoint / "model.safetensors").exists() and not _is_sharded(checkpoint))


def _is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / "model.safetensors.index.json").exists()


@on_a_simulated_accelerator
def test_a_checkpoint_goes_to_devices_on_a_simulated_accelerator(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(tied_model(), tmp_path / "model", max_shard_size="5KB")
    with init_empty_weights():
        model: nn.Module = Tied().eval()
    load_checkpoint_and_dispatch(model, tmp_path / "model", "sequential", {0: 9_000, 1: 20_000})
    assert {str(p.device) for p in model.parameters()} == {"gpu:0", "gpu:1"}
    assert torch.equal(outputs(model), outputs(tied_model()))
    with init_empty_weights():
        model = Tied().eval()
    budgets = {0: 10_000, "cpu": 3_000}
    load_checkpoint_and_dispatch(model, tmp_path / "model", "auto", budgets, offload_folder=tmp_path / "offload")
    assert torch.equal(outputs(model), outputs(tied_model()))
    assert load_state_dict(_first_file(tmp_path / "model"), {"": 1}).popitem()[1].device.type == "gpu"


def _first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_dtypes_are_converted_on_the_way(checkpoint: Path, tmp_path: Path) -> None:
    with init_empty_weights():
        model = Tied().eval()
    device_map = spread("disk", "disk", "cpu", "disk")
    load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=tmp_path / "o", dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    expected = outputs(tied_model().double())
    torch.testing.assert_close(outputs(model), expected)


def test_weights_go_into_the_memory_that_is_there(checkpoint: Path) -> None:
    model = tied_model(seed=1)
    addresses = [p.data_ptr() for p in model.parameters()]
    load_checkpoint_in_model(model, checkpoint, strict=True)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert torch.equal(outputs(model), outputs(tied_model()))


def test_unexpected_weights_are_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_checkpoint_in_model(tied_model(), checkpoint)
    assert not caplog.records
    load_checkpoint_in_model(Tied(layers=1), checkpoint)
    [record] = caplog.records
    assert f"the model checkpoint at {checkpoint} were not used when initializing Tied" in record.getMessage()
    assert "layers.1.weight" in record.getMessage()


def test_missing_weights_are_reported(checkpoint: Path, tmp_path: Path) -> None:
    with init_empty_weights():
        larger = Tied(layers=3)
    with pytest.warns(UserWarning, match=r"no values for 2 tensors .*: layers\.2\.weight, layers\.2\.bias"):
        load_checkpoint_in_model(larger, checkpoint)
    with pytest.raises(RuntimeError, match=r"lacks layers\.2\.weight, layers\.2\.bias, and holds nothing"):
        load_checkpoint_in_model(Tied(layers=3), checkpoint, strict=True)
    with pytest.raises(RuntimeError, match=r"holds layers\.1\.(weight|bias)"):
        load_checkpoint_in_model(Tied(layers=1), checkpoint, strict=True)
    with pytest.raises(ValueError, match="another model"):
        load_checkpoint_in_model(Tied(tokens=7), checkpoint)
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_in_model(Tied(), checkpoint, device_map={"": "disk"})
    with pytest.raises(ValueError, match="balanced_low_0"):
        load_checkpoint_and_dispatch(Tied(), checkpoint, "some_map")
    with pytest.warns(UserWarning, match="no values"), pytest.raises(ValueError, match=r"layers\.2\.weight"):
        load_checkpoint_and_dispatch(larger, checkpoint, {"": "disk"}, offload_folder=tmp_path / "offload")


def test_hooks_that_others_read(tmp_path: Path) -> None:
    model = dispatch_model(tied_model(), spread("disk", "cpu", "cpu", "disk"), offload_dir=tmp_path)
    hook = model._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert (hook.io_same_device, hook.execution_device, hook.offload) == (True, "cpu", False)
    inner = model.embedding._hf_hook
    assert isinstance(inner, AlignDevicesHook)
    assert (inner.offload, inner.weights_map.prefix) == (True, "embedding.")
    assert inner.weights_map.dataset.save_folder == tmp_path
    assert inner.weights_map.dataset.index["embedding.weight"] == {"dtype": "float32", "shape": [50, 32]}
