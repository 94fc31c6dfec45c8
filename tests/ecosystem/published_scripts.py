"""Run published training scripts, unmodified, under accelerate 1.15 and under ours, and compare what they train.

TRL's scripts are in its installed package. The others are read from checkouts of the examples of accelerate,
transformers, diffusers and PEFT below one folder; none of their packages has them. Nothing is downloaded: models and
data are made on the spot. Each script trains a few steps on one process and on two, with the order of samples of 1.x.
Every loss, the parameters after every step and what is measured have to be bitwise equal. What was found is
recorded in `found_scripts.tsv`, from which docs/conformance.md is made. In the libraries' venv:

    python -m tests.ecosystem.published_scripts [NAME ...] [--checkouts FOLDER] [--processes NUMBER ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch

from tests.ecosystem.trained_materials import make_everything

REFERENCE = Path(sys.prefix) / "reference"
PACKAGES = Path(get_path("purelib"))
REPOSITORY = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("found_scripts.tsv")
"""Script, processes -> steps and result of its last run."""
REASONS = Path(__file__).with_name("published_scripts.tsv")
"""Script, processes -> the reason why it is not equal. Written by hand."""
SECONDS = 600


@dataclass(frozen=True)
class Script:
    """A script: where it is, below the checkouts or in a package, and its arguments."""

    path: str
    arguments: str = ""
    has_images: bool = False

    @property
    def library(self) -> str:
        """Whose script it is."""
        first = self.path.partition("/")[0]
        known = {"trl": "TRL", "pytorch": "transformers", "by_feature": "accelerate", "olora_finetuning": "PEFT"}
        if self.path.removeprefix("examples/").removeprefix("complete_") in ("nlp_example.py", "cv_example.py"):
            return "accelerate"
        return known.get(first, "PEFT" if first == "sequence_classification" else "diffusers")


_TRL = (
    "--output_dir out --max_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-3 --logging_steps 1 "
    "--save_strategy no --report_to none --bf16 False --use_cpu True --max_length 16"
)
_GENERATING = _TRL.replace("--max_length 16", "--reward_model_name_or_path judge --num_generations 2") + (
    " --max_completion_length 4"
)
_NO_TRAINER = (
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --num_train_epochs 2 --output_dir out --seed 1 "
    "--learning_rate 1e-3"
)
_TRAINER = (
    "--do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --num_train_epochs 2 "
    "--output_dir out --learning_rate 1e-3 --report_to none --save_strategy no --use_cpu"
)
_DIFFUSERS = "--resolution 32 --train_batch_size 2 --max_train_steps 5 --output_dir out --seed 1"
_SD = f"--pretrained_model_name_or_path stable-diffusion {_DIFFUSERS}"
_SDXL = f"--pretrained_model_name_or_path stable-diffusion-xl {_DIFFUSERS}"
_CAPTIONED = "--train_data_dir captioned"
_SUBJECT = "--instance_data_dir subject --instance_prompt cat"
_TRANSLATION = "--train_file translation.json --validation_file translation.json --source_lang en --target_lang de"
_PICTURES = "--data_dir pets"
_PRETRAINING = "--train_dir classes/train --image_size 32 --patch_size 4 --mask_patch_size 8 --encoder_stride 4"


def _transformers(kind: str, name: str, arguments: str, *, has_images: bool = False) -> dict[str, Script]:
    """A task of transformers' examples, without `Trainer` and with it."""
    without, with_trainer = (f"pytorch/{kind}/{name}{end}.py" for end in ("_no_trainer", ""))
    return {
        f"{name}_no_trainer": Script(without, f"{arguments} {_NO_TRAINER}", has_images),
        name: Script(with_trainer, f"{arguments} {_TRAINER}", has_images),
    }


_BY_FEATURE = (
    "automatic_gradient_accumulation", "checkpointing", "cross_validation", "ddp_comm_hook", "early_stopping",
    "gradient_accumulation", "gradient_accumulation_for_autoregressive_models", "local_sgd", "memory",
    "multi_process_metrics", "profiler", "schedule_free", "tracking",
)  # fmt: skip
SCRIPTS: dict[str, Script] = {
    "sft": Script("trl/scripts/sft.py", f"--model_name_or_path model --dataset_name data-text {_TRL}"),
    "dpo": Script("trl/scripts/dpo.py", f"--model_name_or_path model --dataset_name data-pairs {_TRL}"),
    "kto": Script("trl/scripts/kto.py", f"--model_name_or_path model --dataset_name data-labels {_TRL}"),
    "reward": Script("trl/scripts/reward.py", f"--model_name_or_path judge --dataset_name data-chosen {_TRL}"),
    "grpo": Script("trl/scripts/grpo.py", f"--model_name_or_path model --dataset_name data-prompts {_GENERATING}"),
    "rloo": Script("trl/scripts/rloo.py", f"--model_name_or_path model --dataset_name data-prompts {_GENERATING}"),
    "nlp_example": Script("examples/nlp_example.py", "--cpu"),
    "complete_nlp_example": Script("examples/complete_nlp_example.py", "--cpu --checkpointing_steps epoch"),
    "cv_example": Script("examples/cv_example.py", f"--cpu {_PICTURES}", has_images=True),
    "complete_cv_example": Script("examples/complete_cv_example.py", f"--cpu {_PICTURES}", has_images=True),
    **{name: Script(f"by_feature/{name}.py", "--cpu") for name in _BY_FEATURE},
    **_transformers(
        "language-modeling", "run_clm",
        "--model_name_or_path model --train_file text.json --validation_file text.json --block_size 16",
    ),
    **_transformers(
        "language-modeling", "run_mlm",
        "--model_name_or_path bert-base-cased --train_file text.json --validation_file text.json --max_seq_length 16",
    ),
    **_transformers(
        "language-modeling", "run_fim",
        "--model_name_or_path model --train_file text.json --validation_file text.json --block_size 16 "
        "--fim_prefix_token [CLS] --fim_middle_token [SEP] --fim_suffix_token [MASK] --fim_pad_token [PAD]",
    ),
    **_transformers(
        "text-classification", "run_glue",
        "--model_name_or_path bert-base-cased --train_file classes.json --validation_file classes.json",
    ),
    **_transformers("translation", "run_translation", f"--model_name_or_path t5 {_TRANSLATION}"),
    **_transformers(
        "summarization", "run_summarization",
        "--model_name_or_path t5 --train_file summaries.json --validation_file summaries.json",
    ),
    **_transformers(
        "token-classification", "run_ner",
        "--model_name_or_path bert-base-cased --train_file tags.json --validation_file tags.json",
    ),
    **_transformers(
        "multiple-choice", "run_swag",
        "--model_name_or_path bert-base-cased --train_file endings.json --validation_file endings.json",
    ),
    **_transformers(
        "question-answering", "run_qa",
        "--model_name_or_path bert-base-cased --train_file answers.json --validation_file answers.json "
        "--max_seq_length 32 --doc_stride 8",
    ),
    **_transformers(
        "image-classification", "run_image_classification",
        "--model_name_or_path vit --train_dir classes/train --label_column_name label --ignore_mismatched_sizes",
        has_images=True,
    ),
    **_transformers("image-pretraining", "run_mim", f"--model_name_or_path vit {_PRETRAINING}", has_images=True),
    "train_unconditional": Script(
        "unconditional_image_generation/train_unconditional.py",
        "--train_data_dir captioned --resolution 32 --train_batch_size 4 --num_epochs 1 --output_dir out",
        has_images=True,
    ),
    "train_text_to_image": Script("text_to_image/train_text_to_image.py", f"{_SD} {_CAPTIONED} --use_ema", True),
    "train_text_to_image_lora": Script("text_to_image/train_text_to_image_lora.py", f"{_SD} {_CAPTIONED}", True),
    "train_text_to_image_sdxl": Script("text_to_image/train_text_to_image_sdxl.py", f"{_SDXL} {_CAPTIONED}", True),
    "train_text_to_image_lora_sdxl": Script(
        "text_to_image/train_text_to_image_lora_sdxl.py", f"{_SDXL} {_CAPTIONED} --train_text_encoder", True
    ),
    "train_dreambooth": Script(
        "examples/dreambooth/train_dreambooth.py", f"{_SD} {_SUBJECT} --train_text_encoder", True
    ),
    "train_dreambooth_lora": Script("examples/dreambooth/train_dreambooth_lora.py", f"{_SD} {_SUBJECT}", True),
    "train_dreambooth_lora_sdxl": Script(
        "examples/dreambooth/train_dreambooth_lora_sdxl.py", f"{_SDXL} {_SUBJECT}", True
    ),
    "textual_inversion": Script(
        "examples/textual_inversion/textual_inversion.py",
        f"{_SD} --train_data_dir subject --placeholder_token <new> --initializer_token a --learnable_property object",
        True,
    ),
    "train_instruct_pix2pix": Script(
        "instruct_pix2pix/train_instruct_pix2pix.py",
        f"{_SD} --train_data_dir edited --original_image_column input_image --edited_image_column edited_image "
        "--edit_prompt_column edit_prompt",
        True,
    ),
    "olora_finetuning": Script(
        "olora_finetuning/olora_finetuning.py",
        "--base_model model --data_path data-instructions --batch_size 4 --num_epochs 1 "
        "--cutoff_len 32 --dtype float32",
    ),
    "peft_no_lora_accelerate": Script("sequence_classification/peft_no_lora_accelerate.py"),
}  # fmt: skip
"""What runs. A script of transformers, accelerate or diffusers that is not named here asks for weights or packages."""


def find(script: Script, checkouts: Path | None, packages: Path = PACKAGES) -> Path | None:
    """Return where a script is: in an installed package or below the checkouts; None where it is not."""
    if (packages / script.path).exists():
        return packages / script.path
    named = checkouts.rglob(Path(script.path).name) if checkouts else ()
    # A research project may have a folder of the same name further down.
    return min(
        (file for file in named if str(file).endswith(f"/{script.path}")),
        key=lambda file: len(file.parts),
        default=None,
    )


def run(script: Script, file: Path, world_size: int, accelerate: Path, materials: Path) -> list[dict[str, Any]]:
    """Run a script in a folder of its own; return what every rank recorded."""
    with tempfile.TemporaryDirectory(prefix="published-script-") as directory:
        folder = Path(directory)
        for made in materials.iterdir():
            (folder / made.name).symlink_to(made)
        records = folder / "records"
        records.mkdir()
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size))
        path = [accelerate, Path(__file__).with_name("stand_ins"), REPOSITORY, file.parent]
        images = {"SCRIPT_HAS_IMAGES": "1"} if script.has_images else {}
        path += [Path(sys.prefix) / "vision"] if script.has_images else []
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "SCRIPT_RECORDS": str(records),
            "ACCELERATE_USE_CPU": "1",
            "MESHWRIGHT_DATA_ORDER": "accelerate-1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
            "TQDM_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            **images,
        }
        command = [sys.executable, *(launcher if world_size > 1 else ()), str(file), *script.arguments.split()]
        ended = subprocess.run(
            command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=SECONDS
        )
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip().splitlines()
            errors = [
                line for line in said if re.match(r"(\[rank\d+\]: )?(?!.*ChildFailed)[\w.]+(Error|Exception)\b", line)
            ]
            raise RuntimeError((errors or said[-1:] or ["without a word"])[0])
        return [torch.load(record, weights_only=True) for record in sorted(records.iterdir())]


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Say how two records differ; nothing where they are bitwise equal."""
    if len(ours) != len(theirs) or not ours:
        return f"records of {len(ours)} ranks, with 1.15 of {len(theirs)}"
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if all(a[what] == b[what] for what in ("losses", "steps", "measured")):
            continue
        if any(len(a[what]) != len(b[what]) for what in ("losses", "steps", "measured")):
            counts = [" ".join(f"{len(x[what])} {what}" for what in ("losses", "steps", "measured")) for x in (a, b)]
            return f"rank {rank}: {counts[0]}, with 1.15 {counts[1]}"
        loss = max((abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)), default=0.0)
        first = next((i for i, (x, y) in enumerate(zip(a["steps"], b["steps"], strict=True)) if x != y), "none")
        last = max((float((x - y).abs().max()) for x, y in zip(a["last"], b["last"], strict=True)), default=0.0)
        measured = sum(x != y for x, y in zip(a["measured"], b["measured"], strict=True))
        return (
            f"rank {rank}: losses by {loss:.1e}, parameters by {last:.1e} (first at step {first}), {measured} measures"
        )
    return ""


def compare(name: str, world_size: int, checkouts: Path | None, materials: Path) -> str:
    """Run a script under both, print one row of the table, and return "equal" or what else came of it."""
    began = time.monotonic()
    steps = ""
    file = find(SCRIPTS[name], checkouts)
    if file is None:
        result = "not there"
    else:
        try:
            under = "1.15"
            theirs = run(SCRIPTS[name], file, world_size, REFERENCE, materials)
            under = "ours"
            ours = run(SCRIPTS[name], file, world_size, REPOSITORY / "src", materials)
            result = difference(ours, theirs) or "equal"
            steps = str(len(ours[0]["steps"])) if ours else ""
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            result = f"FAILED with {under}: {error}"
    print(f"| {name} | {world_size} | {steps} | {time.monotonic() - began:.0f} | {result} |", flush=True)
    if file is not None:
        write_found(read_found() | {(name, world_size): (steps, result)})
    return result


def read_found() -> dict[tuple[str, int], tuple[str, str]]:
    """Return steps and result of the last run of each script, by name and number of processes."""
    rows = [line.split("\t") for line in FOUND.read_text(encoding="utf-8").splitlines()[1:]] if FOUND.exists() else []
    return {(name, int(size)): (steps, result) for name, size, steps, result in rows}


def read_reasons() -> dict[tuple[str, int], str]:
    """Return why scripts are not equal, by name and number of processes."""
    rows = [line.split("\t") for line in REASONS.read_text(encoding="utf-8").splitlines()[1:]]
    return {(name, int(size)): reason for name, size, reason in rows}


def write_found(found: dict[tuple[str, int], tuple[str, str]]) -> None:
    """Record what was found, in the order of the scripts."""
    rows = [(name, size, *found[name, size]) for name in SCRIPTS for size in (1, 2) if (name, size) in found]
    lines = ["\t".join(map(str, row)) + "\n" for row in rows]
    FOUND.write_text("script\tprocesses\tsteps\tresult\n" + "".join(lines), encoding="utf-8")


def main(words: list[str]) -> int:
    """Compare the named scripts, or all of them, on one process and on two; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2))
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="published-scripts-") as folder:
        make_everything(Path(folder))
        print("| script | processes | steps | seconds | result |\n| --- | ---: | ---: | ---: | --- |", flush=True)
        results = [
            compare(name, size, options.checkouts, Path(folder))
            for name in options.names or SCRIPTS
            for size in options.processes
        ]
    found = [result for result in results if result != "not there"]
    print(f"{found.count('equal')} of {len(found)} runs train the same, bitwise, under both", flush=True)
    return 0 if found.count("equal") == len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
