"""Errors that other libraries and their tests know by type and by a phrase: both are kept, in our own sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate import Accelerator, AutocastKwargs, PartialState, notebook_launcher
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    BnbQuantizationConfig,
    GradientAccumulationPlugin,
    check_device_map,
    compare_versions,
    convert_file_size_to_int,
    find_executable_batch_size,
    set_module_tensor_to_device,
)
from tests.ranks import ranks
from tests.training import make_model

MISUSES: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "Unsupported logging capability: foo.": (lambda: Accelerator(log_with="foo"), ValueError),
    "requires a `logging_dir`": (lambda: Accelerator(log_with="tensorboard"), ValueError),
    "missing the following required attributes": (type("Half", (GeneralTracker,), {}), NotImplementedError),
    "Unknown mixed_precision mode: fp17": (lambda: Accelerator(mixed_precision="fp17"), ValueError),
    "You can only pass one AutocastKwargs in `kwargs_handlers`": (
        lambda: Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()]),
        ValueError,
    ),
    "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`": (
        lambda: Accelerator(
            gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2)
        ),
        ValueError,
    ),
    "`fsdp_plugin` must be a FullyShardedDataParallelPlugin object": (lambda: Accelerator(fsdp_plugin=3), TypeError),
    "`device_placement` should be a list with 1 elements": (
        lambda: Accelerator(cpu=True).prepare(make_model(), device_placement=[True, False]),
        ValueError,
    ),
    "Item at index 1, `str`": (lambda: Accelerator().register_for_checkpointing(make_model(), "x"), ValueError),
    "DeepSpeed is not enabled": (lambda: AcceleratorState(cpu=True).get_deepspeed_plugin("teacher"), ValueError),
    "does not give any device for": (lambda: check_device_map(nn.Linear(2, 2), {"bias": "cpu"}), ValueError),
    "Trying to set a tensor of shape": (
        lambda: set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", value=torch.ones(3)),
        ValueError,
    ),
    "weight is on the meta device": (
        lambda: set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), "weight", "cpu"),
        ValueError,
    ),
    "is not in a valid format": (lambda: convert_file_size_to_int("5 potatoes"), ValueError),
    "`operation` must be one of": (lambda: compare_versions("torch", "~", "2"), ValueError),
    "can't be both False": (BnbQuantizationConfig, ValueError),
    "Batch size was passed into `fit` as the first argument when called": (lambda: fit(4, "data"), TypeError),
    "call `fit(data='data')`": (lambda: fit(4, "data"), TypeError),
    "the batch size (3) needs to be a round multiple of the number of processes (2)": (
        lambda: BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 3, False), 2, 0, split_batches=True),
        ValueError,
    ),
    "batch size (5) needs to be a round multiple": (
        lambda: IterableDatasetShard(DataLoader([1]), batch_size=5, num_processes=2, split_batches=True),
        ValueError,
    ),
}


@find_executable_batch_size
def fit(batch_size: int, data: str) -> None:
    """Train."""


@pytest.mark.parametrize("phrase", MISUSES)
def test_what_is_known_of_an_error_is_in_it(phrase: str) -> None:
    misuse, kind = MISUSES[phrase]
    with pytest.raises(kind) as caught:
        misuse()
    assert phrase in str(caught.value)


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"some parameters are on the meta device.*weight, bias"):
        Accelerator(cpu=True).save_model(nn.Linear(2, 2, device="meta"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_model_over_several_devices_cannot_be_copied_to_every_process() -> None:
    model = make_model()
    model.hf_device_map = {"0": 0, "1": 1}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="`device_map='auto'` in any distributed mode"):
        Accelerator(cpu=True).prepare(model)


def test_a_launch_from_a_process_with_a_state_is_a_value_error() -> None:
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="`Accelerator` should only be initialized inside your training function"):
        notebook_launcher(print, num_processes=2)


@pytest.mark.parametrize("state", [PartialState, AcceleratorState])
def test_a_state_that_was_reset_has_no_facts_and_says_why(state: type[PartialState]) -> None:
    accelerator = Accelerator(cpu=True)
    here = state(cpu=True)
    assert here.num_processes == 1
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("device", "num_processes", "distributed_type"):
        assert not hasattr(here, name)
    with pytest.raises(AttributeError, match=rf"`{state.__name__}` object has no attribute `device`. This happens if"):
        _ = here.device
    assert repr(accelerator).startswith("Accelerator(rank 0 of 1 on cpu")
    with pytest.raises(AttributeError, match="has no attribute 'others'"):
        _ = here.others
    assert not here.initialized
    PartialState(cpu=True)
    assert here.num_processes == 1
