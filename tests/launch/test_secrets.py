"""Keys and passwords of other services stay in the environment: no log, record, checkpoint or report has them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clusters.machines import ACCELERATE
from tests.timing import limit

SECRETS = {
    name: f"hidden-{name.lower()}"
    for name in (
        "WANDB_API_KEY", "COMET_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD",
        "AIM_ACCESS_TOKEN", "MESHWRIGHT_LAUNCH_SECRET",
    )
}  # fmt: skip
TRAINS = """
import os, torch
from meshwright import Accelerator, ProjectConfiguration

accelerator = Accelerator(
    cpu=True,
    log_with="jsonl",
    project_config=ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True),
)
accelerator.init_trackers("secrets", config={"lr": 0.1})
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.log({"loss": 1.0}, step=1)
accelerator.save_state()
assert "MESHWRIGHT_LAUNCH_SECRET" not in os.environ
assert os.environ["HF_TOKEN"].startswith("hidden")
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    raise RuntimeError("the batch is broken")
accelerator.end_training()
"""


def said_by(folder: Path, *words: str) -> str:
    """Return the output of a command."""
    env = {**os.environ, **SECRETS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*ACCELERATE, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=limit(200)
    )
    return done.stdout + done.stderr


def test_secrets_of_the_environment_are_written_nowhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "log").mkdir()
    run = ("launch", "--cpu", "--num_processes", "2")
    said = [said_by(tmp_path, *run, "--log_dir", "log", "train.py"), said_by(tmp_path, *run, "--explain", "train.py")]
    assert "the batch is broken" in said[0]
    said += [said_by(tmp_path, "report", "project", "--output", "report.html"), said_by(tmp_path, "env")]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "commit.json", "model.safetensors", "report.html"} <= {path.name for path in written}
    for text in (*(each.encode() for each in said), *(path.read_bytes() for path in written)):
        assert [name for name, secret in SECRETS.items() if secret.encode() in text] == []
