"""Train small models of transformers by their own plans of tensor parallelism; compare with one process.

`tensor_parallel.py ARCHITECTURE…` on 2 processes splits layers over 2, on 4 processes it shards over 2 more.
`ARCHITECTURE:STYLE` gives the first weights of experts that style instead of the plan's, `ARCHITECTURE:` leaves out the
rules of the modules that hold experts; both report the refusal.
PLANS_BY_NAME=1 simulates how transformers 5.23 applies a plan: by names of modules and parameters, without patterns.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import transformers
from tiny import report

from accelerate import Accelerator, ParallelismConfig

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Qwen3Moe": {**EXPERTS, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Mixtral": EXPERTS,
    "GptOss": {**EXPERTS, "sliding_window": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def model_of(architecture: str) -> torch.nn.Module:
    """Make a small model, the same every time."""
    config_class = getattr(transformers, CONFIGS.get(architecture, f"{architecture}Config"))
    config = config_class(**{**SMALL, **OWN.get(architecture, {})})
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():  # norms begin as ones, and equal values would hide a mistake
            param.add_(0.05 * torch.randn_like(param))
    return model


def apply_by_name(model: torch.nn.Module, mesh: Any, plan: dict[str, str]) -> None:
    """Take names only, as transformers 5.23 does."""
    known = {**dict(model.named_modules()), **dict(model.named_parameters())}
    raise KeyError([name for name in plan if name not in known])


def refusal_of(architecture: str, style: str) -> str:
    """Return how a plan is refused that splits the first weights of experts in this way, or says nothing of experts."""
    model = model_of(architecture)
    plan = {name: own for name, own in model.tp_plan.items() if style or own != "moe_tp_experts"}
    if style:
        plan |= {name: style for name in plan if name.endswith("gate_up_proj")}
    config = ParallelismConfig(tp_size=2, dp_shard_size=-1, tp_plan=plan)
    try:
        Accelerator(cpu=True, parallelism_config=config).prepare(model)
    except ValueError as refusal:
        return str(refusal)
    return "taken"


def whole(tensor: Any) -> torch.Tensor:
    """Return a whole tensor."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def off_by(architecture: str) -> dict[str, float]:
    """Train three steps beside one process, and return the largest differences."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=-1))
    alone = model_of(architecture)
    model = copy.deepcopy(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    assert alone.lm_head.weight is alone.model.embed_tokens.weight
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert any(param is model.lm_head.weight for group in optimizer.param_groups for param in group["params"])
    worst = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)

    def note(name: str, one: Any, other: Any) -> None:
        worst[name] = max(worst[name], float((whole(one) - whole(other)).abs().max()))

    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    for step in range(3):
        tokens = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(step))
        wanted = alone(input_ids=tokens, labels=tokens).loss
        wanted.backward()
        own = tokens.chunk(shares)[share]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        note("loss", accelerator.reduce(loss.detach(), "mean"), wanted)
        expected = dict(alone.named_parameters(remove_duplicate=False))
        for name, param in model.named_parameters(remove_duplicate=False):
            assert (param.grad is None) == (expected[name].grad is None), name
            if param.grad is not None:
                note("gradients", param.grad, expected[name].grad)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        note("norm", torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 1.0)), norm)
        optimizer.step()
        optimizer.zero_grad()
        by_itself.step()
        by_itself.zero_grad()
        for name, param in model.named_parameters(remove_duplicate=False):
            note("parameters", param, expected[name])
    return worst


if __name__ == "__main__":
    if os.environ.get("PLANS_BY_NAME"):
        transformers.distributed.tensor_parallel.apply_tensor_parallelism = apply_by_name
    found: dict[str, Any] = {}
    for wanted in sys.argv[1:]:
        name, changed, style = wanted.partition(":")
        found[wanted] = refusal_of(name, style) if changed else off_by(name)
    report(**found)
