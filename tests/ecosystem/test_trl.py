"""TRL: SFTTrainer, and its command line, which starts processes through `accelerate.commands`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sizes import on_two_processes

from .libraries import needs_libraries, program, run_command, run_scenario

pytestmark = [needs_libraries]


@on_two_processes
def test_sft_trainer_and_the_command_line(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("sft", world_size=world_size, directory=tmp_path)
    assert found["processes"] == world_size
    assert found["steps"] == [8] * world_size
    assert found["losses"][-1] < 0.8 * found["losses"][0]

    # The same training by `trl sft`, from the model and the data that the scenario has left.
    words = [
        "--model_name_or_path",
        "model",
        "--dataset_name",
        "data",
        "--output_dir",
        "by-command",
        "--max_steps",
        "4",
    ]
    words += ["--per_device_train_batch_size", "4", "--learning_rate", "1e-2", "--max_length", "16", "--bf16", "False"]
    words += ["--use_cpu", "True", "--report_to", "none", "--logging_steps", "1", "--save_steps", "4"]
    words += ["--num_processes", str(world_size), *(["--cpu"] if world_size > 1 else [])]
    run_command(program("trl"), "sft", *words, directory=tmp_path)
    folder = tmp_path / "by-command" / "checkpoint-4"
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert len(list(folder.glob("rng_state*.pth"))) == world_size, "one per process"


def test_its_report_on_the_environment_names_our_version(tmp_path: Path) -> None:
    assert "Accelerate version: 1.15.0+meshwright." in run_command(program("trl"), "env", directory=tmp_path)
