"""TRL: SFTTrainer makes a few steps; the files that its command line trains from."""

from __future__ import annotations

import json
from pathlib import Path

from datasets import Dataset
from tiny import SENTENCES, from_all_ranks, llama, report, tokenizer
from trl import SFTConfig, SFTTrainer

words = tokenizer()
trainer = SFTTrainer(
    model=llama(len(words)),
    args=SFTConfig(
        output_dir="sft",
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=16,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"text": SENTENCES}),
    processing_class=words,
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

if trainer.accelerator.is_main_process:
    llama(len(words)).save_pretrained("model")
    words.save_pretrained("model")
    Path("data").mkdir(exist_ok=True)
    Path("data/train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))

report(losses=losses, steps=from_all_ranks(trainer.state.global_step), processes=trainer.accelerator.num_processes)
