"""One step by DeepSpeed on two processes: a prepared model, and a loop by hand around `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import AdamW

from meshwright import DeepSpeedPlugin
from meshwright.config.packages import has_package

from .contenders.accelerate import steps as our_steps
from .contenders.bare import my_share
from .fsdp import blocks
from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import BATCH_SIZE, loader

STAGES = (1, 2, 3)


def run(rounds: int) -> list[Comparison]:
    """Measure plain steps of every stage, where DeepSpeed is installed."""
    return run_on_two(on_every_rank, rounds) if has_package("deepspeed") else []


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            f"DeepSpeed step, ZeRO-{stage}, AdamW, 2 processes",
            lambda stage=stage: timed(bare_step(stage), dist.barrier),
            lambda stage=stage: timed(our_step(stage), dist.barrier),
            rounds=rounds,
            target=1.05,
        )
        for stage in STAGES
    ]


def config(stage: int) -> dict[str, Any]:
    """Return a config with buckets that fit the small model."""
    buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 10_000}
    return {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **buckets},
    }


def bare_step(stage: int) -> Iterator[None]:
    import deepspeed

    from meshwright.parallel.deepspeed.strategy import load_deepspeed
    from meshwright.runtime.group.runtime import Runtime

    load_deepspeed(Runtime.start(cpu=True))  # without the operation that DeepSpeed would compile first
    net = blocks()
    engine, *_ = deepspeed.initialize(model=net, optimizer=AdamW(net.parameters()), config=config(stage))
    return bare_steps_of(engine)


def bare_steps_of(engine: Any) -> Iterator[None]:
    while True:
        for inputs, targets in my_share(loader()):
            loss = F.cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            yield


def our_step(stage: int) -> Iterator[None]:
    net = blocks()
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage))
    return our_steps(net, AdamW(net.parameters()), loader(), deepspeed_plugin=plugin)
