"""Right training scripts with other libraries: `library_script.py KIND`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

KIND = sys.argv[1]


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of different lengths, so that every batch has another number of tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, 90, (12,), generator=generator)
        kept = torch.arange(12) < 3 + index % 9
        return {
            "input_ids": tokens,
            "attention_mask": kept.long(),
            "labels": torch.where(kept, tokens, torch.full_like(tokens, -100)),
        }


def make_model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def train_by_trainer(folder: str, accumulation: int) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation, max_steps=3, warmup_steps=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(make_model(), arguments, train_dataset=Texts()).train()


def train_by_trl(folder: str) -> None:
    import datasets
    import trl

    rows = [{name: value.tolist() for name, value in Texts()[index].items()} for index in range(64)]
    arguments = trl.SFTConfig(
        folder, per_device_train_batch_size=4, max_steps=3, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
    )  # fmt: skip

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}

    dataset = datasets.Dataset.from_list(rows)
    tokenizer = make_tokenizer()
    trl.SFTTrainer(
        make_model(), arguments, train_dataset=dataset, data_collator=collate, processing_class=tokenizer
    ).train()


def make_tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(94))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def train_diffusion() -> None:
    import diffusers

    from meshwright import Accelerator, set_seed

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noise_of = diffusers.DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rate: Any = diffusers.optimization.get_cosine_schedule_with_warmup(optimizer, 2, 20)
    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    for batch in loader:
        noise = torch.randn_like(batch)
        times = torch.randint(0, 100, (len(batch),))
        with accelerator.accumulate(model):
            seen = model(noise_of.add_noise(batch, noise, times), times, return_dict=False)[0]
            accelerator.backward(F.mse_loss(seen, noise))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    if KIND == "diffusers":
        train_diffusion()
        return
    with tempfile.TemporaryDirectory() as folder:
        if KIND == "trl":
            train_by_trl(folder)
        else:
            train_by_trainer(folder, 2 if KIND == "trainer_accumulating" else 1)


if __name__ == "__main__":
    main()
