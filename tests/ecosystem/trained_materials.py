"""Write what published training scripts read: tiny models with weights, under the names scripts ask for, and data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.ecosystem.materials import make_tokenizer
from tests.ecosystem.scenarios.tiny import SENTENCES, llama

ROWS = 45
"""An odd number, so that the last batch is smaller on one process and padded on two."""


def make_everything(folder: Path) -> None:
    """Write all models and all data."""
    _make_models(folder)
    _make_stable_diffusion(folder / "stable-diffusion", xl=False)
    _make_stable_diffusion(folder / "stable-diffusion-xl", xl=True)
    _make_texts(folder)
    _make_images(folder)


def _make_models(folder: Path) -> None:
    import torch
    import transformers as t

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = t.BertConfig(**small, vocab_size=64, max_position_embeddings=128)
    judge = {**llama(64).config.to_dict(), "num_labels": 1, "pad_token_id": 1}
    picture = t.ViTConfig(**small, image_size=32, patch_size=4, encoder_stride=4)
    models: dict[str, Callable[[], Any]] = {
        "model": lambda: llama(64),
        "judge": lambda: t.LlamaForSequenceClassification(t.LlamaConfig(**judge)),
        "bert-base-cased": lambda: t.BertForMaskedLM(bert),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, pad_token_id=1,
                       eos_token_id=2, decoder_start_token_id=1)
        ),
        "vit": lambda: t.ViTForMaskedImageModeling(picture),
    }  # fmt: skip
    for name, make in models.items():
        torch.manual_seed(1)
        make().save_pretrained(folder / name)
        make_tokenizer(folder / name)
    t.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")


def _make_stable_diffusion(folder: Path, *, xl: bool) -> None:
    import diffusers as d
    import torch
    import transformers as t

    torch.manual_seed(2)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    text = t.CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        projection_dim=32, bos_token_id=len(vocabulary) - 2, eos_token_id=len(vocabulary) - 1, pad_token_id=1,
    )  # fmt: skip
    texts = {"text_encoder": t.CLIPTextModel(text)}
    tokenizers = {"tokenizer": "CLIPTokenizer"}
    more: dict[str, Any] = {}
    if xl:
        texts["text_encoder_2"] = t.CLIPTextModelWithProjection(text)
        tokenizers["tokenizer_2"] = "CLIPTokenizer"
        more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": 1,
                "projection_class_embeddings_input_dim": 8 * 6 + 32}  # fmt: skip
    parts = {
        **texts,
        "unet": d.UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=64 if xl else 32, **more,
        ),
        "vae": d.AutoencoderKL(
            block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4, sample_size=32,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "scheduler": d.DDPMScheduler(),
    }  # fmt: skip
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    for name in tokenizers:
        _write(folder / name / "vocab.json", {word: i for i, word in enumerate(vocabulary)})
        (folder / name / "merges.txt").write_text("#version: 0.2\n")
        _write(folder / name / "tokenizer_config.json", {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"})
    index = {name: [type(part).__module__.partition(".")[0], type(part).__name__] for name, part in parts.items()}
    index |= {name: ["transformers", kind] for name, kind in tokenizers.items()}
    kind = "StableDiffusionXLPipeline" if xl else "StableDiffusionPipeline"
    _write(folder / "model_index.json", {"_class_name": kind, **index})


def _make_texts(folder: Path) -> None:
    kinds: dict[str, Callable[[int], Mapping[str, Any]]] = {
        "text.json": lambda i: {"text": " ".join(SENTENCES[i : i + 3])},
        "classes.json": lambda i: {"sentence": SENTENCES[i], "label": i % 2},
        "translation.json": lambda i: {"translation": {"en": SENTENCES[i], "de": SENTENCES[i + 1]}},
        "summaries.json": lambda i: {"article": SENTENCES[i], "highlights": SENTENCES[i + 1]},
        "tags.json": lambda i: {
            "tokens": SENTENCES[i].split(), "ner_tags": [w[0].upper() for w in SENTENCES[i].split()]
        },
        "endings.json": lambda i: {
            "sent1": SENTENCES[i], "sent2": "the", "label": i % 4, **{f"ending{k}": SENTENCES[i + k] for k in range(4)}
        },
        "answers.json": lambda i: {
            "id": str(i), "question": SENTENCES[i + 1], "context": SENTENCES[i],
            "answers": {"text": [SENTENCES[i][:5]], "answer_start": [0]},
        },
        "data-text/train.jsonl": lambda i: {"text": SENTENCES[i]},
        "data-pairs/train.jsonl": lambda i: {
            "prompt": SENTENCES[i], "chosen": SENTENCES[i + 1], "rejected": SENTENCES[i + 2]
        },
        "data-chosen/train.jsonl": lambda i: {"chosen": SENTENCES[i + 1], "rejected": SENTENCES[i + 2]},
        "data-labels/train.jsonl": lambda i: {
            "prompt": SENTENCES[i], "completion": SENTENCES[i + 1], "label": i % 2 == 0
        },
        "data-prompts/train.jsonl": lambda i: {"prompt": SENTENCES[i]},
        "data-instructions/train.jsonl": lambda i: {"instruction": SENTENCES[i], "output": SENTENCES[i + 1]},
    }  # fmt: skip
    for name, row in kinds.items():
        _write_rows(folder / name, [row(i) for i in range(ROWS)])
    for split in ("train", "validation", "test"):
        rows = [
            {"sentence1": SENTENCES[i], "sentence2": SENTENCES[i + 1], "label": i % 3 % 2, "idx": i}
            for i in range(ROWS)
        ]
        _write_rows(folder / "nyu-mll" / "glue" / f"{split}.jsonl", rows)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation", "test"))
    (folder / "nyu-mll" / "glue" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    )


def _make_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0)
    places = ("captioned/train", "classes/train/{kind}", "pets", "edited/train", "subject")
    names = {"pets": "{kind}_{i}.jpg"}
    for i in range(13):
        image = Image.fromarray(pixels.integers(0, 255, (40, 40, 3), dtype=np.uint8))
        for place in places:
            kind = ("cat", "dog")[i % 2]
            file = folder / place.format(kind=kind) / names.get(place, "{i}.png").format(kind=kind, i=i)
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    rows = [{"file_name": f"{i}.png", "text": SENTENCES[i]} for i in range(13)]
    _write_rows(folder / "captioned" / "train" / "metadata.jsonl", rows)
    rows = [
        {"input_image_file_name": f"{i}.png", "edited_image_file_name": f"{12 - i}.png", "edit_prompt": SENTENCES[i]}
        for i in range(13)
    ]
    _write_rows(folder / "edited" / "train" / "metadata.jsonl", rows)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def _write_rows(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
