"""The `accelerate` command, as people run it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import accelerate

COMMAND = Path(sys.executable).with_name("accelerate")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    assert COMMAND.exists(), "the package is installed without its command"
    return subprocess.run(
        [str(COMMAND), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """Return a path on which torch cannot be imported."""
    for name in ("torch", "numpy", "safetensors"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    return str(tmp_path)


def test_help_and_version_answer_without_torch(no_torch: str) -> None:
    helped = run("--help", PYTHONPATH=no_torch)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: accelerate")
    assert "env" in helped.stdout
    version = run("--version", PYTHONPATH=no_torch)
    assert (version.returncode, version.stdout) == (0, f"accelerate {accelerate.__version__}\n")
    verb = run("env", "--help", PYTHONPATH=no_torch)
    assert verb.returncode == 0, verb.stderr


def test_without_a_verb_it_shows_what_there_is(no_torch: str) -> None:
    alone = run(PYTHONPATH=no_torch)
    assert alone.returncode == 2
    assert "usage: accelerate" in alone.stdout


def test_an_unknown_verb_is_refused_with_the_known_ones(no_torch: str) -> None:
    unknown = run("lunch", PYTHONPATH=no_torch)
    assert unknown.returncode == 2
    assert "invalid choice: 'lunch'" in unknown.stderr
    assert "Did you mean launch?" in unknown.stderr
    assert "env" in unknown.stderr


def test_an_unknown_word_after_a_verb_is_answered_by_the_verb() -> None:
    flag = run("launch", "--num_proceses", "2", "train.py")
    assert flag.stderr.splitlines() == [
        "accelerate launch: --num_proceses is unknown. Did you mean --num_processes?",
        "See accelerate launch --help.",
    ]
    word = run("env", "more")
    assert (word.returncode, word.stderr.splitlines()[0]) == (2, "accelerate env: more is unknown.")


def test_env_tells_what_a_bug_report_needs() -> None:
    told = run("env", ACCELERATE_MIXED_PRECISION="bf16", RANK="1", WORLD_SIZE="2")
    assert told.returncode == 0, told.stderr
    facts = dict(line.split("  ", 1) for line in told.stdout.splitlines())
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["accelerate"].startswith(accelerate.__version__)
    assert facts["Python"].startswith(f"{platform.python_version()} (")
    assert facts["PyTorch"] == torch.__version__
    assert facts["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "rank=1, world_size=2" in facts["Process"]
    assert "ACCELERATE_USE_CPU" not in facts, "only what is set"
    assert "Accelerators" in facts


def test_the_module_is_the_command_too(no_torch: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "--version"],
        env={**os.environ, "PYTHONPATH": no_torch},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout == f"accelerate {accelerate.__version__}\n"
