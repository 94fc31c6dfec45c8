"""transformers: Trainer trains, evaluates, predicts, saves, resumes; accumulates; in bf16; sharded by FSDP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tiny import SENTENCES, copy_of, difference, from_all_ranks, llama, report, tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

words = tokenizer()
data = Dataset.from_dict({"text": SENTENCES, "label": [i % 3 for i in range(len(SENTENCES))]}).map(
    lambda rows: words(rows["text"], padding="max_length", max_length=12), batched=True
)
odd = data.select(range(29))  # not a multiple of anything: the last round is incomplete


def new_model(dropout: float) -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def arguments(folder: str, **options: Any) -> TrainingArguments:
    ours = {
        "output_dir": folder,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**(ours | options))


def new_trainer(folder: str, *, dropout: float = 0.1, **options: Any) -> Trainer:
    return Trainer(
        model=new_model(dropout),
        args=arguments(folder, **options),
        train_dataset=data,
        eval_dataset=odd,
        compute_metrics=lambda guess: {
            "accuracy": float((guess.predictions.argmax(-1) == guess.label_ids).mean()),
            "count": len(guess.label_ids),
        },
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the parameters, gathered where they are sharded."""
    wrapped = trainer.model_wrapped
    states = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in wrapped.state_dict().items()}
    return {name.removeprefix("module."): value.detach().clone() for name, value in states.items()}


def resume(**options: Any) -> dict[str, Any]:
    """Train to the end, and once more from the checkpoint in the middle."""
    whole = new_trainer("whole", save_strategy="steps", save_steps=6, **options)
    whole.train()
    expected = whole_parameters(whole)
    resumed = new_trainer("whole", **options)
    resumed.train(resume_from_checkpoint=str(Path("whole/checkpoint-6")))
    return {
        "losses": losses(whole),
        "resumed_losses": losses(resumed),
        "resumed_off_by": max(from_all_ranks(difference(expected, whole_parameters(resumed)))),
        "files": sorted(path.name for path in Path("whole/checkpoint-6").iterdir()),
        "wrapped": type(whole.model_wrapped).__name__,
        "trainer": whole,
    }


def plain() -> dict[str, Any]:
    results = resume()
    whole = results.pop("trainer")
    evaluated = whole.evaluate()
    predicted = whole.predict(odd)
    whole.save_model("final")
    whole.accelerator.wait_for_everyone()
    saved = BertForSequenceClassification.from_pretrained("final")
    again = saved(**{name: torch.tensor(odd[name][:]) for name in ("input_ids", "attention_mask")})
    results |= {
        "evaluated": {name: evaluated[name] for name in ("eval_loss", "eval_accuracy", "eval_count")},
        "predicted": list(predicted.predictions.shape),
        # The saved model, asked without a Trainer, gives the predictions that were gathered from all processes.
        "predictions_off_by": float(np.abs(predicted.predictions - again.logits.detach().numpy()).max()),
    }
    results["accumulated"] = accumulated()
    low = new_trainer("low", bf16=True)
    low.train()
    results["bf16"] = {"losses": losses(low), "dtype": str(next(low.model.parameters()).dtype)}
    return results


def accumulated() -> dict[str, Any]:
    """Train a language model on the same tokens in one piece and in two; SGD, because Adam makes much of rounding."""
    tokens = data.select_columns(["input_ids", "attention_mask"])
    trained = []
    for size, pieces in ((8, 1), (4, 2)):
        trainer = Trainer(
            model=llama(len(words)),
            args=arguments(
                "pieces",
                optim="sgd",
                learning_rate=0.5,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=pieces,
            ),
            train_dataset=tokens,
            data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        )
        trainer.train()
        trained.append(copy_of(trainer.model))
    return {"off_by": difference(*trained), "moved": difference(trained[0], copy_of(llama(len(words))))}


def fsdp() -> dict[str, Any]:
    sgd = {"dropout": 0.0, "optim": "sgd", "learning_rate": 0.1}  # Adam makes much of rounding
    results = resume(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["BertLayer"]}, **sgd)
    sharded = results.pop("trainer")
    # The same training with a copy on every process, by DDP.
    copies = new_trainer("copies", **sgd)
    copies.train()
    results["ddp_off_by"] = difference(copy_of(copies.model), whole_parameters(sharded))
    results["kinds"] = sorted({type(parameter).__name__ for parameter in sharded.model.parameters()})
    results["evaluated"] = sharded.evaluate()["eval_count"]
    sharded.save_model("final")
    if sharded.accelerator.is_main_process:
        saved = BertForSequenceClassification.from_pretrained("final")
        results["saved_off_by"] = difference(copy_of(saved), copy_of(copies.model))
    return results


report(**{"plain": plain, "fsdp": fsdp}[sys.argv[1]]())
