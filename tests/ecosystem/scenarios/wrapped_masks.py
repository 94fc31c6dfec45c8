"""transformers: masks inside of functions that other versions may have, on divided sequences beside one process.

transformers 5.23 has such a function for packed sequences. Here every part of a mask is put into one whose name nobody
knows: one that says the same, which is carried, and ones that say something else, which are refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny import llama, report
from transformers import MistralConfig, MistralForCausalLM, masking_utils

from accelerate import Accelerator, ParallelismConfig

page = (Path(__file__).parents[3] / "docs" / "long_sequences.md").read_text()
[recipe] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def step" in block]
exec(compile(recipe, "docs/long_sequences.md", "exec"))

AROUND = """
def changed_mask(mask_function):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return {result}
    return inner_mask
"""
SAME = "mask_function(batch_idx, head_idx, q_idx, kv_idx)"
OTHERS = {"shifted": "mask_function(batch_idx, head_idx, q_idx - 1, kv_idx)", "inverted": f"~{SAME}"}


@contextmanager
def masks_inside_of(result: str) -> Iterator[None]:
    """Put every part of a mask into a function of transformers with this result."""
    exec(AROUND.format(result=result), vars(masking_utils))
    changed: Callable[..., Any] = vars(masking_utils).pop("changed_mask")
    before = masking_utils.and_masks
    masking_utils.and_masks = lambda *parts: before(*map(changed, parts))
    try:
        yield
    finally:
        masking_utils.and_masks = before


def mistral() -> Any:
    """Return a small model with a window."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MistralForCausalLM(
        MistralConfig(**sizes, vocab_size=32, num_key_value_heads=2, head_dim=8, sliding_window=5)
    )


def difference(accelerator: Accelerator, alone: Any) -> float:
    """Return the largest difference of the loss and of a gradient for packed documents."""
    tokens = torch.randint(0, 32, (1, 29), generator=torch.Generator().manual_seed(3))
    places = torch.cat([torch.arange(length) for length in (9, 13, 7)])[None]
    prepared = accelerator.prepare(copy.deepcopy(alone))
    expected = alone(input_ids=tokens, labels=tokens, position_ids=places, use_cache=False).loss
    expected.backward()
    loss, items = step(accelerator, prepared, tokens.clone(), tokens.clone(), places)  # type: ignore[name-defined]  # noqa: F821
    found = accelerator.reduce(loss, "sum") / accelerator.reduce(items, "sum")
    pairs = [(found, expected.detach())]
    pairs += [
        (own.grad.full_tensor(), other.grad)
        for own, other in zip(prepared.parameters(), alone.parameters(), strict=True)
    ]
    return max(float((own - other).abs().max()) for own, other in pairs)


accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
off_by: dict[str, float] = {}
refusals: dict[str, str] = {}
for name, make in {"Llama": lambda: llama(32), "Mistral": mistral}.items():
    with masks_inside_of(SAME):
        off_by[name] = difference(accelerator, make())
    for way, result in OTHERS.items():
        with masks_inside_of(result):
            try:
                difference(accelerator, make())
                refusals[f"{name} {way}"] = "taken"
            except ValueError as refusal:
                refusals[f"{name} {way}"] = str(refusal)
report(off_by=off_by, refusals=refusals)
