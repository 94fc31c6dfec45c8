"""Train with torchft: a replica group of one process, started by a torchrun of its own.

The position in the data is the step that the groups have agreed on. So a group that comes back, and survivors whose
step was discarded, take up the data where the others are; samples of a group that is away are lost.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.kills import task

replica = int(os.environ["REPLICA_GROUP_ID"])
model = task.make_model()
plain = task.make_optimizer(model)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), plain.load_state_dict(state["optimizer"])),
    state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
    replica_id=f"replica_{replica}_",
    timeout=timedelta(seconds=30),
    init_sync=False,  # all begin with the same weights
)
optimizer = Optimizer(manager, plain)
log = task.Log(replica)
task.wait_for_all()  # else the first one trains alone until the others are there
per_epoch = task.SAMPLES // (task.REPLICAS * task.SHARE)

while (step := manager.current_step()) < task.num_steps:
    inputs, targets, numbers = task.batch_of(step, replica)
    optimizer.zero_grad()  # starts the quorum
    task.loss_of(model, inputs, targets).backward()
    # Its DistributedDataParallel (0.2.0, with torch 2.13 on gloo) ends the survivors by an assertion in its hook.
    for work in [manager.allreduce(param.grad) for param in model.parameters()]:
        work.wait()
    heals = not manager.is_participating()  # it contributes zeros while it takes the state of another one
    optimizer.step()  # unless an error came
    if (made := manager.current_step()) > step:
        taken = [] if heals else [(step // per_epoch, number) for number in numbers.tolist()]
        log.add(made, taken)
log.end(model)
manager.shutdown()
