"""Keep a teacher that follows the trained model: the mean of its weights over time (EMA), on any mesh.

    meshwright launch --cpu --num_processes 2 examples/teacher_weights.py --shard

The teacher is a plain model on every process. After each step it moves a little towards the full tensors of the
trained model, whose buffers are handed over, too. The teachers of all processes stay equal to the bit, and the teacher
knows the digits: accuracy 0.9 and more.
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
def follow(teacher: nn.Module, weights, share: float) -> None:
    state = teacher.state_dict()
    for name, tensor in weights:
        state[name].lerp_(tensor, share)


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if args.shard else None)
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    model = make_model()
    teacher = make_model()
    teacher.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    weights = accelerator.weights(model)

    for _ in range(args.epochs):
        for batch, wanted in loader:
            accelerator.backward(nn.functional.cross_entropy(model(batch), wanted))
            optimizer.step()
            optimizer.zero_grad()
            follow(teacher, weights, share=0.1)

    with torch.no_grad():
        accuracy = (teacher(inputs).argmax(1) == targets).float().mean().item()
    sums = accelerator.gather(torch.stack([param.double().sum() for param in teacher.parameters()])[None])
    accelerator.print(f"accuracy {accuracy:.3f}, teachers differ by {float((sums - sums[0]).abs().max()):.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the digits")
    parser.add_argument("--shard", action="store_true", help="shard the model (two processes and more)")
    main(parser.parse_args())
