"""What libraries put in the place of a function is what runs: one test per row of `monkeypatched.tsv`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelerate
import accelerate.accelerator
import accelerate.big_modeling
import accelerate.data_loader
import accelerate.tracking
import accelerate.utils
import accelerate.utils.fsdp_utils
import accelerate.utils.imports
import accelerate.utils.modeling
import accelerate.utils.other
from accelerate import Accelerator, FullyShardedDataParallelPlugin, dispatch_model
from accelerate.utils import AORecipeKwargs, load_fsdp_model, save_fsdp_model, set_module_tensor_to_device
from tests.ranks import run_on_ranks

from .facts import resolve, rows

TESTED = {
    ("accelerate", "prepare_data_loader"),
    ("accelerate.accelerator", "convert_model_to_fp8_ao"),
    ("accelerate.accelerator", "fsdp2_apply_ac"),
    ("accelerate.accelerator", "fsdp2_prepare_model"),
    ("accelerate.accelerator", "prepare_data_loader"),
    ("accelerate.big_modeling", "check_device_map"),
    ("accelerate.data_loader", "_AXOLOTL_EP_PATCHED"),
    ("accelerate.data_loader", "prepare_data_loader"),
    ("accelerate.utils", "is_wandb_available"),
    ("accelerate.utils.fsdp_utils", "_get_model_state_dict"),
    ("accelerate.utils.fsdp_utils", "_set_model_state_dict"),
    ("accelerate.utils.fsdp_utils", "fsdp2_prepare_auto_wrap_policy"),
    ("accelerate.utils.imports", "is_wandb_available"),
    ("accelerate.utils.modeling", "clear_device_cache"),
    ("accelerate.utils.other", "model_has_dtensor"),
}


def test_there_is_a_test_for_every_row() -> None:
    assert {(module, name) for module, name, *_ in rows("monkeypatched.tsv")} == TESTED


class Calls:
    """A function around another that counts."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def overwrite(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Any = None) -> Calls:
    calls = Calls(function or resolve(module, name))
    monkeypatch.setattr(resolve(module, "(module)"), name, calls)
    return calls


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_data_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = overwrite(monkeypatch, "accelerate.accelerator", "prepare_data_loader")
    Accelerator(cpu=True).prepare(DataLoader(range(4)))  # type: ignore[arg-type]
    assert calls.count == 1
    published = overwrite(monkeypatch, "accelerate.data_loader", "prepare_data_loader")
    accelerate.data_loader.prepare_data_loader(DataLoader(range(4)), num_processes=1, torch_device_mesh=None)  # type: ignore[arg-type]
    assert published.count == 1
    monkeypatch.setattr(accelerate, "prepare_data_loader", published, raising=False)
    monkeypatch.setattr(accelerate.data_loader, "_AXOLOTL_EP_PATCHED", True, raising=False)
    assert accelerate.prepare_data_loader is published  # type: ignore[attr-defined]
    assert accelerate.data_loader._AXOLOTL_EP_PATCHED  # type: ignore[attr-defined]


def test_fp8_conversion_may_leave_layers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    original = accelerate.accelerator.convert_model_to_fp8_ao

    def without_gates(model: nn.Module, config: Any = None, module_filter_func: Any = None) -> None:
        original(model, config=config, module_filter_func=lambda module, name: name != "gate")

    calls = overwrite(monkeypatch, "accelerate.accelerator", "convert_model_to_fp8_ao", without_gates)
    layers = nn.ModuleDict({"up": nn.Linear(16, 16), "gate": nn.Linear(16, 16), "down": nn.Linear(16, 16)})
    prepared = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]).prepare_model(layers)
    assert calls.count == 1
    kinds = {name: type(module).__name__ for name, module in prepared.named_children()}
    assert kinds == {"up": "Float8Linear", "gate": "Linear", "down": "Float8Linear"}


def test_device_maps_need_not_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="1"):
        dispatch_model(model(), {"0": "cpu"}, main_device="cpu", force_hooks=True)
    overwrite(monkeypatch, "accelerate.big_modeling", "check_device_map", lambda *args, **kwargs: None)
    dispatch_model(model(), {"0": "cpu"}, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("module", ["accelerate.utils", "accelerate.utils.imports"])
def test_a_broken_wandb_is_not_used(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve(module, "(module)"), "is_wandb_available", lambda: True)
    assert "wandb" in accelerate.tracking.get_available_trackers()
    monkeypatch.setattr(resolve(module, "(module)"), "is_wandb_available", lambda: False)
    assert "wandb" not in accelerate.tracking.get_available_trackers()


def test_device_caches_need_not_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.inference import tensors

    calls = overwrite(monkeypatch, "accelerate.utils.modeling", "clear_device_cache", lambda **kwargs: None)
    assert tensors.clear_device_cache is calls
    set_module_tensor_to_device(model(), "0.weight", "cpu", value=torch.ones(4, 4))


def test_who_has_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = overwrite(monkeypatch, "accelerate.utils.other", "model_has_dtensor")
    assert not accelerate.utils.other.model_has_dtensor(model())
    assert calls.count == 1


def test_an_assignment_is_undone_where_it_was_made() -> None:
    from meshwright.runtime.devices import abilities

    before = abilities.is_wandb_available
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.utils.imports, "is_wandb_available", lambda: False)
        assert abilities.is_wandb_available is not before
    assert abilities.is_wandb_available is before


# --- models that are sharded ------------------------------------------------------------------------------------------


def sharded_run(folder: str) -> dict[str, int]:
    """Prepare, save and load a sharded model, and count which of the overwritten functions ran."""
    names = {
        "accelerate.accelerator": ("fsdp2_apply_ac", "fsdp2_prepare_model"),
        "accelerate.utils.fsdp_utils": (
            "_get_model_state_dict",
            "_set_model_state_dict",
            "fsdp2_prepare_auto_wrap_policy",
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        calls = {name: overwrite(patch, module, name) for module, names in names.items() for name in names}
        layers = nn.Sequential(model(), model())
        plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        prepared, stepping = accelerator.prepare(layers, optimizer)
        own = {id(param) for param in prepared.parameters()}
        assert all(id(param) in own for group in stepping.param_groups for param in group["params"])
        save_fsdp_model(plugin, accelerator, prepared, folder)
        load_fsdp_model(plugin, accelerator, prepared, folder)
    return {name: call.count for name, call in calls.items()}


def test_sharding(tmp_path: Path) -> None:
    for counts in run_on_ranks(2, sharded_run, folder=str(tmp_path)):
        assert counts["fsdp2_apply_ac"] == counts["fsdp2_prepare_model"] == 1
        assert counts["_get_model_state_dict"] == counts["_set_model_state_dict"] == 1
        assert counts["fsdp2_prepare_auto_wrap_policy"] >= 1


def whole_model_kept() -> bool:
    """Overwrite sharding by nothing at all: the parameters stay plain ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.accelerator, "fsdp2_prepare_model", partial(_as_it_is))
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        prepared = accelerator.prepare_model(nn.Sequential(model(), model()))
        return not accelerate.utils.other.model_has_dtensor(prepared)


def _as_it_is(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    assert isinstance(accelerator, Accelerator)
    return model


def test_what_an_overwritten_function_does_is_what_happens() -> None:
    assert run_on_ranks(2, whole_model_kept) == [True, True]
