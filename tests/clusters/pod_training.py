"""What the pods of the tests train: a checkpoint after every step, and places where they wait to be interrupted."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, ProjectConfiguration, set_seed


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def wait_for_an_interruption(step: int) -> None:
    """Stay at this step until the pods are ended; the test writes the file `passed` before it starts them again."""
    while not Path(f"passed.{step}").exists():
        accelerator.save_if_preempted()
        if accelerator.is_main_process:
            Path(f"waiting.{step}").touch()
        accelerator.wait_for_everyone()  # fails where another pod was killed
        time.sleep(0.05)


project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
set_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
accelerator.resume()
accelerator.print(f"{accelerator.num_processes} processes begin after step {progress.step}", flush=True)
while progress.step < 12:
    for (batch,) in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if accelerator.is_main_process:
            with Path("steps").open("a") as steps:
                steps.write(f"{progress.step}\n")
        if progress.step in (4, 8):
            wait_for_an_interruption(progress.step)
        accelerator.save_state()
accelerator.print(f"ended after step {progress.step}")
accelerator.end_training()
