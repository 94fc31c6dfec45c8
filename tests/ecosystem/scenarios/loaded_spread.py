"""Train models that transformers has spread while it loaded them; compare with one process.

`loaded_spread.py ARCHITECTURE…` on 2 processes or on 4.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensor_parallel import model_of, whole
from tiny import report
from transformers.distributed import DistributedConfig

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

WAYS: dict[int, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    2: {
        "tp under tp": ({"tp_size": 2}, {"tp_size": 2}),
        "tp under none": ({"tp_size": 2}, {}),
        "fsdp under none": ({"fsdp_size": 2}, {}),
        "fsdp under fsdp": ({"fsdp_size": 2}, {"dp_shard_size": 2}),
        "fsdp under tp": ({"fsdp_size": 2}, {"tp_size": 2}),
    },
    4: {
        "fsdp x tp under fsdp x tp": ({"fsdp_size": 2, "tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}),
        "fsdp x tp under none": ({"fsdp_size": 2, "tp_size": 2}, {}),
        "tp under fsdp x tp": ({"tp_size": 4}, {"dp_shard_size": 2, "tp_size": 2}),
    },
}
"""How transformers spreads the model, and the mesh that the Accelerator is asked for."""


def off_by(folder: str, architecture: str, spread: dict[str, int], mesh: dict[str, int]) -> dict[str, float] | str:
    """Train three steps beside one process, and return the largest differences, or the refusal."""
    config = ParallelismConfig(**mesh) if mesh else None
    plugin = FullyShardedDataParallelPlugin() if mesh.get("dp_shard_size") else None
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    alone = model_class.from_pretrained(folder)
    model = model_class.from_pretrained(folder, distributed_config=DistributedConfig(**spread))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except ValueError as refusal:
        return str(refusal)
    worst = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst[name], float((whole(one) - whole(other)).abs().max()))

    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    expected = dict(alone.named_parameters(remove_duplicate=False))
    for step in range(3):
        for batch in torch.randint(3, 64, (2, 4, 12), generator=torch.Generator().manual_seed(step)):
            wanted = alone(input_ids=batch, labels=batch).loss
            (wanted / 2).backward()
            own = batch.chunk(shares)[share]
            with accelerator.accumulate(model):
                loss = model(input_ids=own, labels=own).loss
                accelerator.backward(loss)
            note("loss", accelerator.reduce(loss.detach(), "mean"), wanted)
        for name, param in model.named_parameters(remove_duplicate=False):
            note("gradients", param.grad, expected[name].grad)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        note("norm", torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 1.0)), norm)
        for each in (optimizer, by_itself):
            each.step()
            each.zero_grad()
        for name, param in model.named_parameters(remove_duplicate=False):
            note("parameters", param, expected[name])
    return worst


def main() -> None:
    """Make the models, then train each of them in every way."""
    warnings.simplefilter("ignore")
    first = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for architecture in sys.argv[1:]:
        if first.is_main_process:
            model_of(architecture).save_pretrained(architecture)
        dist.barrier()
        for way, (spread, mesh) in WAYS[first.num_processes].items():
            found[f"{architecture}: {way}"] = off_by(architecture, architecture, spread, mesh)
    report(**found)


if __name__ == "__main__":
    main()
