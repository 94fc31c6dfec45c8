"""A right training script: `healthy_script.py FAMILY MESH` trains a model of a family in one of the ways."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, set_seed
from tests.parallel.small_transformer import model as small_transformer
from tests.parallel.ways import WAYS

FAMILY, WAY = sys.argv[1:3]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1, "tie_word_embeddings": False,
}  # fmt: skip


def make_model() -> nn.Module:
    """Return a model of the family."""
    if FAMILY == "torch":
        return small_transformer()
    if FAMILY == "convolution":
        layers = [nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 32))
    import transformers

    if FAMILY == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if FAMILY == "mixture":
        sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def call(accelerator: Accelerator, model: Any, tokens: torch.Tensor) -> None:
    """Run one pass forward and backward."""
    loss_fn = nn.CrossEntropyLoss()
    if FAMILY == "convolution":
        accelerator.backward(loss_fn(model(tokens[:, :-1].float() / 32), tokens[:, -1]))
        return
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand(len(inputs), -1).contiguous()
    kwargs = {"positions": positions} if FAMILY == "torch" else {"position_ids": positions, "use_cache": False}
    with accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 1]):

        def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
            logits = output if isinstance(output, torch.Tensor) else output[0]
            return loss_fn(logits.flatten(0, 1), target.flatten())

        accelerator.forward_backward(model, inputs, target=labels, loss_fn=loss_of, **kwargs)


def main() -> None:
    """Train."""
    set_seed(1)
    settings = WAYS[WAY][1]()
    if FAMILY != "torch" and "parallelism_config" in settings:
        settings["parallelism_config"].tp_plan = None  # the model's own
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, **settings)
    model: Any = make_model()
    tokens = [torch.randint(0, 32, (9,)) for _ in range(128)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    prepared = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4, shuffle=True), scheduler)
    model, optimizer, loader, scheduler = prepared
    for batch in loader:
        with accelerator.accumulate(model):
            call(accelerator, model, batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
