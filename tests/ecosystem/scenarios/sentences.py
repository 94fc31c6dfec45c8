"""sentence-transformers: what it says about this package, and a short training where it lets us."""

from __future__ import annotations

import importlib.metadata

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.util import is_accelerate_available, is_training_available
from tiny import SENTENCES, from_all_ranks, rank, report, tokenizer
from transformers import BertConfig, BertModel

words = tokenizer()
folder = f"bert-{rank()}"
BertModel(
    BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
).save_pretrained(folder)
words.save_pretrained(folder)
model = SentenceTransformer(modules=[Transformer(folder, max_seq_length=16), Pooling(32)], device="cpu")

try:
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir="sentences", max_steps=6, logging_steps=1, learning_rate=1e-3, use_cpu=True, report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    refusal = None
except RuntimeError as error:
    history, refusal = [], str(error)

report(
    home_page=importlib.metadata.metadata("accelerate").get("Home-page"),
    accelerate_available=is_accelerate_available(),
    training_available=is_training_available(),
    refusal=refusal,
    losses=history,
    steps=from_all_ranks(len(history)),
    shape=list(model.encode("the cat").shape),
)
