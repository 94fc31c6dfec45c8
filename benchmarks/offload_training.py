"""A step of training whose blocks are on the host: ours, and ZeRO-3 of DeepSpeed with its weights and state on the CPU.

Both train the same blocks in one process of the same machine, DeepSpeed with its own Adam for CPUs where that compiles.
There is no device here, so that no copy is hidden and none is saved: what is compared is what each adds to the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from meshwright import Accelerator
from meshwright.config.packages import has_package

from .interleave import Comparison, compare, timed
from .processes import run_on

LAYERS, WIDTH, ROWS = 8, 1024, 64
"""Eight blocks of 8.4 million parameters: 269 MB of weights, and 1.1 GB with gradients and moments."""
TARGET = 1 / 1.5
ROUNDS_PER_ROW = 60


class Block(nn.Module):
    """A block as transformers have it, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add to the inputs."""
        return inputs + self.down(self.up(self.norm(inputs)).relu())  # type: ignore[no-any-return]


def run(rounds: int) -> list[Comparison]:
    """Measure where DeepSpeed is installed."""
    return run_on(on_one_process, max(2, rounds // ROUNDS_PER_ROW), world_size=1) if has_package("deepspeed") else []


def on_one_process(rounds: int) -> list[Comparison]:
    optimizer = deepspeed_optimizer()
    what = f"step, blocks on the host / DeepSpeed ZeRO-3 with CPU offload and its {optimizer.func.__name__}"
    return [
        compare(
            what,
            lambda: timed(deepspeed_steps(optimizer)),
            lambda: timed(our_steps()),
            rounds=rounds,
            target=TARGET,
            warm_up=3,
        )
    ]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def deepspeed_optimizer() -> partial[Optimizer]:
    """Return DeepSpeed's Adam for CPUs, or torch's where DeepSpeed's does not compile."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        DeepSpeedCPUAdam([nn.Parameter(torch.ones(1))])
    except (RuntimeError, AttributeError, OSError):
        return partial(AdamW, foreach=True)
    return partial(DeepSpeedCPUAdam, adamw_mode=True)


def deepspeed_steps(make_optimizer: partial[Optimizer]) -> Iterator[None]:
    import deepspeed

    net = model()
    on_cpu = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_param": on_cpu, "offload_optimizer": on_cpu},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=make_optimizer(net.parameters()), config=config)
    inputs, targets = batch()
    while True:
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()
        yield


def our_steps() -> Iterator[None]:
    accelerator = Accelerator(cpu=True, offload="host")
    net = model()
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters()))
    inputs, targets = batch()
    while True:
        accelerator.backward(F.mse_loss(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        yield
