"""Hand over the weights of a sharded model to something that serves it, every few steps.

    meshwright launch --cpu --num_processes 2 examples/serve_weights.py

`accelerator.weights(model)` yields full tensors under the names of the checkpoint, on any number of processes; all of
them iterate. Here the "engine" is a plain model on the main process, which takes the tensors one by one. After every
hand-over it answers as the trained model does: the largest difference is 0.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, FullyShardedDataParallelPlugin, set_seed


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def hand_over(weights, engine: nn.Module) -> None:
    places = engine.state_dict()
    for name, tensor in weights:  # every process iterates; each tensor is there for this moment
        places[name].copy_(tensor)


def main(args: argparse.Namespace) -> None:
    plugin = FullyShardedDataParallelPlugin() if args.shard else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model, engine = make_model(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, batch_size=32, shuffle=True))
    weights = accelerator.weights(model)
    accelerator.print(f"{len(weights.metadata())} tensors, in {len(weights.groups())} groups")

    inputs, largest = digits.tensors[0][:64], 0.0
    for step, (batch, targets) in enumerate(loader, 1):
        accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            hand_over(weights, engine)
            with torch.no_grad():
                largest = max(largest, float((engine(inputs) - model(inputs)).abs().max()))
    accelerator.print(f"the engine differs by {largest:.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=10, help="steps between two hand-overs")
    parser.add_argument("--shard", action="store_true", help="shard the model (two processes and more)")
    main(parser.parse_args())
