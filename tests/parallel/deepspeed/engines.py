"""A training run of the small transformer with a DeepSpeed engine, shared by the DeepSpeed tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import Accelerator, DeepSpeedPlugin

from ..small_transformer import loader, loss_of, model

needs_fp16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    reason="DeepSpeed refuses fp16 on a CPU without instructions for it",
)
GLOBAL_BATCH = 8
# Buckets as small as the model: by default they are made for models of billions.
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 10_000,
           "stage3_param_persistence_threshold": 0}  # fmt: skip


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """Return a config whose buckets fit the small transformer."""
    return {"zero_optimization": {"stage": stage, **BUCKETS, **sections.pop("zero", {})}, **sections}


def run(
    stage: int | None,
    *,
    steps: int = 12,
    accumulation: int = 1,
    clip: float | None = None,
    load_from: str | None = None,
    save_to: str | None = None,
    save_at: int | None = None,
    save_always: bool = False,
    sections: dict[str, Any] | None = None,
    scheduled: bool = False,
    per_item: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the mean loss of every micro-batch and the norms; without a stage, by DDP or one process."""
    if stage is not None:
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config(stage, **(sections or {})))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    net, optimizer, batches, scheduler = accelerator.prepare(
        net, optimizer, loader(GLOBAL_BATCH // accelerator.num_processes), scheduler
    )
    if load_from is not None:
        accelerator.resume(load_from)
    losses, norms = [], []
    for number, (inputs, targets) in zip(range(steps), batches, strict=False):
        with accelerator.accumulate(net):
            loss = loss_of(net(inputs), targets)
            if per_item:
                accelerator.backward(loss * targets.numel(), num_items=targets.numel())
            else:
                accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(net.parameters(), clip).item())
            optimizer.step()
            if scheduled:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if save_to is not None and (save_always or number + 1 == (save_at or steps)):
            accelerator.save_state(save_to)
    return {"losses": losses, "norms": norms, "rates": scheduler.get_last_lr()}
