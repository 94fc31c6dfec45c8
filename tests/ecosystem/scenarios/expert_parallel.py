"""Train small models with experts of transformers, the experts spread by their own plans; compare with one process.

`expert_parallel.py ARCHITECTURE PROCESSES '{"dp_shard_size": 2, "ep_size": 2}' …`, again for every mesh; `2 '{}'`
compares the router's loss. The processes are forked, so that transformers is imported once.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensor_parallel import model_of, whole
from tiny import from_all_ranks, rank, report

from accelerate import Accelerator, ParallelismConfig, debug_launcher
from tests.parallel.mesh.context import cpu_attention

LENGTH = 16


def own_loss(accelerator: Accelerator, model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    """Run both passes on this process's part of a batch; return its loss and its number of labels."""
    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    own, shifted = (each.chunk(shares)[share].clone() for each in (tokens, labels))
    batch = {
        "input_ids": own,
        "labels": shifted,
        "shift_labels": shifted,
        "position_ids": torch.arange(LENGTH).repeat(len(own), 1),
        "attention_mask": torch.ones_like(own),
    }
    cut = list({id(tensor): tensor for tensor in batch.values()}.values())
    with accelerator.maybe_context_parallel(buffers=cut, buffer_seq_dims=[1] * 4, no_restore_buffers=set(cut)):
        loss = model(**batch, use_cache=False, num_items_in_batch=1).loss
        items = (shifted != -100).sum()
        accelerator.backward(loss, num_items=items)
    return loss.detach(), items


def off_by(architecture: str, sizes: dict[str, int]) -> dict[str, float]:
    """Train two steps beside one process, and return the largest differences."""
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    alone = model_of(architecture)
    model = copy.deepcopy(alone)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    worst = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst[name], float((whole(one) - whole(other)).abs().max()))

    expected = dict(alone.named_parameters(remove_duplicate=False))
    for step in range(2):
        tokens = torch.randint(3, 64, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        labels[0, 5:] = -100  # padding
        wanted = alone(input_ids=tokens, labels=labels, shift_labels=labels).loss
        wanted.backward()
        loss, items = own_loss(accelerator, model, tokens, labels)
        note("loss", accelerator.reduce(loss, "sum") / accelerator.reduce(items, "sum"), wanted)
        for name, param in model.named_parameters(remove_duplicate=False):
            assert (param.grad is None) == (expected[name].grad is None), name
            if param.grad is not None:
                note("gradients", param.grad, expected[name].grad)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        note("norm", torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5)), norm)
        for each in (optimizer, by_itself):
            each.step()
            each.zero_grad()
        for name, param in model.named_parameters(remove_duplicate=False):
            note("parameters", param, expected[name])
    return worst


def router_loss_off_by(architecture: str) -> dict[str, float]:
    """Return how far losses and gradients are from one process with the router's loss of transformers."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, ep_size=2))
    alone = model_of(architecture)
    model = accelerator.prepare(copy.deepcopy(alone))
    alone.router_aux_loss_coef, model.router_aux_loss_coef = 0.5, 0.0
    tokens = torch.randint(3, 64, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    wanted = alone(input_ids=tokens, labels=tokens, output_router_logits=True)
    wanted.loss.backward()
    own = tokens.chunk(2)[accelerator.process_index]
    outputs = model(input_ids=own, labels=own, output_router_logits=True)
    balance = accelerator.load_balancing_loss(outputs.router_logits, model.num_experts_per_tok)
    accelerator.backward(outputs.loss + 0.5 * balance)
    expected = dict(alone.named_parameters())
    return {
        "router's loss": float((accelerator.reduce(balance.detach(), "mean") - wanted.aux_loss).abs()),
        "gradients": max(
            float((whole(param.grad) - expected[name].grad).abs().max()) for name, param in model.named_parameters()
        ),
        "of their means": float((accelerator.reduce(outputs.aux_loss.detach(), "mean") - wanted.aux_loss).abs()),
    }


def run(architecture: str, sizes: dict[str, int], file: str) -> None:
    """Write the largest differences of all processes."""
    everywhere = from_all_ranks(off_by(architecture, sizes) if sizes else router_loss_off_by(architecture))
    if rank() == 0:
        Path(file).write_text(json.dumps({name: max(each[name] for each in everywhere) for name in everywhere[0]}))


if __name__ == "__main__":
    found = []
    for architecture, number, words in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        model_of(architecture)  # import it before the processes are forked
        debug_launcher(run, (architecture, json.loads(words), "found.json"), num_processes=int(number))
        found.append(json.loads(Path("found.json").read_text()))
    report(found=found)
