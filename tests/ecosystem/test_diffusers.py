"""diffusers: training as its example scripts train, and pipelines whose models wait on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sizes import on_two_processes

from .libraries import REPOSITORY, needs_libraries, run_scenario

pytestmark = [needs_libraries]


@on_two_processes
def test_a_unet_is_trained_and_resumed_from_the_latest_checkpoint(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("unet_training", world_size=world_size, directory=tmp_path)
    assert found["checkpoints"] == ["checkpoint-6", "checkpoint-9"], "two are kept"
    assert {"unet", "unet_ema", "optimizer.bin", "scheduler.bin"} < set(found["files"])
    assert "model.safetensors" not in found["files"], "the hook has taken the model out"
    assert found["resumed_losses"] == found["losses"][6:]
    assert (found["resumed_parameters"], found["resumed_average"]) == (0.0, 0.0)
    assert found["learning_rates"][0] == found["learning_rates"][1] < 1e-3
    assert found["losses"][-1] < 0.85 * found["losses"][0]
    assert found["average_moved"] > 0
    assert found["image_shape"] == [1, 8, 8, 1]
    assert found["checkpoints_by_main"] == ["checkpoint-6", "checkpoint-9"], "saved on the main process only"
    assert len(found["resumed_losses_by_main"]) == 4
    assert found["resumed_losses_by_main"] == pytest.approx(found["losses"][6:], rel=0.5)
    assert len(set(found["sums_by_main"])) == 1, "the ranks train one model"
    if world_size == 1:
        assert found["resumed_losses_by_main"] == found["losses"][6:]


@pytest.mark.nightly
def test_a_pipeline_whose_models_wait_on_the_host_makes_the_same_image(tmp_path: Path) -> None:
    found = run_scenario("pipeline_offload", world_size=1, directory=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert found["spread"] > 1e-3, "an image, not a constant"
    assert found["cpu_off_by"] < 1e-5
    for method, waiting in {"enable_model_cpu_offload": "cpu", "enable_sequential_cpu_offload": "meta"}.items():
        assert found[method]["off_by"] == [0.0, 0.0], "as on the device without offload, and again"
        assert found[method]["computed_on"] == ["gpu:0"]
        assert set(found[method]["before"].values()) == set(found[method]["after"].values()) == {waiting}
