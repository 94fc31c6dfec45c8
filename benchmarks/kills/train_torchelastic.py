"""Train under torchrun: a lost process restarts all, which go on from the last checkpoint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kills import task

STEPS_PER_CHECKPOINT = 20

dist.init_process_group("gloo")
rank = dist.get_rank()
model = task.make_model()
optimizer = task.make_optimizer(model)
file = task.folder / "checkpoint"
step = 0
if file.exists():
    state = torch.load(file)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
replicated = DistributedDataParallel(model)
log = task.Log(rank)
per_epoch = task.SAMPLES // (task.REPLICAS * task.SHARE)

while step < task.num_steps:
    inputs, targets, numbers = task.batch_of(step, rank)
    task.loss_of(replicated, inputs, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    log.add(step + 1, [(step // per_epoch, number) for number in numbers.tolist()])
    step += 1
    if step % STEPS_PER_CHECKPOINT == 0 and rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
log.end(model)
dist.destroy_process_group()
