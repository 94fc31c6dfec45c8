"""Complete DeepSpeed's config from the batch sizes, the optimizer, the scheduler and the model of one engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from ...config.plugins.deepspeed import ACCUMULATION, CLIPPING, STAGE, Claims, DeepSpeedPlugin
from ..base import Bundle

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .engine import DummyScheduler

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}


def complete_config(
    plugin: DeepSpeedPlugin,
    bundle: Bundle,
    data_ranks: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: DummyScheduler | None,
) -> Claims:
    """Return the config of one engine without "auto" values; the plugin's own config is not changed."""
    claims = Claims(deepcopy(plugin.deepspeed_config), plugin.source, dict(plugin.origins))
    _batch_plan(claims, bundle, data_ranks, plugin.is_train_batch_min)
    if optimizer is not None:
        _optimizer(claims, optimizer)
    if scheduler is not None:
        _schedule(claims, scheduler, 1 if bundle.split_batches else data_ranks)
    _buckets(claims, model)
    # Without the key DeepSpeed would clip at 1.0; nothing is clipped unless configured.
    claims.default(CLIPPING, 0.0, "none: clip_grad_norm_ says, step by step")
    for name in ("fp16", "bf16"):
        claims.fill(f"{name}.enabled", False, "mixed_precision")
    # The script decides when to step: DeepSpeed accumulates gradients until `step` is called.
    claims.claim("managed_gradient_accumulation", False, "accelerator.accumulate")
    claims.check()
    if remaining := claims.remaining():
        raise ValueError(
            f'{plugin.source} says "auto" for {", ".join(remaining)}, which only you can know: write a value there.'
        )
    return claims


def _batch_plan(claims: Claims, bundle: Bundle, data_ranks: int, smallest: bool) -> None:
    known = claims.value_of("train_micro_batch_size_per_gpu")
    if bundle.batch_sizes:
        size = min(bundle.batch_sizes) if smallest else max(bundle.batch_sizes)
        which = "" if len(bundle.batch_sizes) == 1 else ", the smallest" if smallest else ", the largest"
        if known in (None, "auto") or known not in bundle.batch_sizes:
            claims.claim("train_micro_batch_size_per_gpu", size, f"the data loader{which}")
    else:
        claims.default(
            "train_micro_batch_size_per_gpu", 1, "no data loader was prepared; DeepSpeed only counts with it"
        )
    if bundle.accumulation_steps > 1:
        claims.claim(ACCUMULATION, bundle.accumulation_steps, "Accelerator(gradient_accumulation_steps=...)")
    claims.default(ACCUMULATION, 1, "the Accelerator accumulates nothing")
    micro, steps = claims.value_of("train_micro_batch_size_per_gpu"), claims.value_of(ACCUMULATION)
    claims.claim(
        "train_batch_size", micro * steps * data_ranks, f"{micro} samples x {steps} micro-batches x {data_ranks} ranks"
    )


def _optimizer(claims: Claims, optimizer: Optimizer) -> None:
    if claims.value_of("optimizer") is None:
        return
    who = type(optimizer).__name__
    options = {**_ADAM, **optimizer.defaults}
    for name in ("lr", "betas", "eps", "weight_decay"):
        if name in options:
            value = list(options[name]) if isinstance(options[name], tuple) else options[name]
            claims.fill(
                f"optimizer.params.{name}",
                value,
                f"{who}({name}=...)" if name in optimizer.defaults else "torch's default",
            )


def _schedule(claims: Claims, scheduler: DummyScheduler, batches_per_step: int) -> None:
    """Convert the script's batches to optimizer steps, of which each takes several batches."""
    if claims.value_of("scheduler") is None:
        return
    counted = "" if batches_per_step == 1 else f", {batches_per_step} batches per step"
    for name, floor in (("warmup_num_steps", 1), ("total_num_steps", 1)):  # DeepSpeed refuses a warm-up of 0
        given = getattr(scheduler, name)
        if given is not None:
            steps = max(floor, math.ceil(given / batches_per_step))
            claims.fill(f"scheduler.params.{name}", steps, f"DummyScheduler({name}={given}){counted}")
    rates = [group["lr"] for group in scheduler.optimizer.param_groups if "lr" in group]
    claims.fill("scheduler.params.warmup_min_lr", 0.0, "the default")
    if rates:
        claims.fill("scheduler.params.warmup_max_lr", max(rates), f"{type(scheduler.optimizer).__name__}(lr=...)")


def _buckets(claims: Claims, model: nn.Module) -> None:
    """Choose ZeRO's bucket sizes by the hidden size of the model, or DeepSpeed's defaults if it is unknown."""
    width = _width(model)
    by_width: dict[str, Callable[[int], float]] = {
        "reduce_bucket_size": lambda n: n * n,
        "stage3_prefetch_bucket_size": lambda n: 0.9 * n * n,
        "stage3_param_persistence_threshold": lambda n: 10 * n,
    }
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # its defaults depend on the stage

    if width is not None:
        for name, size in by_width.items():
            claims.fill(f"zero_optimization.{name}", int(size(width)), f"the model's hidden size of {width}")
    defaults = DeepSpeedZeroConfig(stage=claims.value_of(STAGE) or 0).model_dump(by_alias=True)
    for key in claims.remaining():
        section, _, name = key.rpartition(".")
        if section == "zero_optimization" and name in defaults:
            claims.fill(key, defaults[name], "DeepSpeed's default")


def _width(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(holder, "hidden_size", None), int):
            return size
        if sizes := getattr(holder, "hidden_sizes", None):
            return int(max(sizes))
    return None
