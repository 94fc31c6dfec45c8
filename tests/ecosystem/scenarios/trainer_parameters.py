"""transformers: the parameters after 30 steps of Trainer, in a file, and its losses over several lengths of data.

Run it with one accelerate, then with another.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from tiny import SENTENCES, copy_of, llama, rank, report, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import accelerate

words = tokenizer()
data = Dataset.from_dict({"text": SENTENCES}).map(
    lambda rows: words(rows["text"], truncation=True, max_length=12), batched=True, remove_columns=["text"]
)
trainer = Trainer(
    model=llama(len(words)),
    args=TrainingArguments(
        output_dir="parameters",
        max_steps=30,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        seed=11,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(words, mlm=False),
)
trainer.train()
if rank() == 0:
    torch.save(copy_of(trainer.model), sys.argv[1])
evaluated = {length: trainer.evaluate(data.select(range(length)))["eval_loss"] for length in (3, 8, 29, 33)}
report(version=accelerate.__version__, processes=trainer.args.world_size, evaluated=evaluated)
