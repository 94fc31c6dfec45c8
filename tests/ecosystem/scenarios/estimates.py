"""transformers: what `accelerate estimate-memory` says of a folder, beside what the model itself weighs and keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from tiny import llama, report
from torch import Tensor

from meshwright.commands.cli import main

BATCH, LENGTH = 2, 64


def estimated(*words: object) -> dict[str, Any]:
    with redirect_stdout(StringIO()) as printed:
        main(["estimate-memory", *map(str, words), "--batch_size", str(BATCH), "--json"])
    return dict(json.loads(printed.getvalue()))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


model = llama(vocab_size=1000, num_layers=3).train()
model.config.architectures = ["LlamaForCausalLM"]
model.config.save_pretrained("llama")
own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
kept: list[Tensor] = []


def keep(tensor: Tensor) -> Tensor:
    if tensor.untyped_storage().data_ptr() not in own:
        kept.append(tensor)
    return tensor


with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    outputs = model(input_ids=tokens, labels=tokens)

dtypes = ("--dtypes", "float32", "float16", "int4")
report(
    of_the_folder=estimated("llama", "--sequence_length", LENGTH, *dtypes),
    of_the_file=estimated("llama/config.json", "--sequence_length", LENGTH, *dtypes),
    weights=bytes_of([*model.parameters(), *model.buffers()]),
    one_layer=bytes_of(model.model.layers[0].parameters()),
    kept=bytes_of([*kept, outputs.logits]),  # a loop holds its outputs during the backward pass
)
