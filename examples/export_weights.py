"""Write a folder of Hugging Face files from a sharded model, in bf16, without a process that holds all of it.

    meshwright launch --cpu --num_processes 2 examples/export_weights.py --shard

The main process writes each tensor as it is gathered, into several files with an index. The folder is read again and
compared with the trained model: the weights are equal after rounding to bf16.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, set_seed


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if args.shard else None)
    set_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    accelerator.weights(model, dtype=torch.bfloat16).save(args.output, max_shard_size="100KB")
    accelerator.wait_for_everyone()

    written = {}
    for file in sorted(Path(args.output).glob("*.safetensors")):
        written |= load_file(file)
    differences = sum(not torch.equal(written[name], tensor.bfloat16()) for name, tensor in accelerator.weights(model))
    files = len(list(Path(args.output).iterdir()))
    accelerator.print(f"{len(written)} tensors in {files} files, different {differences}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="exported", help="the folder")
    parser.add_argument("--shard", action="store_true", help="shard the model (two processes and more)")
    main(parser.parse_args())
