"""diffusers: a UNet trained as its example scripts do: accumulation, EMA, hooks, checkpoints, resume from latest."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from diffusers.utils.torch_utils import is_compiled_module
from sklearn.datasets import load_digits
from tiny import copy_of, difference, from_all_ranks, report
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__, log_level="INFO")
CHECKPOINTING_STEPS, CHECKPOINTS_TOTAL_LIMIT = 3, 2


def new_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def train(
    output_dir: Path, max_train_steps: int, resume_from_checkpoint: str | None = None, only_main_saves: bool = False
) -> dict[str, Any]:
    """Train for some optimizer steps; return the parameters, their average, and the losses."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=str(output_dir), logging_dir=str(output_dir / "logs")),
        kwargs_handlers=[InitProcessGroupKwargs()],
    )

    def save_model_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema_model.save_pretrained(str(Path(output_dir) / "unet_ema"))
            for model in models:
                unwrapped(model).save_pretrained(str(Path(output_dir) / "unet"))
                weights.pop()  # so that `save_state` does not save it a second time

    def load_model_hook(models: list[Any], input_dir: str) -> None:
        loaded = EMAModel.from_pretrained(str(Path(input_dir) / "unet_ema"), UNet2DModel)
        ema_model.load_state_dict(loaded.state_dict())
        ema_model.to(accelerator.device)
        while models:
            model = models.pop()
            saved = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            model.register_to_config(**saved.config)
            model.load_state_dict(saved.state_dict())

    def unwrapped(model: Any) -> Any:
        model = accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    set_seed(7)

    unet = new_unet()
    ema_model = EMAModel(unet.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=unet.config)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    images = torch.tensor(load_digits().images[:64], dtype=torch.float32)[:, None] / 8 - 1
    train_dataloader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
    lr_scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=20 * accelerator.num_processes,
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    ema_model.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("unet")
    steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)

    global_step, first_epoch, losses = 0, 0, []
    if resume_from_checkpoint == "latest":
        folders = [folder for folder in output_dir.iterdir() if folder.name.startswith("checkpoint")]
        latest = max(folders, key=lambda folder: int(folder.name.split("-")[1]))
        accelerator.print(f"Resuming from checkpoint {latest.name}")
        accelerator.load_state(str(latest))
        global_step = int(latest.name.split("-")[1])
        first_epoch = global_step // steps_per_epoch

    for epoch in range(first_epoch, 100):
        unet.train()
        batches = train_dataloader
        if epoch == first_epoch and global_step % steps_per_epoch:
            batches = accelerator.skip_first_batches(train_dataloader, global_step % steps_per_epoch * 2)
        for (clean_images,) in batches:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, 100, (clean_images.shape[0],), device=clean_images.device).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(unet):
                loss = F.mse_loss(unet(noisy_images, timesteps).sample.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(unet.parameters())
                global_step += 1
                if accelerator.is_main_process and global_step % CHECKPOINTING_STEPS == 0:
                    checkpoints = sorted(
                        (folder for folder in output_dir.iterdir() if folder.name.startswith("checkpoint")),
                        key=lambda folder: int(folder.name.split("-")[1]),
                    )
                    for old in checkpoints[: max(0, len(checkpoints) - CHECKPOINTS_TOTAL_LIMIT + 1)]:
                        shutil.rmtree(old)
                if global_step % CHECKPOINTING_STEPS == 0 and (accelerator.is_main_process or not only_main_saves):
                    accelerator.save_state(str(output_dir / f"checkpoint-{global_step}"))
                    logger.info("Saved state")
                losses.append(loss.detach().item())
                accelerator.log({"loss": losses[-1], "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
            if global_step >= max_train_steps:
                break
        if global_step >= max_train_steps:
            break
    accelerator.wait_for_everyone()
    model = unwrapped(unet)
    trained = copy_of(model)
    ema_model.store(unet.parameters())
    ema_model.copy_to(unet.parameters())
    if accelerator.is_main_process:
        DDPMPipeline(unet=model, scheduler=noise_scheduler).save_pretrained(str(output_dir))
    return {"trained": trained, "average": copy_of(model), "losses": losses, "lr": lr_scheduler.get_last_lr()[0]}


diffusers.utils.logging.set_verbosity_error()
whole, parts, by_main = Path("whole"), Path("parts"), Path("by_main")
for folder in (whole, parts, by_main):
    folder.mkdir(exist_ok=True)
uninterrupted = train(whole, 10)
train(parts, 6)
resumed = train(parts, 10, resume_from_checkpoint="latest")
train(by_main, 6, only_main_saves=True)
resumed_by_main = train(by_main, 10, resume_from_checkpoint="latest", only_main_saves=True)
pipeline = DDPMPipeline.from_pretrained(str(whole))
image = pipeline(num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images

report(
    checkpoints=sorted(folder.name for folder in parts.glob("checkpoint*")),
    files=sorted(path.name for path in (whole / "checkpoint-9").iterdir()),
    losses=uninterrupted["losses"],
    resumed_losses=resumed["losses"],
    checkpoints_by_main=sorted(folder.name for folder in by_main.glob("checkpoint*")),
    resumed_losses_by_main=resumed_by_main["losses"],
    sums_by_main=from_all_ranks(sum(float(tensor.sum()) for tensor in resumed_by_main["trained"].values())),
    resumed_parameters=max(from_all_ranks(difference(uninterrupted["trained"], resumed["trained"]))),
    resumed_average=max(from_all_ranks(difference(uninterrupted["average"], resumed["average"]))),
    learning_rates=[uninterrupted["lr"], resumed["lr"]],
    average_moved=difference(uninterrupted["trained"], uninterrupted["average"]),
    image_shape=list(image.shape),
)
Accelerator(cpu=True).end_training()
