"""Train a Llama of transformers by settings of Megatron-LM; compare with one process.

`megatron.py 2 '{"tp_degree": 2}' 4 '{…}' …`: numbers of processes, each with the fields of a `MegatronLMPlugin`. The
processes are forked, so that transformers is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import from_all_ranks, llama, rank, report
from transformers import LlamaForCausalLM  # noqa: F401 - before the processes are forked

from accelerate import Accelerator, debug_launcher
from accelerate.utils import MegatronLMPlugin

LAYERS, MICRO_BATCH, LENGTH, VOCABULARY = 4, 2, 8, 32


def whole(tensor: Any) -> torch.Tensor:
    """Return a whole tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def off_by(fields: dict[str, Any]) -> dict[str, Any]:
    """Train three steps beside one process, and return the largest differences over all ranks."""
    plugin = MegatronLMPlugin(gradient_clipping=0.5, **fields)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model, alone = (llama(VOCABULARY, LAYERS, tie_word_embeddings=False) for _ in range(2))
    optimizer, by_itself = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    samples = torch.randint(0, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(samples, batch_size=MICRO_BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    expected = dict(alone.named_parameters())
    worst = dict.fromkeys(("loss", "gradients", "parameters"), 0.0)

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst[name], float((whole(one) - whole(other)).abs().max()))

    size = plugin.global_batch_size
    for step, tokens in zip(range(3), loader, strict=False):
        batch = samples[step * size : (step + 1) * size]
        assert accelerator.gather(tokens).unique(dim=0).shape == batch.unique(dim=0).shape
        wanted = alone(input_ids=batch, labels=batch).loss
        wanted.backward()
        loss = accelerator.forward_backward(model, input_ids=tokens, labels=tokens, use_cache=False)
        note("loss", accelerator.reduce(loss, "mean"), wanted)
        for name, param in model.named_parameters():
            note("gradients", param.grad, expected[name].grad)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
        for each in (optimizer, by_itself):
            each.step()
            each.zero_grad()
        for name, param in model.named_parameters():
            note("parameters", param, expected[name])
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    everywhere = from_all_ranks(worst)
    most = {name: max(each[name] for each in everywhere) for name in worst}
    return {"off_by": most, "norm": norm, "type": accelerator.distributed_type, "batch": size, "held": held}


def run(fields: dict[str, Any], file: str) -> None:
    """Write what one process finds."""
    found = off_by(fields)
    if rank() == 0:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    found = []
    for number, words in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        debug_launcher(run, (json.loads(words), "found.json"), num_processes=int(number))
        found.append(json.loads(Path("found.json").read_text()))
    report(found=found)
