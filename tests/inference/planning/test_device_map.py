"""Device maps: the place of each part, and the errors if there is none."""

from __future__ import annotations

import json
import re
import time
import warnings
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from accelerate.utils import (
    check_device_map,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
)
from accelerate.utils.modeling import (
    clean_device_map,
    compute_module_total_buffer_size,
    fallback_allocate,
    get_module_size_with_ties,
    get_non_persistent_buffers,
)
from meshwright import infer_auto_device_map, init_empty_weights
from meshwright.inference.planning import device_map
from meshwright.inference.planning.device_map import USED_FOR_WEIGHTS
from tests.inference.models import Residual, Scaled, tied_model
from tests.simulated_accelerator import on_a_simulated_accelerator
from tests.simulated_accelerator.faults import without_memory_information


class Small(nn.Module):
    """236 bytes: 64, 72 with 40 of buffers, 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)


class SmallTied(nn.Module):
    """240 bytes: an embedding and a head share 160."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.l1, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize(
    ("model", "max_memory", "expected"),
    [
        (Small, {0: 1000}, {"": 0}),
        (Small, {0: 140, "cpu": 1000}, {"": "cpu"}),
        (Small, {0: 204, "cpu": 1000}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
        (Small, {0: 200, 1: 200}, {"linear1": 0, "batchnorm": 0, "linear2": 1}),
        (Small, {0: 0, "cpu": 1000}, {"": "cpu"}),
        (Small, {"cpu": 236}, {"": "cpu"}),
        (SmallTied, {0: 200, 1: 200}, {"emb": 0, "head": 0, "l1": 1}),
        (SmallTied, {0: 150, 1: 200, "cpu": 100}, {"": "disk"}),
        (SmallTied, {0: 320, "cpu": 100}, {"": 0}),
    ],
)
def test_parts_go_where_there_is_room(model: Any, max_memory: dict[Any, int], expected: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert infer_auto_device_map(model(), max_memory) == expected


def test_the_result_is_a_plain_dict_that_can_show_itself(capsys: pytest.CaptureFixture[str]) -> None:
    device_map = infer_auto_device_map(Small(), {0: 204, "cpu": 1000}, verbose=True)
    assert json.loads(json.dumps(device_map)) == dict(device_map)
    assert "batchnorm (72 B) -> cpu, because 0 has no room" in capsys.readouterr().out
    table = device_map.table().splitlines()
    assert table[0].split() == ["device", "holds", "keeps", "free", "budget", "what"]
    assert table[1].split() == ["0", "64", "B", "140", "B", "204", "B", "linear1"]
    assert "(everything)" in infer_auto_device_map(Small(), {0: 1000}).table()


def test_modules_that_must_not_be_split_are_not() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Residual(nn.Linear(32, 32), nn.Linear(32, 32)), nn.Linear(32, 32))
    budgets = {0: 3 * 4224, 1: 4 * 4224, "cpu": 10**6}
    assert infer_auto_device_map(model, budgets) == {"0": 0, "1": 0, "2": 1}
    budgets = {0: 2 * 4224, 1: 4 * 4224, "cpu": 10**6}
    assert infer_auto_device_map(model, budgets) == {"0": 0, "1.inner.0": 0, "1.inner.1": 1, "2": 1}
    assert infer_auto_device_map(model, budgets, "Residual") == {"0": 0, "1": 1, "2": 1}


def test_small_parts_go_back_to_a_device_if_that_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(32, 32), nn.Linear(4, 4))
    budgets = {0: 200, 1: 4300}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "disk" in infer_auto_device_map(model, budgets).values()
    assert infer_auto_device_map(model, budgets, fallback_allocation=True) == {"0": 0, "1": 1, "2": 0}


def test_a_module_s_own_tensors_are_listed() -> None:
    model = nn.Sequential(Scaled(nn.Linear(32, 32), nn.Linear(32, 32)))
    device_map = infer_auto_device_map(model, {0: 500, 1: 10**6})
    assert device_map == {"0.scale": 0, "0.shift": 0, "0.offset": 0, "0.inner": 1}
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}) == {"": 0}
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}, clean_result=False) == {"": 0}


def test_other_dtypes_are_planned_for() -> None:
    assert infer_auto_device_map(Small(), {0: 122}, dtype=torch.float16) == {"": 0}
    special = {name: torch.int8 for name, _ in Small().named_parameters()}
    assert infer_auto_device_map(Small(), {0: 40 + 49}, special_dtypes=special) == {"": 0}
    assert compute_module_sizes(Small(), dtype="float16")[""] == 122


def test_ten_thousand_modules_take_no_time() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(Residual(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2000)))
    assert sum(1 for _ in model.modules()) > 10_000
    took = []
    for _ in range(3):
        started = time.process_time()
        infer_auto_device_map(model, {0: 300_000, 1: 300_000, "cpu": 10**7}, ["Residual"])
        took.append(time.process_time() - started)
    assert min(took) <= 1.0, took


def test_a_model_that_does_not_fit_is_reported_with_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"disk: 100 B\): it takes 236 B, and its largest part .* linear2, 100 B"):
        infer_auto_device_map(Small(), {0: 0, "cpu": 0, "disk": 100})
    assert infer_auto_device_map(Small(), {"cpu": 50}) == {"": "disk"}
    assert re.search(r"insufficient memory: the largest layer takes 140 B.*\(cpu: 50 B\).*at least 140 B", caplog.text)
    with pytest.raises(ValueError, match=r"any device for 7 of the model's 9 tensors: batchnorm\.weight"):
        check_device_map(Small(), {"linear1": 0})
    with pytest.warns(UserWarning, match="does not have: nothing_like_it"):
        check_device_map(Small(), {"": 0, "nothing_like_it": 1})
    with pytest.warns(UserWarning, match="different devices"):
        check_tied_parameters_on_same_device([["emb.weight", "head.weight"]], {"emb": 0, "head": 1})
    with pytest.raises(ValueError, match="1XX"):
        convert_file_size_to_int("1XX")


def test_sizes_become_numbers_in_the_dict_that_was_given_as_transformers_expects() -> None:
    budgets = {"cpu": "60KB", 0: 12.5}
    assert get_max_memory(budgets) == {0: 12, "cpu": 60_000}
    assert budgets == {"cpu": 60_000, 0: 12.5}


def test_budgets() -> None:
    assert list(get_max_memory()) == ["cpu"]
    assert list(get_max_memory({"cpu": "1GB", 1: "1KiB", 0: 5}).items()) == [(0, 5), (1, 1024), ("cpu", 10**9)]
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    size = compute_module_sizes(model)[""]
    balanced = get_balanced_memory(model, {0: 10 * size, 1: 10 * size, "cpu": 7})
    assert size / 2 <= balanced[0] <= size * 0.75
    assert (balanced[1], balanced["cpu"]) == (10 * size, 7)
    places = list(infer_auto_device_map(model, balanced).values())
    assert 3 <= places.count(0) <= 5
    assert get_balanced_memory(model, {0: 10 * size, 1: 10 * size}, low_zero=True)[0] == 0
    assert get_balanced_memory(model, {0: 10 * size}) == {0: 10 * size}


@on_a_simulated_accelerator
def test_budgets_of_devices_without_memory_info_on_a_simulated_accelerator() -> None:
    with without_memory_information():
        assert list(get_max_memory()) == ["cpu"]
    assert list(get_max_memory()) == [0, 1, "cpu"]


@on_a_simulated_accelerator
def test_budgets_leave_room_for_activations_on_a_simulated_accelerator() -> None:
    free = torch.gpu.mem_get_info(0)[0]  # type: ignore[attr-defined]
    assert get_max_memory()[0] == int(USED_FOR_WEIGHTS * free) < free


def test_memory_that_a_device_shares_with_the_host_is_counted_once_with_a_stand_in_for_mps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(device_map, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(device_map, "shares_host_memory", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for free, budget in ((5000, 900), (500, 450)):
        monkeypatch.setattr(device_map, "free_memory", lambda index, free=free: free)
        assert get_max_memory() == {0: budget, "cpu": 1000 - budget}


def test_sizes() -> None:
    sizes = compute_module_sizes(tied_model())
    assert sizes["embedding"] == 50 * 32 * 4
    assert sizes["head"] == 0, "what is tied counts once"
    assert compute_module_total_buffer_size(Small()) == 40
    assert get_max_layer_size(list(Small().named_children()), compute_module_sizes(Small()), []) == (100, ["linear2"])
    assert [dtype_byte_size(d) for d in (torch.float32, torch.bfloat16, torch.bool)] == [4, 2, 1 / 8]
    assert [dtype_byte_size(d) for d in ("float16", "torch.int8", "uint4")] == [2, 1, 1 / 2]  # type: ignore[arg-type]
    assert find_tied_parameters(SmallTied()) == [["emb.weight", "head.weight"]]
    assert get_non_persistent_buffers(nn.Sequential(Scaled()), recurse=True, fqns=True) == {"0.offset"}
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 1}) == {"a": 0, "d": 1}
    assert clean_device_map({"a.b": 0, "a.c": 0}) == {"": 0}


class Ties(nn.Module):
    """Two modules apart, and a third that shares a tensor with each: their groups become one."""

    def __init__(self, width: int, further: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width, bias=False), nn.Linear(4, further, bias=False)
        self.both = nn.Module()
        self.both.first, self.both.second = self.first.weight, self.second.weight


@pytest.mark.parametrize(("width", "further"), [(8, 2), (2, 8)])
def test_a_group_of_tied_modules_is_as_large_as_its_tensors_and_loads_its_largest_part(
    width: int, further: int
) -> None:
    model = Ties(width, further)
    model.first.register_buffer("ones", torch.ones(3))
    model.second.register_buffer("zeros", torch.zeros(5))
    sizing = device_map._Sizing(dtype=None, special_dtypes={}, whole=frozenset())
    [group] = device_map._groups(model, sizing)
    assert sorted(group.atoms) == ["both", "first", "second"]
    assert group.buffers == 4 * (3 + 5)
    assert group.size == 4 * (4 * (width + further) + 3 + 5)
    assert group.layer == 4 * 4 * (width + further), "the module that reads both weights"
    assert group.layer_without_buffers == group.layer


def test_the_first_part_that_fits_is_found_and_the_rest_is_left() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(2, 2), nn.Linear(10, 10)), nn.Linear(3, 3))
    sizes = compute_module_sizes(model)
    modules = list(model.named_children())

    def found(limit: int, **options: Any) -> tuple[str | None, list[str]]:
        name, _, left = fallback_allocate(modules, sizes, limit, **options)
        return name, [each for each, _ in left]

    assert found(10_000) == ("0", ["1", "2"])
    assert found(sizes["0"]) == ("0", ["1", "2"]), "a limit may be reached"
    assert found(sizes["0"] - 1) == ("1.0", ["0", "1.1", "2"]), "a part of the second"
    assert found(sizes["0"] - 1, no_split_module_classes=["Sequential"]) == ("2", ["0", "1"])
    assert found(10_000, tied_parameters=[["0.weight", "1.0.weight"]]) == ("1.1", ["0", "1.0", "2"])
    assert found(1) == (None, ["0", "1", "2"])


@pytest.mark.parametrize(
    ("tied", "size", "names"),
    [([], 10, []), (["b.weight"], 13, ["b"]), (["b.weight", "c.weight"], 13, ["b", "c"]), (["d.weight"], 10, ["d"])],
)
def test_the_size_of_a_module_with_its_ties_has_shared_tensors_once(
    tied: list[str], size: int, names: list[str]
) -> None:
    sizes = {"b": 8, "b.weight": 5, "c": 4, "c.weight": 4}
    modules = {"b": nn.Linear(1, 1), "c": nn.Linear(1, 1), "d": nn.Linear(1, 1)}  # the size of d is not given
    expected = (size, names, [modules[name] for name in names])
    assert get_module_size_with_ties(tied, 10, sizes, list(modules.items())) == expected
