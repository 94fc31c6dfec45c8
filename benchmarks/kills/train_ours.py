"""Train under `meshwright launch --survive`."""

from __future__ import annotations

import os

from torch.utils.data import DataLoader

from benchmarks.kills import task
from meshwright import Accelerator, DataLoaderConfiguration

config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
accelerator = Accelerator(cpu=True, dataloader_config=config)
model = task.make_model()
optimizer = task.make_optimizer(model)
loader = DataLoader(task.data, batch_size=task.SHARE, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
log = task.Log(int(os.environ["RANK"]))
samples: list[tuple[int, int]] = []

epoch = loader.iteration
while optimizer.steps_taken < task.num_steps:
    for inputs, targets, numbers in loader:
        if loader.weight:
            samples += [(epoch, number) for number in numbers.tolist()]
        accelerator.backward(task.loss_of(model, inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            log.add(optimizer.steps_taken, samples)
            samples.clear()
    epoch += 1
log.end(model)
