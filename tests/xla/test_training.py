"""One XLA device, and an SPMD mesh of four in one process, for real: torch_xla on its CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import needs_xla, run_command, run_scenario

pytestmark = [needs_xla]

SPECS = {
    "first.weight": "{devices=[4,1]0,1,2,3}",
    "blocks.0.layer.weight": "{devices=[4,1]0,1,2,3}",
    "blocks.1.layer.weight": "{devices=[4,1]0,1,2,3}",
    "head.weight": "{devices=[4,1]0,1,2,3}",
    "head.bias": "{devices=[4]0,1,2,3}",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("one_device", tmp_path_factory.mktemp("xla"))


@pytest.fixture(scope="module")
def spmd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("spmd", tmp_path_factory.mktemp("spmd"), devices=4)


@pytest.mark.parametrize("name", ["fp32", "accumulation", "clipping"])
def test_fifty_steps_have_the_losses_of_plain_torch_on_the_cpu(found: dict[str, Any], name: str) -> None:
    assert found["traces"][name]["off_by"] < 1e-6


@pytest.mark.parametrize("name", ["fp32", "accumulation", "clipping"])
def test_nothing_is_compiled_after_the_third_step(found: dict[str, Any], name: str) -> None:
    assert found["traces"][name]["late"] == 0


def test_bf16_computes_in_bf16_and_keeps_parameters_in_fp32(found: dict[str, Any]) -> None:
    bf16 = found["traces"]["bf16"]
    assert bf16["dtype"] == "torch.float32"
    assert bf16["losses"] != bf16["fp32"]
    assert bf16["losses"] == pytest.approx(bf16["fp32"], rel=0.02)


@pytest.mark.parametrize("name", ["checkpoint", "background"])
def test_a_run_that_resumes_in_the_middle_of_an_epoch_goes_on_exactly(found: dict[str, Any], name: str) -> None:
    assert found["saving"][name] == {
        "weights": True,
        "moments": True,
        "noise": True,
        "losses": True,
        "samples": True,
        "tied": True,
    }


def test_models_are_saved_for_other_tools_with_ties_once(found: dict[str, Any]) -> None:
    saved = found["saving"]["model"]
    assert "first.weight" in saved["names"]
    assert "last.weight" not in saved["names"]
    assert saved["equal"]
    assert saved["plain"]


def test_the_state_is_as_published(found: dict[str, Any]) -> None:
    assert found["state"]["state"] == ["xla:0", "XLA", "xla", 1]
    assert found["state"]["synced"] == [True, False], "after clipping, and after the step"
    assert found["state"]["available"] == [True, False], "torch_xla is there, and no TPU"
    assert found["saving"]["objects"] == [1, 2]


def test_an_evaluation_is_a_graph_per_batch(found: dict[str, Any]) -> None:
    assert found["evaluation"]["count"] == 48
    assert found["evaluation"]["graphs"] <= 3, "of 6 batches"
    assert 0 < found["evaluation"]["mean"] < 1


def test_a_shape_that_changes_in_every_step_is_named_once(found: dict[str, Any]) -> None:
    (warning,) = found["shapes"]
    assert "XLA compiled a new graph in 5 of the last 5 steps" in warning
    assert "batch['words'] had (6, 1), (7, 1), (8, 1), (9, 1)" in warning


def test_what_xla_cannot_do_is_refused_by_name(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "cannot compute in torch.float16: use mixed_precision bf16" in refused["fp16"]
    assert "XLA with mixed_precision='fp8'" in refused["fp8"]
    assert "XLA compiles every step as a whole" in refused["compile"]


def test_processes_that_xla_does_not_see_are_refused(found: dict[str, Any]) -> None:
    reason = found["refused"]["torchrun"]
    assert "Rank 1: torchrun has started 2 processes, and XLA sees 1 on CPU" in reason
    assert "each would train alone, as rank 0 of 1" in reason


def test_xla_can_be_switched_off(found: dict[str, Any]) -> None:
    assert found["switched_off"] == ["cpu False", "cpu True"], "USE_TORCH_XLA=0, and cpu=True"


@pytest.mark.nightly
def test_torchrun_over_xla_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from accelerate import Accelerator\nAccelerator()\n")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0")
    ended = run_command(*launcher, str(script), directory=tmp_path)
    assert ended.returncode != 0
    assert "torchrun has started 2 processes, and XLA sees 1 on CPU" in ended.stderr


def test_four_devices_have_the_losses_of_one(found: dict[str, Any], spmd: dict[str, Any]) -> None:
    one_device = found["traces"]["losses"]
    assert spmd["sharded"]["losses"] == pytest.approx(one_device, abs=1e-5)
    assert spmd["copies"]["hybrid"][0] == pytest.approx(one_device, abs=1e-5)
    assert spmd["copies"]["copies"][0] == pytest.approx(one_device, abs=1e-5)
    assert spmd["sharded"]["late"] == 0, "compilations after the third step"


def test_weights_and_optimizer_state_are_sharded(spmd: dict[str, Any]) -> None:
    assert spmd["sharded"]["specs"] == SPECS
    assert spmd["sharded"]["moments"] == SPECS
    assert spmd["copies"]["hybrid"][1] == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert spmd["copies"]["copies"][1] == "{replicated}"


def test_names_are_those_of_the_model_and_the_state_is_as_published(spmd: dict[str, Any]) -> None:
    sharded = spmd["sharded"]
    assert sharded["names"] == [*list(SPECS)[:3], "last.weight", *list(SPECS)[3:]]
    assert (sharded["type"], sharded["processes"]) == ("XLA", 1)
    assert sharded["plugin"] == "FullyShardedDataParallelPlugin"


def test_a_sharded_run_resumes_in_the_middle_of_an_epoch(spmd: dict[str, Any]) -> None:
    resumed = spmd["sharded"]["resumed"]
    assert resumed["weights"]
    assert resumed["moments"]
    assert resumed["samples"]
    assert resumed["specs"] == SPECS
    assert resumed["moment_specs"] == SPECS
    assert resumed["losses"][1] == pytest.approx(resumed["losses"][0], abs=1e-7)


def test_what_a_mesh_of_xla_devices_does_not_have_is_refused_by_name(spmd: dict[str, Any]) -> None:
    refused = spmd["refused"]
    assert "XLA with tp_size=4 cannot be used" in refused["tp"]
    assert "the run has 4" in refused["sizes"]
    assert "FullyShardedDataParallelPlugin(cpu_offload=...) on XLA" in refused["offload"]
    assert "is in DataParallel" in refused["wrapped"]
    assert "asks for the SPMD mesh (dp_replicate=1, fsdp=4) of XLA devices" in refused["wrapped"]
