"""Train a small model of a family, as transformers builds it or as `ours` does.

python train.py llama --layers 9 --library
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PipelineConfig

LENGTH, VOCABULARY, WIDTH, HEADS = 16, 128, 64, 4


def library_model(family: str, layers: int) -> Any:
    """Return a model of transformers."""
    import transformers as t

    size = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH}
    depth = {"num_hidden_layers": layers, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    if family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**size, **depth, num_key_value_heads=2))
    if family == "mixtral":
        experts = t.MixtralConfig(**size, **depth, num_key_value_heads=2, num_local_experts=4)
        return t.MixtralForCausalLM(experts).bfloat16()  # the kernel of its experts takes nothing else
    if family == "bert":
        return t.BertForMaskedLM(t.BertConfig(**size, **depth))
    if family == "gpt2":
        shape = {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS, "n_positions": LENGTH}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, **shape))
    shape = {"d_model": WIDTH, "d_ff": 3 * WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS}
    config = t.T5Config(vocab_size=VOCABULARY, num_layers=layers, decoder_start_token_id=0, **shape)
    return t.T5ForConditionalGeneration(config)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    args = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if args.sharded else None
    stages = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=12)) if args.pipeline else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=stages)
    if args.library:
        model = library_model(args.family, args.layers)
    else:
        from ours import model_of

        model = model_of(args.family, args.layers)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    rows, batch_size = (576, 192) if args.pipeline else (64, 4)
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH) % VOCABULARY
    loader: Any = DataLoader(tokens, batch_size=batch_size)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        if args.pipeline:
            accelerator.forward_backward(model, batch, loss_fn=lambda loss: loss)
        else:
            accelerator.backward(model(input_ids=batch, labels=batch).loss if args.library else model(batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
