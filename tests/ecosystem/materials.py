"""Write what a library's training script reads: configs, tokenizers, metrics and data, without any weights.

A plan reads no weights. The models have the sizes of well-known ones, or are tiny for tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SENTENCES = ("the cat sat on the mat", "a dog ran in the park", "hello world this is a test")
SPECIAL = tuple(f"[{name}]" for name in ("UNK", "PAD", "EOS", "CLS", "SEP", "MASK"))
_PAD, _EOS = 1, 2


def make_materials(folder: Path, *, tiny: bool = False) -> None:
    """Write models, data of text, and metrics."""
    for name, config in _models(tiny).items():
        _write(folder / name / "config.json", config)
        make_tokenizer(folder / name)
    make_texts(folder)
    _make_stable_diffusion(folder / "stable-diffusion")
    for name, value in (("accuracy", "int32"), ("sacrebleu", "string")):
        _write_text(folder / name / f"{name}.py", _METRIC.format(value=value))
    _write(folder / "vit" / "preprocessor_config.json", _IMAGE_PROCESSOR | {"size": {"height": 224, "width": 224}})


def _models(tiny: bool) -> dict[str, dict[str, Any]]:
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 1024,
             "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
             "max_position_embeddings": 2048, "pad_token_id": _PAD, "eos_token_id": _EOS}  # fmt: skip
    if tiny:
        llama |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_ff": 3072, "d_kv": 64,
          "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "vocab_size": 32128, "is_encoder_decoder": True,
          "decoder_start_token_id": _PAD, "pad_token_id": _PAD, "eos_token_id": _EOS}  # fmt: skip
    return {
        "llama": llama,
        "judge": llama | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
        "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "pad_token_id": _PAD},
        "t5-base": t5,
        "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    }


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows the words of `SENTENCES`."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for i, token in enumerate(SPECIAL)
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {w: i for i, w in enumerate((*SPECIAL, *words))}, "unk_token": SPECIAL[0]}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    data = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model, **nothing}
    _write(folder / "tokenizer.json", data)
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def make_texts(folder: Path) -> None:
    """Write data of text: one file, or one folder, per kind."""
    kinds: dict[str, Callable[[int], Mapping[str, Any]]] = {
        "text.json": lambda i: {"text": _text(i, 120)},
        "classes.json": lambda i: {"sentence": _text(i, 30), "label": i % 2},
        "translation.json": lambda i: {"translation": {"en": _text(i, 60), "de": _text(i + 1, 60)}},
        "data-text/train.jsonl": lambda i: {"text": _text(i, 60)},
        "data-pairs/train.jsonl": lambda i: {
            "prompt": _text(i, 10),
            "chosen": _text(i + 1, 40),
            "rejected": _text(i, 40),
        },
        "data-chosen/train.jsonl": lambda i: {"chosen": _text(i + 1, 60), "rejected": _text(i + 2, 60)},
        "data-labels/train.jsonl": lambda i: {"prompt": _text(i, 10), "completion": _text(i, 40), "label": i % 2 == 0},
        "data-prompts/train.jsonl": lambda i: {"prompt": _text(i, 4)},
        "data-instructions/train.jsonl": lambda i: {"instruction": _text(i, 4), "output": _text(i, 60)},
        f"{_PHRASES}_train.jsonl": lambda i: {"sentence": _text(i, 20), "label": "the cat"},
        f"{_PHRASES}_val.jsonl": lambda i: {"sentence": _text(i, 20), "label": "the cat"},
    }
    for name, row in kinds.items():
        _write_text(folder / name, "\n".join(json.dumps(row(i)) for i in range(256)))


_PHRASES = "temp/data/FinancialPhraseBank-v1.0/financial_phrase_bank"
"""Where PEFT's script looks for its data."""


def make_images(folder: Path) -> None:
    """Write pictures with captions, and pictures in two classes."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0)
    for i in range(48):
        image = Image.fromarray(pixels.integers(0, 255, (256, 256, 3), dtype=np.uint8))
        for place in (folder / "captioned" / "train", folder / "classes" / "train" / ("cat", "dog")[i % 2]):
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{i}.png")
    rows = [json.dumps({"file_name": f"{i}.png", "text": _text(i, 1)}) for i in range(48)]
    _write_text(folder / "captioned" / "train" / "metadata.jsonl", "\n".join(rows))


def _make_stable_diffusion(folder: Path) -> None:
    """Write the parts of Stable Diffusion 1.5; its text encoder's tokenizer knows letters only."""
    parts = {
        "unet": {"_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768},
        "vae": {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
                "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
                "latent_channels": 4, "sample_size": 512},
        "text_encoder": {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "hidden_size": 768,
                         "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    }  # fmt: skip
    for name, config in parts.items():
        _write(folder / name / "config.json", config)
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": "DDPMScheduler"})
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    _write(folder / "tokenizer" / "vocab.json", {word: i for i, word in enumerate(vocabulary)})
    _write_text(folder / "tokenizer" / "merges.txt", "#version: 0.2\n")
    tokenizer = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    _write(folder / "tokenizer" / "tokenizer_config.json", tokenizer)
    libraries = {"unet": "diffusers", "vae": "diffusers", "scheduler": "diffusers", "text_encoder": "transformers",
                 "tokenizer": "transformers"}  # fmt: skip
    kinds = {name: config.get("_class_name", "CLIPTextModel") for name, config in parts.items()}
    kinds |= {"scheduler": "DDPMScheduler", "tokenizer": "CLIPTokenizer"}
    index = {name: [library, kinds[name]] for name, library in libraries.items()}
    _write(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline", **index})


def _text(number: int, sentences: int) -> str:
    return " ".join(SENTENCES[(number + i) % len(SENTENCES)] for i in range(sentences))


def _write(path: Path, data: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(data))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


_IMAGE_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "rescale_factor": 1 / 255,
}  # fmt: skip
_METRIC = '''import datasets
import evaluate


class Metric(evaluate.Metric):
    """A metric that is there: no hub is asked for it."""

    def _info(self):
        value = datasets.Value("{value}")
        features = datasets.Features({{"predictions": value, "references": value}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {{"score": 0.0}}
'''
