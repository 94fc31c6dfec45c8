"""diffusers: a pipeline of three models with `enable_model_cpu_offload` and `enable_sequential_cpu_offload`.

diffusers refuses to offload from a CPU to a CPU: the device is the tests' simulated accelerator, which really computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests import simulated_accelerator

simulated_accelerator.register()  # before anything else asks which devices there are

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from tiny import report, tokenizer  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel  # noqa: E402

words = tokenizer()
words.model_max_length = 12


def new_pipeline() -> Any:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=3,
            eos_token_id=2,
            pad_token_id=1,
        )
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=words,
        unet=unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any) -> torch.Tensor:
    made = pipeline(
        "the cat sat", num_inference_steps=3, output_type="pt", generator=torch.Generator().manual_seed(0)
    ).images
    return made.cpu()


def places(pipeline: Any) -> dict[str, str]:
    """Say where the weights of each model are."""
    return {
        name: str(next(model.parameters()).device)
        for name, model in pipeline.components.items()
        if isinstance(model, torch.nn.Module)
    }


def note_device(devices: list[torch.device], module: Any, args: Any, output: torch.Tensor) -> None:
    devices.append(output.device)


plain, on_device = image(new_pipeline()), image(new_pipeline().to("gpu:0"))
results: dict[str, Any] = {}
for method in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
    pipeline = new_pipeline()
    getattr(pipeline, method)(device="gpu:0")
    computed_on: list[torch.device] = []
    note = partial(note_device, computed_on)
    pipeline.unet.conv_in.register_forward_hook(note)
    pipeline.vae.post_quant_conv.register_forward_hook(note)
    before = places(pipeline)
    made = [image(pipeline), image(pipeline)]
    results[method] = {
        "off_by": [float((one - on_device).abs().max()) for one in made],
        "before": before,
        "after": places(pipeline),
        "computed_on": sorted(set(map(str, computed_on))),
    }
    pipeline.remove_all_hooks()
report(cpu_off_by=float((on_device - plain).abs().max()), spread=float(plain.std()), **results)
