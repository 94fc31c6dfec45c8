"""Train a decoder on random tokens, spread and computed as a published run was.

python train.py --options '{"family": "llama", "layers": 2}'
torchrun --nproc_per_node 2 train.py --options '{"dp_shard": 2}'
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from decoder import TENSOR_PLAN, Decoder, recompute
from fused import CrossEntropy, SplitCrossEntropy
from optimizers import optimizer_for, step_in_backward, sum_in_fp32
from options import Options, read_options
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from meshwright import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    PipelineConfig,
    TorchTensorParallelConfig,
)


def mesh_of(options: Options) -> ParallelismConfig | None:
    """Return the mesh, or None for one process."""
    if options.world_size == 1:
        return None
    return ParallelismConfig(
        dp_replicate_size=options.dp_replicate,
        dp_shard_size=options.dp_shard,
        cp_size=options.cp,
        tp_size=options.tp,
        pp_size=options.pp,
        tp_plan=TENSOR_PLAN if options.tp > 1 else None,
        tp_handler=TorchTensorParallelConfig(sequence_parallel=True) if options.tp > 1 else None,
        pp_handler=PipelineConfig(schedule=options.schedule, microbatches=options.accumulation)
        if options.pp > 1
        else None,
    )


def accelerator_for(options: Options) -> Accelerator:
    """Return the accelerator: FSDP2 computes in bf16 by its own policy, anything else by autocast."""
    mesh = mesh_of(options)
    shards = options.dp_shard * options.dp_replicate * options.cp > 1
    plugin = None
    if mesh is not None:
        reduced = torch.bfloat16 if options.precision == "mixed-bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        plugin = FullyShardedDataParallelPlugin(
            reshard_after_forward=options.reshard,
            mixed_precision_policy=policy if shards and options.precision != "bf16" else None,
            activation_checkpointing=options.recompute == "full",
        )
    return Accelerator(
        mixed_precision="bf16" if not shards and options.precision.startswith("mixed") else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1 if options.pp > 1 else options.accumulation, sync_each_batch=options.sync_each
        ),
        parallelism_config=mesh,
        fsdp_plugin=plugin,
    )


def model_for(options: Options) -> Decoder:
    """Return the model, in the number format of its weights."""
    whole = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if options.precision in ("bf16", "master") else torch.float32)
    model = Decoder(options)
    torch.set_default_dtype(whole)
    if options.recompute == "selective" or (options.recompute == "full" and options.world_size == 1):
        recompute(model.blocks, options)
    return model


class Loss:
    """The mean loss of the next tokens."""

    def __init__(self, options: Options, split_over: Any) -> None:
        self.is_fused = "fused" in options.loss
        self.split_over = split_over
        self.is_wide = options.loss == "fused-fp32"

    def __call__(self, logits: Tensor | list[Tensor], targets: Tensor) -> Tensor:
        parts = logits if isinstance(logits, (list, tuple)) else [logits]
        pairs = zip(parts, targets.chunk(len(parts), 1), strict=True)
        if len(parts) == 1 and not self.is_fused:
            loss = F.cross_entropy(parts[0].flatten(0, 1).float(), targets.flatten())
            return loss.full_tensor() if isinstance(loss, DTensor) else loss
        return torch.stack([self._sum(part.flatten(0, 1), target.flatten()) for part, target in pairs]).sum() / (
            targets.numel()
        )

    def _sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.is_fused and self.split_over is not None:
            part = logits.to_local() if isinstance(logits, DTensor) else logits
            return SplitCrossEntropy.apply(part, targets, self.split_over)
        if self.is_fused:
            return CrossEntropy.apply(logits.float() if self.is_wide else logits, targets)
        return F.cross_entropy(logits.float(), targets, reduction="sum")


def batches_for(options: Options) -> DataLoader[Any]:
    """Return enough random tokens for the steps of every rank."""
    size = options.batch * (options.accumulation if options.pp > 1 else 1)
    passes = options.steps * (1 if options.pp > 1 else options.accumulation)
    count = size * passes * options.dp_shard * options.dp_replicate
    tokens = torch.randint(0, options.vocab, (1, options.seq + 1)).expand(count, -1)
    positions = torch.arange(options.seq).expand(count, -1)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:], positions), batch_size=size)


def main(options: Options) -> float:
    """Train, and return the last loss."""
    accelerator = accelerator_for(options)
    model = model_for(options)
    inside = options.optimizer.endswith("in-backward")
    optimizer = None if inside else optimizer_for(options, [p for p in model.parameters() if p.requires_grad])
    loader = batches_for(options)
    if optimizer is None:
        model, loader = accelerator.prepare(model, loader)
        step_in_backward(options, model)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.precision == "master":
        sum_in_fp32(model)
    loss_fn = Loss(options, accelerator.torch_device_mesh["tp"].get_group() if options.tp > 1 else None)
    for tokens, targets, positions in loader:
        parts = [tokens, targets, positions]
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel(buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)),
        ):
            loss = accelerator.forward_backward(model, tokens, positions, target=targets, loss_fn=loss_fn)
            if accelerator.sync_gradients and options.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not options.keep_gradients)
    mean: float = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"loss {mean:.4f}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--options", default="{}", help="fields of `Options`, as JSON")
    main(read_options(parser.parse_args().options))
