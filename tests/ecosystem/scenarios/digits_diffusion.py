"""denoising-diffusion-pytorch: its own Trainer for a few steps, saved and loaded again."""

from __future__ import annotations

import vision  # noqa: F401  (declares what torchvision asks for when it is imported)

# isort: split
from pathlib import Path

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
from PIL import Image
from sklearn.datasets import load_digits
from tiny import copy_of, difference, from_all_ranks, rank, report

from accelerate import PartialState

state = PartialState(cpu=True)
images = Path("digits")
if rank() == 0:
    images.mkdir()
    for index, digit in enumerate(load_digits().images[:100]):
        Image.fromarray((digit * 15).astype("uint8")).resize((16, 16)).save(images / f"{index}.png")
state.wait_for_everyone()


def new_trainer(num_steps: int) -> Trainer:
    torch.manual_seed(0)
    diffusion = GaussianDiffusion(
        Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False), image_size=16, timesteps=4, sampling_timesteps=2
    )
    return Trainer(
        diffusion,
        str(images),
        train_batch_size=16,
        train_lr=1e-3,
        train_num_steps=num_steps,
        ema_update_every=1,
        save_and_sample_every=4,
        num_samples=1,
        calculate_fid=False,
    )


trainer = new_trainer(4)
before = copy_of(trainer.accelerator.unwrap_model(trainer.model))
trainer.train()
state.wait_for_everyone()
trained = copy_of(trainer.accelerator.unwrap_model(trainer.model))
other = new_trainer(6)
other.load(1)
loaded = difference(trained, copy_of(other.accelerator.unwrap_model(other.model)))
other.train()
last = copy_of(other.accelerator.unwrap_model(other.model))

report(
    moved=difference(before, trained),
    loaded_off_by=max(from_all_ranks(loaded)),
    steps=from_all_ranks(other.step),
    ranks_off_by=max(difference(last, theirs) for theirs in from_all_ranks(last)),
    files=sorted(path.name for path in Path("results").iterdir()),
)
