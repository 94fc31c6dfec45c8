"""Lightning Fabric."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..task import ACCUMULATION, loss_of
from . import SavedState

DISTRIBUTION = "lightning-fabric"
IMPORT = "from lightning_fabric import Fabric"
CONSTRUCT = "Fabric(accelerator='cpu', devices=1).launch()"
COMMAND = Path(sys.executable).with_name("fabric")
ANSWERS = {"the command's --help": [COMMAND, "--help"], "the launcher's --help": [COMMAND, "run", "--help"]}
PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed"}  # on a CPU it takes bf16 where fp16 is asked for

logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning_fabric")


def fabric(strategy: Any = None, precision: str = "no") -> Fabric:
    """Make a Fabric of this process, or of the process group that there is."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": PRECISIONS[precision]}
    if dist.is_initialized():
        options |= {"devices": dist.get_world_size(), "strategy": strategy or "ddp"}
        options |= {"plugins": [TorchElasticEnvironment()]}
    made = Fabric(**options)
    made.launch()
    return made


def steps(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any], precision: str = "no") -> Iterator[None]:
    """Train for ever; yield after every step."""
    made = fabric(precision=precision)
    return _steps(made, *made.setup(net, optimizer), made.setup_dataloaders(batches))


def _steps(made: Fabric, net: Any, optimizer: Any, batches: Any) -> Iterator[None]:
    while True:
        for inputs, labels in batches:
            loss = loss_of(net(inputs), labels)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def windows(net: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]) -> Iterator[None]:
    """Accumulate for ever; yield after every window."""
    made = fabric()
    model, stepper = made.setup(net, optimizer)
    loader: Any = made.setup_dataloaders(batches)
    while True:
        for index, (inputs, labels) in enumerate(loader, start=1):
            closes = index % ACCUMULATION == 0
            with made.no_backward_sync(model, enabled=not closes):
                made.backward(loss_of(model(inputs), labels) / ACCUMULATION)
            if closes:
                stepper.step()
                stepper.zero_grad()
                yield


def sharded_steps(net: nn.Module, make_optimizer: Callable[..., Optimizer], batches: DataLoader[Any]) -> Iterator[None]:
    """Train by FSDP2, one unit per block; its own FSDP strategy is FSDP1 and refuses a CPU."""
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> Any:
        for block in model[0]:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    made = fabric(ModelParallelStrategy(shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1))
    model = made.setup_module(net)
    return _steps(
        made, model, made.setup_optimizers(make_optimizer(model.parameters())), made.setup_dataloaders(batches)
    )


def evaluation(net: nn.Module, batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Predict for ever; yield the predictions and labels of all processes."""
    made = fabric()
    model, loader = made.setup_module(net), made.setup_dataloaders(batches)
    model.eval()
    while True:
        for inputs, labels in loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            gathered: Any = made.all_gather((predictions, labels))
            yield gathered[0].flatten(0, 1), gathered[1].flatten(0, 1)


def prepared(batches: DataLoader[Any]) -> Any:
    """Return the loader that was set up."""
    return fabric().setup_dataloaders(batches)


def saved_state(net: nn.Module, optimizer: Optimizer) -> SavedState:
    """Save by `Fabric.save`, which has no background."""
    made = fabric()
    model, stepper = made.setup(net, optimizer)
    made.backward(model(torch.ones(2, next(net.parameters()).shape[-1])).sum())
    stepper.step()
    stepper.zero_grad()
    state = {"model": model, "optimizer": stepper}
    return SavedState(
        save=lambda folder: made.save(folder / "state.ckpt", state),
        load=lambda folder: made.load(folder / "state.ckpt", state),
    )


def train_and_save(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> None:
    """Train on the first batches and save."""
    made = fabric()
    model, stepper = made.setup(net, optimizer)
    steps = _steps(made, model, stepper, made.setup_dataloaders(loader))
    for _ in range(batches):
        next(steps)
    made.save(folder / "state.ckpt", {"model": model, "optimizer": stepper})


def resume(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], folder: Path, batches: int) -> Tensor:
    """Load, read past what was trained on, and train on the next batch."""
    made = fabric()
    model, stepper = made.setup(net, optimizer)
    made.load(folder / "state.ckpt", {"model": model, "optimizer": stepper})
    for index, (inputs, labels) in enumerate(made.setup_dataloaders(loader)):
        if index < batches:
            continue
        made.backward(loss_of(model(inputs), labels))
        stepper.step()
        stepper.zero_grad()
        return inputs  # type: ignore[no-any-return]
    raise RuntimeError(f"the loader has no batch {batches}")


def launch(script: Path, processes: int, folder: Path) -> list[object]:
    """Start the processes by `fabric run`."""
    return [COMMAND, "run", "--accelerator=cpu", f"--devices={processes}", script]


def gather_alone(timeout: timedelta) -> None:
    """Gather on rank 0 only, and wait on the others."""
    made = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=timeout))
    if made.is_global_zero:
        made.all_gather(torch.ones(1))
    made.barrier()
