"""transformers: packed documents, windows, sinks and padding on divided sequences, beside one process.

Called with the lengths of the documents; it runs on any number of processes.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import report
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from accelerate import Accelerator, ParallelismConfig

page = (Path(__file__).parents[3] / "docs" / "long_sequences.md").read_text()
[recipe] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def step" in block]
exec(compile(recipe, "docs/long_sequences.md", "exec"))

LENGTHS = [int(word) for word in sys.argv[1:]]
LENGTH, VOCABULARY = sum(LENGTHS), 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "use_cache": False,
}


def model_of(kind: str) -> Any:
    """Return a small model, the same one every time."""
    torch.manual_seed(0)
    if kind == "Llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    if kind == "Mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7))
    if kind == "Qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=6))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def batch_of(case: str) -> dict[str, Tensor]:
    """Return a batch: documents packed into one sequence, or two sequences with padding or a mask."""
    generator = torch.Generator().manual_seed(3)
    rows = 1 if case == "documents" else 2
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    places = torch.arange(LENGTH).repeat(rows, 1)
    batch = {"input_ids": tokens, "labels": tokens.clone(), "position_ids": places}
    if case in ("documents", "rows"):  # those of the second row are in another order
        orders = [LENGTHS, LENGTHS[::-1]][:rows]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in order]) for order in orders])
    elif case == "mask":
        seen = (torch.rand(rows, 1, LENGTH, LENGTH, generator=generator) > 0.4).tril() | torch.eye(LENGTH).bool()
        batch["attention_mask"] = torch.where(seen, 0.0, -1e9)
    else:
        mask = torch.ones(rows, LENGTH, dtype=torch.long)
        mask[0, slice(0, LENGTH // 3) if case == "left" else slice(-LENGTH // 3, None)] = 0
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
        batch["labels"][
            0, LENGTH // 3
        ] = -100  # predicted from padding, which sees no key: eager attention averages all
    return batch


def difference(accelerator: Accelerator, kind: str, case: str, prepared: Any, alone: Any) -> float:
    """Return the largest difference of the loss and of a gradient to one process."""
    batch = batch_of(case)
    alone.zero_grad()
    expected = alone(**batch).loss
    expected.backward()
    loss, items = step(accelerator, prepared, **batch)  # type: ignore[name-defined]  # noqa: F821
    found = accelerator.reduce(loss, "sum") / accelerator.reduce(items, "sum")
    off_by = abs(float(found - expected.detach()))
    gradients = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in prepared.named_parameters():
        if gradients[name] is not None:
            off_by = max(off_by, float((param.grad.full_tensor() - gradients[name]).abs().max()))
    prepared.zero_grad()
    return off_by


def moved(accelerator: Accelerator, prepared: Any) -> float:
    """Return the share of positions, in percent, whose logits move if one of two packed documents changes."""
    counts = torch.zeros(2)
    logits = []
    for seed in (0, 1):
        tokens = torch.randint(0, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(5))
        places = torch.arange(16).repeat(1, 2)
        if seed:
            tokens[:, :16] = (tokens[:, :16] + 1) % VOCABULARY
        with accelerator.maybe_context_parallel(buffers=[tokens, places], buffer_seq_dims=[1, 1]), torch.no_grad():
            logits.append(prepared(input_ids=tokens, position_ids=places).logits)
    counts[0] = ((logits[0] - logits[1]).abs().amax(-1) > 1e-6).sum()
    counts[1] = logits[0].shape[1]
    counts = accelerator.reduce(counts, "sum")
    return 100 * float(counts[0] / counts[1])


world = Accelerator(cpu=True).num_processes
results: dict[str, Any] = {}
for axis in ("cp_size", "sp_size"):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{axis: world}))
    for kind in ("Llama", "Mistral", "Qwen3", "GptOss"):
        alone = model_of(kind)
        prepared = accelerator.prepare(copy.deepcopy(alone))
        for case in ("documents", "rows", "left", "right", "mask"):
            results[f"{axis} {kind} {case}"] = difference(accelerator, kind, case, prepared, alone)
        if kind != "GptOss":  # which sees no documents in positions, on one process neither
            results[f"{axis} {kind} moved"] = moved(accelerator, prepared)
        if prepared.config._attn_implementation != alone.config._attn_implementation:
            raise AssertionError("the attention of a model is its own again after the step")
report(results=results)
