"""Members that libraries read, write and call are there, of the right kind, on objects made as users make them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    PartialState,
    dispatch_model,
)
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook
from accelerate.utils import CustomDtype, DeepSpeedPlugin, MegatronLMPlugin, TorchDynamoPlugin

from .facts import rows

# (class, member) -> why it is not here.
LEFT_OUT = {
    ("ParallelismConfig", "_validate_accelerator"): "axolotl overwrites it for an axis of experts; prepare() has none",
    ("PartialState", "_prepare_backend"): "unsloth overwrites it; devices and backends are chosen in runtime/device.py",
}
MEMBERS = rows("members_how.tsv")


@cache
def objects(folder: str) -> dict[str, list[Any]]:
    """Return by class what users have; a member may be that of one kind of hook, or of an enum's members."""
    accelerator = Accelerator(cpu=True)
    places: dict[str, Any] = {"0": "cpu", "1": "disk"}
    model = dispatch_model(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), places, main_device="cpu", offload_dir=folder, force_hooks=True
    )
    away: AlignDevicesHook = model[1]._hf_hook  # type: ignore[assignment]
    prepared = accelerator.prepare_model(model)
    deepspeed = DeepSpeedPlugin(zero_stage=3)
    return {
        "Accelerator": [accelerator],
        "AcceleratorState": [accelerator.state],
        "AlignDevicesHook": [away],
        "CustomDtype": [CustomDtype],
        "DDPCommunicationHookType": [DDPCommunicationHookType],
        "DataLoaderConfiguration": [DataLoaderConfiguration()],
        "DeepSpeedPlugin": [deepspeed],
        "DistributedDataParallelKwargs": [DistributedDataParallelKwargs()],
        "DistributedType": [DistributedType, DistributedType.NO],
        "FullyShardedDataParallelPlugin": [FullyShardedDataParallelPlugin()],
        "GradScalerKwargs": [GradScalerKwargs()],
        "HfDeepSpeedConfig": [deepspeed.hf_ds_config],
        "GradientState": [accelerator.gradient_state],
        "MegatronLMPlugin": [MegatronLMPlugin()],
        "ModelHook(_hf_hook)": [away, SequentialHook(away), CpuOffload()],
        "ParallelismConfig": [ParallelismConfig()],
        "PartialState": [PartialState()],
        "TorchDynamoPlugin": [TorchDynamoPlugin()],
        "model-attribute": [prepared, prepared[1]],  # type: ignore[index]
    }


@pytest.fixture(autouse=True)
def state() -> None:
    """Make a state again: it is reset after every test, and an Accelerator has no facts without one."""
    PartialState(cpu=True)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    folder: Path = tmp_path_factory.mktemp("weights")
    yield objects(str(folder))
    objects.cache_clear()


@pytest.mark.parametrize(("owner", "member", "library", "how"), MEMBERS)
def test_members_that_libraries_use(
    owner: str, member: str, library: str, how: str, owners: dict[str, list[Any]]
) -> None:
    if (owner, member) in LEFT_OUT:
        assert not any(hasattr(one, member) for one in owners[owner])
        pytest.skip(LEFT_OUT[owner, member])
    having = [one for one in owners[owner] if hasattr(one, member)]
    assert having, f"{library} uses {owner}.{member}"
    if "call=" in how:
        assert callable(getattr(having[0], member))
    if "write=" in how and not isinstance(having[0], type):
        value = getattr(having[0], member)
        if not callable(value) and not _is_computed(having[0], member):
            setattr(having[0], member, value)


def _is_computed(owner: Any, member: str) -> bool:
    """Tell whether a member is one that libraries overwrite in the class, because it has no setter."""
    found = getattr(type(owner), member, None)
    return isinstance(found, property) and found.fset is None


def test_choices_equal_their_words() -> None:
    for choice in DistributedType:
        assert choice == choice.value
        assert choice.value == str(choice).rpartition(".")[2]
