"""Train in fp16 or bf16: layers compute in 16 bits, weights stay in 32, and small gradients are kept from vanishing.

    meshwright launch --cpu --num_processes 2 examples/mixed_precision.py --mixed_precision fp16
    meshwright launch --cpu --num_processes 2 examples/mixed_precision.py --mixed_precision bf16

Nothing in the loop changes. In fp16 `backward` multiplies the loss by a scale, and `step` divides the gradients by it;
where they overflowed, the step is skipped and the scale halved. It begins far too large here, to show that. bf16 needs
no scale. Either reaches an accuracy of 0.96 on 359 digits that are held back, on one process or two.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from meshwright import Accelerator, GradScalerKwargs, set_seed


def main(args: argparse.Namespace) -> None:
    scaling = GradScalerKwargs(init_scale=2.0**24)
    accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=[scaling])
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)
    )

    skipped = 0
    for _ in range(args.epochs):
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            skipped += accelerator.optimizer_step_was_skipped

    with accelerator.autocast():  # for what is computed outside of the model's forward pass
        product = torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)
    accelerator.print(f"computed in {product.dtype}, weights in {next(model.parameters()).dtype}")
    if accelerator.scaler is not None:
        accelerator.print(f"skipped {skipped} steps; the scale is {accelerator.scaler.get_scale():,.0f}")

    right = []
    with torch.no_grad():
        for inputs, targets in test_loader:
            right.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=-1) == targets))
    accelerator.print(f"accuracy {torch.cat(right).float().mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="fp16")
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args())
