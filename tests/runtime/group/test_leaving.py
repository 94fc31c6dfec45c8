"""Process groups are closed at the end of a script, can be opened again, and are no business of forked children."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from meshwright import Accelerator, ParallelismConfig
from tests.launching import run_script
from tests.parallel import ways
from tests.parallel.small_transformer import TP_PLAN, loader, loss_of, model
from tests.ranks import new_pool, run_on_ranks
from tests.ranks.worker import forget_everything
from tests.simulated_accelerator import run_on_a_simulated_accelerator

SCRIPT = """
import atexit, os
import psutil
import torch
import torch.distributed as dist

# Runs last:
atexit.register(lambda: os.getpid() == trainer and print(f"open at exit: {dist.is_initialized()}\\n", end=""))
trainer = os.getpid()

from meshwright import Accelerator

for training in range(3):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.full((2, 4), float(accelerator.process_index))).sum())
    optimizer.step()
    weights = accelerator.gather(model.module.weight.detach())
    print(f"training {training} {bool((weights == weights[0]).all())}\\n", end="")
    if training < 2:
        accelerator.end_training()
        print(f"open after the end: {dist.is_initialized()}\\n", end="")
    elif os.fork() == 0:
        atexit._run_exitfuncs()
        os._exit(0)  # torch's groups do not survive the end of a forked interpreter
    else:
        os.wait()
        accelerator.wait_for_everyone()
"""


def test_a_script_opens_its_group_again_and_closes_it_at_exit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = run_script(tmp_path / "train.py", world_size=2, directory=tmp_path)
    for training in range(3):
        assert printed.count(f"training {training} True") == 2
    assert printed.count("open after the end: False") == 4
    assert printed.count("open at exit: False") == 2


class CollectsGarbage(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def read_data_beside_garbage() -> int:
    gc.disable()
    model = Accelerator(cpu=True).prepare(nn.Linear(2, 2))
    model.itself = [model]
    model(torch.ones(1, 2)).sum().backward()
    del model
    forget_everything()
    batches = list(DataLoader(CollectsGarbage(), num_workers=1))
    gc.enable()
    return len(batches)


def test_a_data_worker_does_not_free_the_group_of_an_earlier_training() -> None:
    for _ in range(3):
        assert run_on_ranks(2, read_data_beside_garbage) == [4, 4]


GROUP_OF_THE_SCRIPT = """
import gc, os
import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # while a group is open, its default arguments would keep it
from torch.utils.data import DataLoader
from meshwright import Accelerator, PartialState

def train():
    dist.init_process_group("gloo")
    model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    model.itself = [model]
    model(torch.ones(1, 2)).sum().backward()
    PartialState._reset_state()
    dist.destroy_process_group()

os.register_at_fork(after_in_child=lambda: [[] for _ in range(400_000)])  # a library that makes the collector run
gc.set_threshold(300_000)
train()
batches = list(DataLoader([1, 2], num_workers=1, worker_init_fn=lambda _: gc.collect()))
print(f"{len(batches)} batches, {gc.isenabled()}\\n", end="")
"""


def test_nor_does_it_free_a_group_that_the_script_opened_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROUP_OF_THE_SCRIPT)
    printed = run_script(tmp_path / "train.py", world_size=2, directory=tmp_path)
    assert printed.count("2 batches, True") == 2


def close_a_mesh_and_fork() -> int:
    """Return how a child ends that was forked while only a cache of another thread held the mesh."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_plan=TP_PLAN))
    net = accelerator.prepare(model())
    inputs, targets = next(iter(loader(2)))
    device = accelerator.device
    accelerator.backward(loss_of(net(inputs.to(device)), targets.to(device)))  # in a thread of autograd for the device
    del net, accelerator
    forget_everything()
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0)
    for _ in range(2000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def test_a_forked_child_does_not_free_a_closed_mesh_of_another_thread_on_a_simulated_accelerator() -> None:
    assert run_on_a_simulated_accelerator(close_a_mesh_and_fork, world_size=2, in_new_processes=True) == [0, 0]


def train_on_a_mesh_and_end(way: str) -> int:
    ways.run(way, steps=1)
    forget_everything()
    gc.collect()
    return psutil.Process().num_threads()


@pytest.mark.parametrize("way", ["fsdp2xtp2", "fsdp2xcp2"])
def test_a_closed_mesh_keeps_no_groups_with_threads_that_wake_up(way: str) -> None:
    pool = new_pool()
    threads = pool.run(4, train_on_a_mesh_and_end, {"way": way})
    pool.close()
    assert max(threads) < 12, "each of the mesh's many groups would keep three"


def train_twice_after_ranks_called_different_collectives() -> float:
    accelerator = Accelerator(cpu=True)
    group = dist.new_group(timeout=timedelta(seconds=60))
    if accelerator.is_main_process:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    else:
        dist.broadcast(torch.ones(1), src=0, group=group, async_op=True)
    del group
    accelerator.end_training()
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    started = time.monotonic()
    accelerator.end_training()  # frees the group of the first training
    return time.monotonic() - started


def test_a_collective_that_never_completed_does_not_hold_the_next_training() -> None:
    pool = new_pool()
    seconds = pool.run(2, train_twice_after_ranks_called_different_collectives, {})
    pool.close()
    assert max(seconds) < 30
