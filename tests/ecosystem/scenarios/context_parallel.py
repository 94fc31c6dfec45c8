"""transformers: a Llama by the recipe of docs/long_sequences.md through torch's ring, beside one process."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from tiny import llama, report

from accelerate import Accelerator, ParallelismConfig
from tests.parallel.mesh.context import cpu_attention

cpu_attention.register()
page = (Path(__file__).parents[3] / "docs" / "long_sequences.md").read_text()
[recipe] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def step" in block]
exec(compile(recipe, "docs/long_sequences.md", "exec"))

accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
alone = llama(32)
model = copy.deepcopy(alone)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
model, optimizers[1] = accelerator.prepare(model, optimizers[1])
off_by = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "parameter": 0.0}


def note(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Keep the largest difference."""
    one = one.full_tensor() if hasattr(one, "full_tensor") else one
    off_by[what] = max(off_by[what], (one - other).abs().max().item())


for seed in range(3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (2, 16), generator=generator)
    labels = tokens.clone()
    labels[0, 5 + seed :] = -100  # padding, which makes the parts uneven
    expected = alone(input_ids=tokens, labels=labels).loss
    expected.backward()
    places = torch.arange(16).repeat(2, 1)
    loss, items = step(accelerator, model, tokens.clone(), labels, places)  # type: ignore[name-defined]  # noqa: F821
    note("loss", accelerator.reduce(loss, "sum") / accelerator.reduce(items, "sum"), expected.detach())
    by_name = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        note("gradient", param.grad, by_name[name].grad)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    note("norm", accelerator.clip_grad_norm_(model.parameters(), 1.0), norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
for name, param in model.named_parameters():
    note("parameter", param.detach(), by_name[name].detach())
report(off_by=off_by, norm=norm.item())
