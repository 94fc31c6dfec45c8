"""A training script in which processes die inside of collectives: `exchanging.py FOLDER`.

Before a scenario all members agree on who dies in it. Every survivor writes what it got.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, broadcast as broadcast_tensors, synchronize_rng_states
from meshwright.errors import ReplicaLostError

folder = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
recovery = accelerator.recovery
assert recovery is not None
member, runtime = recovery.member, accelerator.state._runtime
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=1, shuffle=True)
examined = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=1)
model, optimizer, loader, examined = accelerator.prepare(model, optimizer, loader, examined)
next_scenario = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
accelerator.register_for_checkpointing(holder := torch.nn.ParameterDict({"next": next_scenario}))
accelerator.resume()
name = f"{member.rank}_{member.incarnation}"


def die_as(rank: int) -> None:
    if member.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def gather(victim: int) -> object:
    die_as(victim)
    return accelerator.gather(torch.tensor([float(member.rank)])).tolist()


def lose_another_in_the_agreement(victim: int) -> object:
    """While the survivors agree on who is left, one of them dies."""
    if member.rank == member.members[-2]:
        member._agree_at = lambda *_: die_as(member.rank)  # type: ignore[method-assign, assignment]
    return gather(victim)


def lose_another_in_the_connection(victim: int) -> object:
    """The survivors have agreed, and one of them dies before they are connected."""
    if member.rank == member.members[-2]:
        runtime._open_default_group = lambda *_: die_as(member.rank)  # type: ignore[method-assign]
    return gather(victim)


def reduce_late(victim: int) -> object:
    """One survivor does not get the result that all others have."""
    attempts = []

    def collective() -> float:
        attempts.append(1)
        total = torch.ones(())
        dist.all_reduce(total)
        dist.barrier()  # the victim must not die while others need it
        die_as(victim)
        if member.rank == late and len(attempts) == 1:
            raise RuntimeError("the connection was lost")
        return float(total)

    late = member.members[1]
    return {"sum": runtime.run_collective(collective), "attempts": len(attempts), "late": member.rank == late}


def barrier(victim: int) -> object:
    die_as(victim)
    accelerator.wait_for_everyone()
    return accelerator.num_processes


def broadcast(victim: int) -> object:
    source = member.members.index(victim)
    die_as(victim)
    return broadcast_tensors(torch.ones(1), from_process=source).tolist()


def synchronize(victim: int) -> object:
    """The first rank is lost, whose generator all others would get."""
    die_as(victim)
    synchronize_rng_states(["torch"])
    states = accelerator.gather(torch.get_rng_state()[None])
    return bool((states == states[0]).all())


def evaluate_in_two_calls(victim: int) -> object:
    for number, (inputs,) in enumerate(examined):
        accelerator.gather_for_metrics(inputs)
        if number == 0:
            die_as(victim)
        accelerator.gather_for_metrics(inputs * 2)
    return "not reached"


def evaluate_alone(victim: int) -> object:
    total = sum(inputs.sum() for (inputs,) in examined)
    die_as(victim)
    return accelerator.reduce(total, "sum").tolist()


def evaluate(victim: int) -> object:
    seen: list[float] = []
    for number, (inputs,) in enumerate(examined):
        if number == 1:
            die_as(victim)
        seen += accelerator.gather_for_metrics((inputs, inputs))[0].flatten().tolist()
    return sorted(seen)


def save(victim: int) -> object:
    def hook(*_: object) -> None:
        die_as(victim)

    handle = accelerator.register_save_state_pre_hook(hook)
    path = accelerator.save_state(str(folder / "checkpoint"))
    handle.remove()
    return sorted(os.listdir(path))


SCENARIOS = [
    lose_another_in_the_agreement,
    gather,
    lose_another_in_the_connection,
    reduce_late,
    barrier,
    broadcast,
    synchronize,
    evaluate_in_two_calls,
    evaluate_alone,
    evaluate,
    save,
]

while int(next_scenario) < len(SCENARIOS):
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        scenario = SCENARIOS[int(next_scenario)]
        victims = 2 if scenario.__name__.startswith("lose_another") else 1
        if not accelerator.sync_gradients or accelerator.num_processes < 2 + victims:
            continue
        victim = member.members[0 if scenario in (save, synchronize) else -1]
        next_scenario += 1
        try:
            found: object = scenario(victim)
        except ReplicaLostError as error:
            found = f"{type(error).__name__}: {error}"
        with open(folder / f"{scenario.__name__}_{name}", "w") as file:
            json.dump({"found": found, "members": member.members, "victim": victim}, file)
        if int(next_scenario) == len(SCENARIOS):  # before a replacement joins that would not begin the loop
            break
accelerator.check_replicas()
