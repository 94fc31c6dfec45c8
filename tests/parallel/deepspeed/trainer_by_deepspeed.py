"""Trainer of transformers on a small BERT, by DeepSpeed or without it, on 2 processes: `test_deepspeed_trainer.py`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}
WARM_UP = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
           "warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"}}  # fmt: skip


def config(stage: int, *, optimizer_of_config: bool) -> dict[str, Any]:
    """Return a template: all that Trainer knows is "auto"."""
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    keys = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    return {
        "zero_optimization": {"stage": stage, **dict.fromkeys(buckets, "auto")},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        **dict.fromkeys(keys, "auto"),
        **({"optimizer": ADAM, "scheduler": WARM_UP} if optimizer_of_config else {}),
    }


def trained(folder: Path, deepspeed: dict[str, Any] | None, *, resume: bool = False) -> dict[str, Any]:
    """Train 6 steps, or go on after the third of them."""
    options = TrainingArguments(
        output_dir=str(folder), deepspeed=deepspeed, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=6, learning_rate=1e-3, max_grad_norm=0.1, logging_steps=1, save_steps=3, seed=0, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**shape, intermediate_size=32, num_labels=2, **no_dropout))
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": torch.randint(0, 64, (8,), generator=generator), "labels": i % 2} for i in range(96)]
    trainer = Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:10])
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {name: [entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm")}
    found["evaluated"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    return {**found, "saved": (folder / "final" / "model.safetensors").stat().st_size}


def main() -> None:
    """Print one line of results."""
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    deepspeed = None if stage < 0 else config(stage, optimizer_of_config=stage == 3)
    whole = trained(folder, deepspeed)
    resumed = None
    if deepspeed is not None:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder / "checkpoint-6")
        torch.distributed.barrier()
        resumed = trained(folder, config(stage, optimizer_of_config=stage == 3), resume=True)
    if torch.distributed.get_rank() == 0:
        print("RESULTS" + json.dumps({"whole": whole, "resumed": resumed}), flush=True)


if __name__ == "__main__":
    main()
