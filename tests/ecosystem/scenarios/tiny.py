"""What scenarios share: models made on the spot, and the one line that a scenario prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENTENCES = ["the cat sat on the mat", "a dog ran in the park", "hello world this is a test"] * 16


def tokenizer() -> Any:
    """Return a tokenizer that knows the words of `SENTENCES`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "eos", "cls", "sep", "mask")}
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=list(special.values())))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(vocab_size: int, num_layers: int = 2, **options: Any) -> Any:
    """Return a language model of a few thousand parameters, the same one every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    return LlamaForCausalLM(config)


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of parameters with the same names."""
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def copy_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's parameters."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_all_ranks(value: Any) -> list[Any]:
    """Return the value of every rank, by torch alone: what is judged here does not judge itself."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(**results: Any) -> None:
    """Print the results of a scenario, once."""
    if rank() == 0:
        print("\n" + json.dumps({"scenario": Path(sys.argv[0]).stem, **results}), flush=True)
