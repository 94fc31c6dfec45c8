"""SwanLab: its own tracker for accelerate, offline."""

from __future__ import annotations

import torch
from swanlab.integration.accelerate import SwanLabTracker
from tiny import report

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

tracker = SwanLabTracker(project="digits", experiment_name="first", mode="offline", log_dir="swanlog")
accelerator = Accelerator(cpu=True, log_with=tracker)
accelerator.init_trackers("digits", config={"lr": 0.1, "batch_size": 4})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    loss = model(torch.ones(4, 2)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), "five": 5.0}, step=step)
report(
    name=str(accelerator.get_tracker("swanlab").name),
    is_tracker=isinstance(tracker, GeneralTracker),
    processes=accelerator.num_processes,
)
accelerator.end_training()
