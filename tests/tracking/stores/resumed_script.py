"""Log to the trackers named on the command line, save, and be killed; started again, resume and go on to the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from meshwright import Accelerator, ProjectConfiguration
from tests.tracking.stores.script import OPTIONS

SAVED_AFTER, KILLED_AFTER, LAST = 4, 7, 9


class Progress:
    """The steps that were done."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on."""
        self.done = state["done"]


def main(names: list[str]) -> None:
    """Log `loss` = the step + 100 per start."""
    starts = len(list(Path().glob("start-*.json")))
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True, logging_dir="runs")
    accelerator = Accelerator(log_with=names, project_config=project, cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    options = {name: options for name, options in OPTIONS.items() if name in names}
    resumed = accelerator.resume()
    accelerator.init_trackers("shapes", config={"lr": 0.5}, init_kwargs=options)
    identities = {tracker.name: dict(tracker.run_identity()) for tracker in accelerator.trackers}
    Path(f"start-{starts}.json").write_text(json.dumps({"resumed": str(resumed or ""), "runs": identities}))
    while progress.done <= LAST:
        step = progress.done
        accelerator.backward(model(torch.ones(1)).sum())
        optimizer.step()
        accelerator.log({"loss": 100.0 * starts + step}, step=step)
        progress.done += 1
        if step == SAVED_AFTER:
            accelerator.save_state()
        if step == KILLED_AFTER and not resumed:
            accelerator.trackers  # noqa: B018  waits until the trackers have what was logged
            os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
