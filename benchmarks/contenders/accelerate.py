"""The Accelerate interface: ours, and accelerate 1.15."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState

from ..task import ACCUMULATION, loss_of
from . import SavedState

DISTRIBUTION = "accelerate"
IS_OURS = "wait" in inspect.signature(Accelerator.save_state).parameters
IMPORT = "from accelerate import Accelerator"
CONSTRUCT = "Accelerator(cpu=True)"
COMMAND = Path(sys.executable).with_name("accelerate")
ANSWERS = {
    "the command's --help": [COMMAND, "--help"],
    "the launcher's --help": [COMMAND, "launch", "--help"],
    "config default": [COMMAND, "config", "default"],
}
PRECISIONS = ("no", "bf16", "fp16") if IS_OURS else ("no", "bf16")  # 1.15 computes fp16 in fp32 on a CPU


def accelerator(**options: Any) -> Accelerator:
    """Make an Accelerator that shares no settings with an earlier one, in any version of the library."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def steps(
    net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any], precision: str = "no", **options: Any
) -> Iterator[None]:
    """Train for ever; yield after every step."""
    accelerate = accelerator(mixed_precision=precision, **options)
    net, optimizer, batches = accelerate.prepare(net, optimizer, batches)
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def windows(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Accumulate for ever; yield after every window."""
    accelerate = accelerator(gradient_accumulation_steps=ACCUMULATION)
    net, optimizer, batches = accelerate.prepare(net, optimizer, batches)
    while True:
        for inputs, labels in batches:
            with accelerate.accumulate(net):
                loss = loss_of(net(inputs), labels)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerate.sync_gradients:
                yield


def sharded_steps(net: nn.Module, make_optimizer: Callable[..., Optimizer], batches: DataLoader[Any]) -> Iterator[None]:
    """Train by FSDP2, one unit per block."""
    from meshwright import FullyShardedDataParallelPlugin

    if IS_OURS:
        plugin = FullyShardedDataParallelPlugin()
    else:  # it has to be told the version and what a unit is
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    return steps(net, make_optimizer(net.parameters()), batches, fsdp_plugin=plugin)


def evaluation(net: nn.Module, batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Predict for ever; yield the predictions and labels of all processes."""
    accelerate = accelerator()
    net, batches = accelerate.prepare(net, batches)
    net.eval()
    while True:
        for inputs, labels in batches:
            with torch.no_grad():
                predictions = net(inputs).argmax(dim=-1)
            yield accelerate.gather_for_metrics((predictions, labels))


def prepared(batches: DataLoader[Any], **options: Any) -> Any:
    """Return the prepared loader."""
    return accelerator(**options).prepare(batches)


def saved_state(net: nn.Module, optimizer: Optimizer) -> SavedState:
    """Save by `save_state`; in the background, where it has that."""
    accelerate = accelerator()
    net, optimizer = accelerate.prepare(net, optimizer)
    _train_on(accelerate, net, optimizer, next(net.parameters()).new_ones(2, next(net.parameters()).shape[-1]))
    if not IS_OURS:
        return SavedState(save=accelerate.save_state, load=accelerate.load_state)
    return SavedState(
        save=accelerate.save_state,
        load=accelerate.load_state,
        save_in_background=lambda folder: accelerate.save_state(folder, wait=False),
        wait=accelerate.checkpointer.wait,
    )


def train_and_save(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> None:
    """Train on the first batches and save."""
    accelerate = accelerator()
    net, optimizer, loader = accelerate.prepare(net, optimizer, loader)
    for index, (inputs, labels) in enumerate(loader, start=1):
        _train_on(accelerate, net, optimizer, inputs, labels)
        if index == batches:
            break
    accelerate.save_state(folder / "state")


def resume(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> Tensor:
    """Load and train on the next batch; ours is there once it has resumed, 1.15 is told how many to skip."""
    accelerate = accelerator()
    net, optimizer, loader = accelerate.prepare(net, optimizer, loader)
    if IS_OURS:
        accelerate.resume(folder / "state")
    else:
        accelerate.load_state(folder / "state")
        loader = accelerate.skip_first_batches(loader, batches)
    inputs, labels = next(iter(loader))
    _train_on(accelerate, net, optimizer, inputs, labels)
    return inputs  # type: ignore[no-any-return]


def launch(script: Path, processes: int, folder: Path) -> list[object]:
    """Start the processes by `meshwright launch`; 1.15 starts one for `--cpu`, whatever number it is given."""
    where = "--cpu" if IS_OURS else "--multi_gpu"
    return [COMMAND, "launch", *([] if processes == 1 else [where, f"--num_processes={processes}"]), script]


def gather_alone(timeout: timedelta) -> None:
    """Gather on rank 0 only, and wait on the others."""
    accelerate = accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
    if accelerate.is_main_process:
        accelerate.gather(torch.ones(1))
    accelerate.wait_for_everyone()


def _train_on(
    accelerate: Accelerator, net: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor | None = None
) -> None:
    outputs = net(inputs)
    accelerate.backward(outputs.sum() if labels is None else loss_of(outputs, labels))
    optimizer.step()
    optimizer.zero_grad()
