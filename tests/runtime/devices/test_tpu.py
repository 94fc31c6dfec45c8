"""Google's TPUs by torch_tpu: a device like any other. Nobody has tried it on the hardware."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.config.launch.settings import LaunchSettings
from meshwright.config.packages import depends_on
from meshwright.launch.plan import make_plan
from meshwright.runtime.devices import device
from tests.ranks import new_pool
from tests.recorded_machines import on_machine
from tests.simulated_accelerator.build import compiled, why_not
from tests.simulated_accelerator.running import _run_where_the_device_is
from tests.simulated_accelerator.training import Results, assert_same, train
from tests.sizes import sized


def install(folder: Path, *needs: str) -> None:
    """Write the metadata of an installed package torch_tpu."""
    metadata = folder / "torch_tpu-0.2.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    requirements = "".join(f"Requires-Dist: {each}\n" for each in needs)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n{requirements}")


@pytest.mark.parametrize(
    ("needs", "is_googles"),
    [(["numpy>=2", "libtpu>=0.0.50"], True), (["numpy"], False), (["libtpu-nightly"], False), ([], False)],
)
def test_googles_package_is_told_from_sophgos_of_the_same_name_by_its_metadata(
    needs: list[str], is_googles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not depends_on("torch_tpu", "libtpu"), "not installed"
    install(tmp_path, *needs)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert depends_on("torch_tpu", "libtpu") is is_googles


def set_tpu_launch_env(*, nnodes: int, nproc_per_node: int) -> None:
    """Do what torch_tpu documents: set variables that are not set, or raise for chips without a topology."""
    topology = {8: "2,4,1", 4: "2,2,1"}.get(nproc_per_node)
    if topology is None:
        raise RuntimeError(f"No TPU topology found for count: {nproc_per_node}")
    addresses = ",".join(f"localhost:{8070 + n}" for n in range(nnodes * nproc_per_node))
    os.environ.update(TORCH_TPU_TOPOLOGY=topology, TORCH_TPU_SLICEBUILDER_ADDRESSES=addresses)


def planned(monkeypatch: pytest.MonkeyPatch, **flags: Any) -> dict[str, str]:
    with on_machine("tpu_v5e_8"), monkeypatch.context() as patch:
        for name in ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES"):
            patch.delenv(name, raising=False)
        module = SimpleNamespace(distributed=SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env))
        patch.setattr(type(device.torch), "_device_module", lambda self: module)
        patch.setattr(device, "_is_googles", lambda: flags.pop("googles", True))
        return make_plan(LaunchSettings.resolve(flags, None), ["train.py"], None).variables


def test_a_launch_hands_on_the_topology_as_documented_not_tried_on_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = planned(monkeypatch)
    assert variables["TORCH_TPU_TOPOLOGY"] == "2,4,1"
    assert len(variables["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) == 8, "one process per chip"
    assert planned(monkeypatch, num_processes=4)["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert planned(monkeypatch, gpu_ids="0,1,2,3")["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    with pytest.raises(ValueError, match=r"cannot run 3 processes .*: No TPU topology found for count: 3"):
        planned(monkeypatch, num_processes=3)
    for other in ({"googles": False}, {"num_processes": 1}, {"cpu": True}):
        assert "TORCH_TPU_TOPOLOGY" not in planned(monkeypatch, **other)


def train_on_its_chip(way: str, cpu: bool) -> Results:
    """Train where torch_tpu has bound this process to a chip, whose number is not that of the rank."""
    if not cpu:
        folder = Path(tempfile.mkdtemp())
        install(folder, "libtpu>=0.0.50")
        sys.path.insert(0, str(folder))
        chip = 1 - int(os.environ["LOCAL_RANK"])
        torch.accelerator.set_device_index(chip)
        found = device.device_for(local_rank=1 - chip, world_size=2, cpu=False, requested=None)
        assert found == torch.device("tpu", chip)
        assert device.distributed_type_of(found) == "MULTI_GPU"
    return train(way, cpu=cpu, steps=sized(gate=2, nightly=20), plugged_in=True)


def test_ddp_and_fsdp2_train_as_on_cpus_on_a_simulated_device_named_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    compiled()
    monkeypatch.setenv("SIMULATED_ACCELERATOR_NAME", "tpu")
    pool = new_pool()
    for way in sized(gate=("fsdp2",), nightly=("ddp2", "fsdp2")):
        found = {}
        for cpu in (True, False):
            job = {"module": __name__, "qualname": "train_on_its_chip", "arguments": {"way": way, "cpu": cpu}}
            found[cpu] = pool.run(2, _run_where_the_device_is, {**job, "devices": 2}, time_limit=200.0)
        for on_tpu, on_cpu in zip(found[False], found[True], strict=True):
            assert_same(on_tpu, on_cpu, rtol=1e-4, atol=1e-4)
    pool.close()
