"""Every method is called on rank 0 only, and waits for the others if and only if docs/ranks.md says so."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, FullyShardedDataParallelPlugin, GeneralTracker
from tests.ranks import run_on_ranks
from tests.ranks.pool import REPOSITORY

ANY, MAIN, ALL = "any rank", "main rank", "all ranks"
SECONDS_BEFORE_OTHERS_COME = 0.3


class OwnTracker(GeneralTracker):
    name = "own"
    requires_logging_directory = False
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...


class Run:
    """Something of everything that a method may be called with."""

    def __init__(self, sharded: bool, folder: Path) -> None:
        self.folder = folder
        plugin = FullyShardedDataParallelPlugin() if sharded else None
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, log_with=OwnTracker())
        self.accelerator.init_trackers("project")
        self.plain = nn.Linear(4, 4)
        model = nn.Linear(4, 4)
        loader = DataLoader(torch.randn(8, 4), batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.loss = self.forward().square().mean()
        self.accelerator.backward(self.loss)
        self.accelerator.save_state(folder / "saved")

    def forward(self) -> Any:
        return self.model(torch.ones(2, 4))

    def in_turn(self, turn: Any) -> None:
        with turn:
            pass


# Method -> what is done with it. "the forward pass" stands for no method, and is done with `backward`.
CALLS: dict[str, Callable[[Run], Any]] = {
    "print": lambda run: run.accelerator.print("hello"),
    "log": lambda run: run.accelerator.log({"loss": 1.0}, step=1),
    "get_tracker": lambda run: run.accelerator.get_tracker("own"),
    "init_trackers": lambda run: run.accelerator.init_trackers("project"),
    "unwrap_model": lambda run: run.accelerator.unwrap_model(run.model),
    "save": lambda run: run.accelerator.save({"a": 1}, run.folder / "a.bin"),
    "skip_first_batches": lambda run: run.accelerator.skip_first_batches(run.loader, 1),
    "register_for_checkpointing": lambda run: run.accelerator.register_for_checkpointing(),
    "register_save_state_pre_hook": lambda run: run.accelerator.register_save_state_pre_hook(print).remove(),
    "register_load_state_pre_hook": lambda run: run.accelerator.register_load_state_pre_hook(print).remove(),
    "set_trigger": lambda run: run.accelerator.set_trigger(),
    "split_between_processes": lambda run: run.in_turn(run.accelerator.split_between_processes([1, 2])),
    "clip_grad_value_": lambda run: run.accelerator.clip_grad_value_(run.model.parameters(), 1.0),
    "get_state_dict": lambda run: run.accelerator.get_state_dict(run.model),
    "save_model": lambda run: run.accelerator.save_model(run.model, run.folder / "model"),
    "clip_grad_norm_": lambda run: run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0),
    "save_state": lambda run: run.accelerator.save_state(run.folder / "state"),
    "backward": lambda run: run.accelerator.backward(run.forward().mean()),
    "load_state": lambda run: run.accelerator.load_state(run.folder / "saved"),
    "resume": lambda run: run.accelerator.resume(run.folder / "saved"),
    "save_if_preempted": lambda run: run.accelerator.save_if_preempted(),
    "gather": lambda run: run.accelerator.gather(torch.ones(1)),
    "gather_for_metrics": lambda run: run.accelerator.gather_for_metrics(torch.ones(1)),
    "reduce": lambda run: run.accelerator.reduce(torch.ones(1)),
    "pad_across_processes": lambda run: run.accelerator.pad_across_processes(torch.ones(1)),
    "check_trigger": lambda run: run.accelerator.check_trigger(),
    "wait_for_everyone": lambda run: run.accelerator.wait_for_everyone(),
    "prepare of optimizers and schedulers": lambda run: run.accelerator.prepare(
        torch.optim.SGD(run.accelerator.unwrap_model(run.model).parameters(), lr=0.1)
    ),
    "prepare of models and loaders": lambda run: run.accelerator.prepare(DataLoader(torch.randn(8, 4))),
    "weights": lambda run: list(run.accelerator.weights(run.model)),
    "free_memory": lambda run: run.accelerator.free_memory(),
    "end_training": lambda run: run.accelerator.end_training(),
}


def table() -> dict[str, tuple[str, str]]:
    """Return what the page says: method -> who calls it under DDP, and where a model is spread."""
    said: dict[str, tuple[str, str]] = {}
    for line in (REPOSITORY / "docs" / "ranks.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in (ANY, MAIN, ALL):
            kind = re.fullmatch(r"`\w+`( of .*)", cells[0])
            for method in re.findall(r"`(\w+)`", cells[0]):
                said[method + (kind[1] if kind else "")] = (cells[1], cells[2])
    return said


def call_as_the_page_says(sharded: bool, folder: Path) -> list[str]:
    """Call every method: on rank 0 only, or on rank 0 first. Return those that did not wait and should have."""
    run = Run(sharded, folder)
    main = run.accelerator.is_main_process
    store = run.accelerator.state._runtime.store("calls")
    did_not_wait = []
    for name, call in CALLS.items():
        run.accelerator.wait_for_everyone()
        if table()[name][sharded] != ALL:
            if main:
                call(run)  # the world runs out of time if this waits for the others
        elif main:
            call(run)
            did_not_wait += [name] * (not store.check([name]))
        else:
            time.sleep(SECONDS_BEFORE_OTHERS_COME)
            store.set(name, "here")
            call(run)
    return did_not_wait


def test_the_page_names_every_method_that_is_called_here() -> None:
    # In the main process's turn only the others wait.
    assert set(table()) == {*CALLS, "main_process_first", "local_main_process_first"}


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_rank_zero_waits_for_the_others_where_the_page_says_so_and_nowhere_else(sharded: bool, tmp_path: Path) -> None:
    did_not_wait = run_on_ranks(2, call_as_the_page_says, sharded=sharded, folder=tmp_path)[0]
    assert did_not_wait == []
