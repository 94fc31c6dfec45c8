"""Any model, any budgets: every tensor has one place, budgets are kept, and the model computes what it did."""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st
from torch import nn

from meshwright.inference.dispatch import dispatch_model
from meshwright.inference.offload.hooks import remove_hook_from_submodules
from meshwright.inference.planning.device_map import OFFLOADED, DeviceMap, infer_auto_device_map, place_of
from meshwright.inference.planning.sizes import compute_module_sizes
from meshwright.inference.tensors import find_tied_tensors
from tests.inference.models import NO_SPLIT, WIDTH, build, specs
from tests.simulated_accelerator import device_module, on_a_simulated_accelerator
from tests.sizes import PROFILE, sized

ACTIVATIONS = 4000
"""More bytes than a forward pass of two rows has alive at once."""

PHASES = [Phase.explicit, Phase.generate]  # a case that fails is small as it is
UNHURRIED = settings(
    max_examples=sized(gate=80, nightly=800),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
    derandomize=PROFILE == "gate",  # also in the process of the device, where no conftest.py is read
)


SMALL_PARTS_GO_BACK = {
    "spec": [
        "attention",
        ("chain", ["batch norm", "attention", "attention", "attention"]),
        ("residual", ["attention"]),
    ],
    "max_memory": {0: 27_000, 1: 18_000, "cpu": 72_000},
    "no_split": NO_SPLIT,
    "offload_buffers": True,
    "fallback": True,
}
"""The first layer has no room on the first device, beside the memory for offloaded layers; the second one has."""


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    spec = draw(specs())
    total = compute_module_sizes(build(spec))[""]
    share = st.integers(0, 12).map(lambda tenths: int(total * tenths / 10))
    return {
        "spec": spec,
        "max_memory": {0: draw(share), 1: draw(share), "cpu": draw(share)},
        "no_split": draw(st.sampled_from([NO_SPLIT])),
        "offload_buffers": draw(st.booleans()),
        "fallback": draw(st.booleans()),
    }


def plan(case: dict[str, Any]) -> tuple[nn.Module, DeviceMap]:
    model = build(case["spec"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device_map = infer_auto_device_map(
            model,
            max_memory=case["max_memory"],
            no_split_module_classes=case["no_split"],
            offload_buffers=case["offload_buffers"],
            fallback_allocation=case["fallback"],
        )
    return model, device_map


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


@UNHURRIED
@given(case=cases())
@example(case=SMALL_PARTS_GO_BACK)
def test_every_tensor_has_one_place_and_budgets_are_kept(case: dict[str, Any]) -> None:
    model, device_map = plan(case)
    assert json.loads(json.dumps(device_map)) == device_map
    for name, _ in named_tensors(model):
        covering = [key for key in device_map if not key or name == key or name.startswith(f"{key}.")]
        assert len(covering) == 1, f"{name} is covered by {covering}"
    for group in find_tied_tensors(model):
        assert len({place_of(name, device_map) for name in group}) == 1
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ in NO_SPLIT:
            inside = {place_of(f"{name}.{inner}", device_map) for inner, _ in named_tensors(module)}
            assert len(inside) <= 1

    held: dict[Any, dict[int, int]] = {}
    for name, tensor in named_tensors(model):
        held.setdefault(place_of(name, device_map), {})[id(tensor)] = tensor.nbytes
    for place, budget in case["max_memory"].items():
        assert sum(held.get(place, {}).values()) <= budget
    main = next((place for place in device_map.values() if place not in OFFLOADED), "cpu")
    assert not [place for place, _, kept, _ in device_map._rows if kept and place != main], "offloaded parts run there"
    assert "disk" not in held or "cpu" not in held or case["fallback"] or not _would_fit(model, case)


def _would_fit(model: nn.Module, case: dict[str, Any]) -> bool:
    return compute_module_sizes(model)[""] <= case["max_memory"]["cpu"]


@on_a_simulated_accelerator
def test_a_dispatched_model_computes_the_same_within_its_budgets_on_a_simulated_accelerator() -> None:
    @UNHURRIED
    @given(case=cases())
    @example(case=SMALL_PARTS_GO_BACK)
    def check(case: dict[str, Any]) -> None:
        model, device_map = plan(case)
        inputs = torch.randn(2, WIDTH)
        with torch.no_grad():
            expected = copy.deepcopy(model)(inputs)
            gc.collect()
            with tempfile.TemporaryDirectory() as folder:
                before = [device_module.memory_allocated(index) for index in (0, 1)]
                limits = [case["max_memory"][index] + before[index] + ACTIVATIONS for index in (0, 1)]
                with device_module.memory_limit(limits[0], 0), device_module.memory_limit(limits[1], 1):
                    dispatch_model(
                        model, device_map, offload_dir=folder, offload_buffers=case["offload_buffers"], force_hooks=True
                    )
                    for _ in range(3):  # the first forward pass learns the order
                        torch.testing.assert_close(model(inputs), expected)
                remove_hook_from_submodules(model)
        assert not any(tensor.is_meta for _, tensor in named_tensors(model)), "offloaded weights are loaded"

    check()


@pytest.mark.parametrize("seed", [0])
def test_disk_and_host_alone_compute_the_same(seed: int, tmp_path: Path) -> None:
    @UNHURRIED
    @given(case=cases())
    def check(case: dict[str, Any]) -> None:
        model = build(case["spec"])
        budgets = {"cpu": case["max_memory"]["cpu"]}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            device_map = infer_auto_device_map(model, budgets, NO_SPLIT, offload_buffers=case["offload_buffers"])
            inputs = torch.randn(2, WIDTH)
            expected = model(inputs)
            dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=case["offload_buffers"])
            for _ in range(2):
                torch.testing.assert_close(model(inputs), expected)

    check()
