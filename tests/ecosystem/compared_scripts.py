"""Run `meshwright compare` on published training scripts, unmodified, as a user does who has both packages.

The scripts are those of `published_scripts`, two of each kind. The environment is made for this: real libraries,
accelerate 1.15, and meshwright as a wheel of this checkout. In the venv of the tests:

    python -m tests.ecosystem.compared_scripts [NAME ...] [--checkouts FOLDER] [--processes 1,2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.door.environments import Environment, build_wheel, make_environment
from tests.ecosystem.libraries import PYTHON, REPOSITORY, folder
from tests.ecosystem.published_scripts import SCRIPTS, find

KINDS = {
    "accelerate": ("nlp_example", "gradient_accumulation"),
    # run_clm_no_trainer asks for DistributedType.TPU, and fails under 1.15 itself
    "transformers without Trainer": ("run_glue_no_trainer", "run_ner_no_trainer"),
    "transformers Trainer": ("run_glue", "run_clm"),
    "diffusers": ("train_text_to_image", "train_text_to_image_lora"),
    "TRL": ("sft", "dpo"),
    "PEFT": ("olora_finetuning", "peft_no_lora_accelerate"),
}
STEPS = 4


def compare(
    name: str, environment: Environment, materials: Path, checkouts: Path | None, processes: str
) -> tuple[str, float]:
    """Compare one script; return what was said of it, and the seconds that it took."""
    script = SCRIPTS[name]
    file = find(script, checkouts, environment.packages)
    if file is None:
        return "not there", 0.0
    path = [Path(__file__).with_name("stand_ins"), REPOSITORY, file.parent]
    variables = {"SCRIPT_HAS_IMAGES": "1"} if script.has_images else {}
    path += [Path(folder("vision"))] if script.has_images else []
    with tempfile.TemporaryDirectory(prefix="compared-script-") as directory:
        at, result = Path(directory) / "at", Path(directory) / "result.json"
        at.mkdir()
        for made in materials.iterdir():
            (at / made.name).symlink_to(made)
        began = time.monotonic()
        options = ("--cpu", "--seed", 0, "--steps", STEPS, "--runs", 1, "--processes", processes, "--json", result)
        done = environment.run(
            environment.program("meshwright"), "compare", *options, file, *script.arguments.split(),
            at=at, time_limit=3600, PYTHONPATH=os.pathsep.join(map(str, path)), ACCELERATE_USE_CPU="1",
            HF_HOME=str(Path(directory) / "hf"), TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1",
            **variables,
        )  # fmt: skip
        seconds = time.monotonic() - began
        if not result.exists():
            return f"not compared: {done.complaints.strip().splitlines()[-1:]}", seconds
        told = json.loads(result.read_text())
    found = []
    for verdict in told["processes"]:
        first = verdict["first"]
        differs = "bitwise equal" if first is None else f"DIFFERENT at step {first['step']}: {first['what']}"
        found.append(f"{verdict['processes']}: {differs}")
    return "; ".join(found), seconds


def main(words: list[str]) -> int:
    """Compare the named scripts, or two of each kind; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="compared-scripts-") as directory:
        materials = Path(directory) / "materials"
        materials.mkdir()
        made = "import pathlib, sys; from tests.ecosystem.trained_materials import make_everything as m; "
        made += "m(pathlib.Path(sys.argv[1]))"
        variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        subprocess.run([PYTHON, "-c", made, str(materials)], env=variables, check=True)
        wheel = build_wheel(Path(directory) / "wheel")
        environment = make_environment(Path(directory) / "it", theirs=True, wheel=wheel)
        print(
            "| kind | script | steps | seconds | result, by processes |\n| --- | --- | ---: | ---: | --- |", flush=True
        )
        results = []
        for kind, names in KINDS.items():
            for name in names:
                if name in options.names or not options.names:
                    result, seconds = compare(name, environment, materials, options.checkouts, options.processes)
                    results.append(result)
                    print(f"| {kind} | {name} | {STEPS} | {seconds:.0f} | {result} |", flush=True)
    equal = sum("DIFFERENT" not in result and "bitwise equal" in result for result in results)
    print(f"{equal} of {len(results)} scripts are bitwise equal", flush=True)
    return 0 if equal == len(results) else 1


if __name__ == "__main__":
    if not PYTHON:
        sys.exit("set MESHWRIGHT_LIBRARIES_PYTHON to the python that .ci/install_libraries prints")
    sys.exit(main(sys.argv[1:]))
