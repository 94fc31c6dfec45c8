"""Plan training scripts of libraries, unmodified, on models of well-known sizes: the table of docs/plan.md.

TRL's scripts are in its installed package. The others are read from checkouts of transformers, diffusers and PEFT below
one folder. Nothing is downloaded: configs, tokenizers and data are made on the spot. In the libraries' venv:

    python -m tests.ecosystem.planned_scripts FOLDER [NAME ...]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ecosystem.materials import make_images, make_materials

SECONDS = 900
TWO, EIGHT = ("--gpus", "2xA100-80GB"), ("--gpus", "8xH100", "--use_fsdp")
_TRL = "--output_dir out --max_steps 4 --per_device_train_batch_size 4 --save_strategy no --report_to none"
_STABLE_DIFFUSION = "--pretrained_model_name_or_path stable-diffusion --train_data_dir captioned --resolution 512"


@dataclass(frozen=True)
class Script:
    """A script, its arguments, and the devices that it is planned for."""

    name: str
    arguments: str
    devices: tuple[str, ...] = TWO
    has_images: bool = False

    @property
    def words(self) -> list[str]:
        """The arguments, with what differs in tests."""
        return self.arguments.split()


SCRIPTS = {
    "sft": Script("trl/scripts/sft.py", f"--model_name_or_path llama --dataset_name data-text --max_length 512 {_TRL}"),
    "dpo": Script(
        "trl/scripts/dpo.py", f"--model_name_or_path llama --dataset_name data-pairs --max_length 512 {_TRL}"
    ),
    "kto": Script(
        "trl/scripts/kto.py", f"--model_name_or_path llama --dataset_name data-labels --max_length 512 {_TRL}"
    ),
    "reward": Script(
        "trl/scripts/reward.py", f"--model_name_or_path judge --dataset_name data-chosen --max_length 512 {_TRL}"
    ),
    "grpo": Script(
        "trl/scripts/grpo.py",
        "--model_name_or_path llama --dataset_name data-prompts --reward_model_name_or_path judge --num_generations 4 "
        f"--max_completion_length 8 {_TRL}",
    ),
    "run_clm": Script(
        "run_clm.py",
        "--model_name_or_path llama --train_file text.json --do_train --block_size 512 --output_dir out --bf16 "
        "--per_device_train_batch_size 4 --report_to none --save_strategy no",
        EIGHT,
    ),
    "run_clm_no_trainer": Script(
        "run_clm_no_trainer.py",
        "--model_name_or_path llama --train_file text.json --validation_file text.json --block_size 512 "
        "--per_device_train_batch_size 4",
    ),
    "run_mlm": Script(
        "run_mlm.py",
        "--model_name_or_path bert --train_file text.json --do_train --max_seq_length 512 --output_dir out --bf16 "
        "--per_device_train_batch_size 16 --report_to none --save_strategy no",
    ),
    "run_glue_no_trainer": Script(
        "run_glue_no_trainer.py",
        "--model_name_or_path bert --train_file classes.json --validation_file classes.json --max_length 128 "
        "--pad_to_max_length --per_device_train_batch_size 32",
    ),
    "run_translation_no_trainer": Script(
        "run_translation_no_trainer.py",
        "--model_name_or_path t5-base --train_file translation.json --validation_file translation.json "
        "--source_lang en --target_lang de --max_source_length 128 --max_target_length 128 "
        "--per_device_train_batch_size 16",
    ),
    "run_image_classification_no_trainer": Script(
        "run_image_classification_no_trainer.py",
        "--model_name_or_path vit --train_dir classes/train --label_column_name label --ignore_mismatched_sizes "
        "--per_device_train_batch_size 8",
        has_images=True,
    ),
    "train_text_to_image": Script(
        "train_text_to_image.py",
        f"{_STABLE_DIFFUSION} --mixed_precision fp16 --train_batch_size 1 --max_train_steps 4",
        has_images=True,
    ),
    "train_text_to_image_lora": Script(
        "train_text_to_image_lora.py",
        f"{_STABLE_DIFFUSION} --mixed_precision bf16 --train_batch_size 4 --rank 8 --max_train_steps 4",
        has_images=True,
    ),
    "train_unconditional": Script(
        "train_unconditional.py",
        "--train_data_dir captioned --resolution 64 --train_batch_size 8 --num_epochs 1 --mixed_precision bf16",
        has_images=True,
    ),
    "peft_lora_seq2seq": Script("peft_lora_seq2seq_accelerate_fsdp.py", "", EIGHT),
    "olora_finetuning": Script(
        "olora_finetuning.py",
        "--base_model llama --data_path data-instructions --batch_size 4 --dtype bfloat16",
    ),
}


def find(script: Script, checkouts: Path | None) -> Path:
    """Return where a script is: in an installed package, or below the checkouts."""
    packages = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    if (packages / script.name).exists():
        return packages / script.name
    return next((checkouts or packages).rglob(script.name))


def plan(script: Script, file: Path, folder: Path) -> dict[str, Any]:
    """Plan a script; return its plan, or `{"refused": ...}`."""
    repository = Path(__file__).parents[2]
    path = [str(repository / "src"), *([str(Path(sys.prefix) / "vision"), str(folder)] if script.has_images else [])]
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    words = [
        "-m",
        "meshwright",
        "plan",
        *script.devices,
        "--json",
        "plan.json",
        file,
        *script.words,
    ]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        return {"refused": done.stderr.strip()[-4000:]}
    return dict(json.loads((folder / "plan.json").read_text()))


def main(checkouts: Path, names: list[str]) -> None:
    """Plan the named scripts, or all of them, one after the other, and print one row each."""
    with tempfile.TemporaryDirectory(prefix="planned-scripts-") as directory:
        folder = Path(directory)
        make_materials(folder)
        make_images(folder)
        _make_packages(folder)
        print("| script | parameters, of them trained | devices | memory of a rank | CPU seconds | guesses |")
        for name in names or SCRIPTS:
            began = _processor_seconds()
            found = plan(SCRIPTS[name], find(SCRIPTS[name], checkouts), folder)
            print(_row(name, found, _processor_seconds() - began), flush=True)


def _make_packages(folder: Path) -> None:
    """Write what scripts look for: torchvision's operators, which are not compiled here, and a package for logs."""
    operators = Path(__file__).with_name("scenarios") / "vision.py"
    (folder / "sitecustomize.py").write_text(operators.read_text())
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "__init__.py").touch()  # a plan logs nothing
    (folder / "tensorboard-2.0.dist-info").mkdir()
    (folder / "tensorboard-2.0.dist-info" / "METADATA").write_text("Name: tensorboard\nVersion: 2.0\n")


def _row(name: str, found: dict[str, Any], seconds: float) -> str:
    devices = " ".join(SCRIPTS[name].devices[1:])
    if "refused" in found:
        return f"| {name} | | {devices} | refused | {seconds:.0f} | |\n{found['refused']}"
    parameters = f"{found['parameters'] / 1e6:.1f} M, {found['trained_parameters'] / 1e6:.1f} M"
    memory = max(rank["memory"]["total"] for rank in found["ranks"]) / 2**30
    guesses = "; ".join(found["guesses"])
    return f"| {name} | {parameters} | {devices} | {memory:.2f} GiB | {seconds:.0f} | {guesses} |"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
