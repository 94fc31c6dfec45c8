"""Run the training scripts that ship inside installed packages, unmodified, under accelerate 1.15 and under ours.

Models and data are made on the spot; nothing is downloaded. Each script trains a few steps on one process and on two,
and the losses and gradient norms that `Trainer` logs have to agree. `.ci/nightly` runs this in the libraries' venv:

    python -m tests.ecosystem.published_scripts [NAME ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.ecosystem.scenarios.tiny import SENTENCES, llama, tokenizer

REFERENCE = Path(sys.prefix) / "reference"
OURS = Path(__file__).parents[2] / "src"
STEPS = 4
TOLERANCE = 1e-5
SECONDS = 600
_COMMON = (
    *("--max_steps", STEPS, "--per_device_train_batch_size", 2, "--learning_rate", "1e-3", "--logging_steps", 1),
    *("--save_strategy", "no", "--report_to", "none", "--bf16", "False", "--use_cpu", "True"),
)
_TEXT, _PAIRS, _LABELS, _PROMPTS = (
    ("text",),
    ("prompt", "chosen", "rejected"),
    ("prompt", "completion", "label"),
    ("prompt",),
)
SCRIPTS: dict[str, tuple[str, tuple[str, ...], tuple[object, ...]]] = {
    "sft": ("trl", _TEXT, ("--max_length", 16)),
    "dpo": ("trl", _PAIRS, ("--max_length", 16)),
    "kto": ("trl", _LABELS, ("--max_length", 16)),
    "reward": ("trl", _PAIRS[1:], ("--max_length", 16)),
    "grpo": (
        "trl",
        _PROMPTS,
        ("--reward_model_name_or_path", "judge", "--num_generations", 2, "--max_completion_length", 4),
    ),
    "rloo": (
        "trl",
        _PROMPTS,
        ("--reward_model_name_or_path", "judge", "--num_generations", 2, "--max_completion_length", 4),
    ),
}
"""Name -> package, columns of its data, and what it needs besides the common options."""


def make_models(folder: Path) -> None:
    """Write a tiny language model and a tiny judge, each with a tokenizer."""
    import torch
    from transformers import LlamaForSequenceClassification

    words = tokenizer()
    model = llama(len(words))
    torch.manual_seed(1)
    judge = LlamaForSequenceClassification(
        type(model.config)(**model.config.to_dict() | {"num_labels": 1, "pad_token_id": 1})
    )
    for name, made in (("model", model), ("judge", judge)):
        made.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def make_data(folder: Path, columns: tuple[str, ...]) -> Path:
    """Write samples that have these columns."""
    values = {
        "text": lambda i: SENTENCES[i],
        "prompt": lambda i: SENTENCES[i],
        "chosen": lambda i: SENTENCES[i + 1],
        "rejected": lambda i: SENTENCES[i + 2],
        "completion": lambda i: SENTENCES[i + 1],
        "label": lambda i: i % 2 == 0,
    }
    data = folder / ("data-" + "-".join(columns))
    data.mkdir(exist_ok=True)
    rows = [{column: values[column](i) for column in columns} for i in range(40)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return data


def run(name: str, world_size: int, accelerate: Path, folder: Path) -> list[dict[str, float]]:
    """Run a script and return what its trainer logged at every step."""
    package, columns, options = SCRIPTS[name]
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    script = Path(spec.origin).parent / "scripts" / f"{name}.py"
    model = "judge" if name == "reward" else "model"
    words = [
        "--model_name_or_path",
        model,
        "--dataset_name",
        make_data(folder, columns),
        "--output_dir",
        "out",
        *_COMMON,
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", world_size] if world_size > 1 else []
    variables = {
        "PYTHONPATH": str(accelerate),
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [str(word) for word in (sys.executable, *launcher, script, *words, *options)]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=SECONDS
    )
    if ended.returncode:
        raise RuntimeError("\n".join((ended.stderr or ended.stdout).strip().splitlines()[-30:]))
    return [logged for line in ended.stdout.splitlines() if (logged := _numbers(line)) and "loss" in logged]


def _numbers(line: str) -> dict[str, float]:
    """Read a line as `Trainer` prints it: a dictionary of numbers, some of them as text."""
    try:
        found: Any = json.loads(line.strip().replace("'", '"'))
        return {name: float(value) for name, value in found.items() if name in ("loss", "grad_norm", "learning_rate")}
    except (ValueError, AttributeError, TypeError):
        return {}


def largest_difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Return the largest difference of a logged number; infinite where one of them logged more."""
    if not ours or [entry.keys() for entry in ours] != [entry.keys() for entry in theirs]:
        return float("inf")
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def compare(name: str, world_size: int, folder: Path) -> bool:
    """Run a script under both, print one line, and tell whether they agree."""
    begun = time.monotonic()
    try:
        theirs, ours = (run(name, world_size, accelerate, folder) for accelerate in (REFERENCE, OURS))
        difference = largest_difference(ours, theirs)
        agrees = difference <= TOLERANCE
        losses = " ".join(f"{entry['loss']:.4f}" for entry in ours)
        result = f"{'equal' if agrees else 'DIFFERENT'} (at most {difference:.1e})  losses {losses}"
        if not agrees:
            result += f"\n    ours {ours}\n    1.15 {theirs}"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        agrees, result = False, f"FAILED\n{error}"
    print(f"{name:8} {world_size} {time.monotonic() - begun:5.0f} s  {result}", flush=True)
    return agrees


def main(names: list[str]) -> int:
    """Compare the named scripts, or all of them, on one process and on two; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="published-scripts-") as folder:
        make_models(Path(folder))
        agree = [compare(name, size, Path(folder)) for name in names or SCRIPTS for size in (1, 2)]
    print(f"{sum(agree)} of {len(agree)} runs log the same numbers under both", flush=True)
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
