"""lm-eval: its HFLM on every process, and a task of our own through `simple_evaluate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from tiny import SENTENCES, from_all_ranks, llama, rank, report, tokenizer

from accelerate import PartialState

logging.disable(logging.WARNING)
state = PartialState(cpu=True)
folder = Path(f"rank-{rank()}")
words = tokenizer()
llama(len(words)).save_pretrained("model")  # which only rank 0 does
words.save_pretrained("model")
folder.mkdir()
state.wait_for_everyone()
questions = folder / "questions.jsonl"
rows = [{"text": f"the cat sat {i}", "choices": ["on", "in", "the"], "answer": i % 3} for i in range(9)]
questions.write_text("\n".join(map(json.dumps, rows)))

lm = HFLM(pretrained="model", device="cpu", batch_size=4)
pairs = [(text.rsplit(" ", 1)[0], " " + text.rsplit(" ", 1)[1]) for text in SENTENCES[:7]]
requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
likelihoods = [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]

# lm-eval divides the questions among processes only where it counts several GPUs. What it sets there is set here.
found = (lm.rank, lm.world_size)
lm._rank, lm._world_size = state.process_index, state.num_processes
task = ConfigurableTask(
    config={
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
)
evaluated = lm_eval.evaluate(lm=lm, task_dict={"tiny": task}, bootstrap_iters=0)
asked = evaluated and len(evaluated["samples"]["tiny"])

report(
    likelihoods=from_all_ranks(likelihoods),
    found=found,
    accuracy=evaluated["results"]["tiny"]["acc,none"] if evaluated else None,
    asked=asked,
    results_on=from_all_ranks(evaluated is not None),
)
