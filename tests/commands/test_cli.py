"""The `meshwright` command, as people run it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.commands.cli import main
from meshwright.commands.env import facts_as_text
from meshwright.config.launch.parser import VERBS

COMMAND = Path(sys.executable).with_name("meshwright")


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
    assert helped.stdout.startswith("usage: meshwright")
    assert "env" in helped.stdout
    version = run("--version", PYTHONPATH=no_torch)
    assert (version.returncode, version.stdout) == (0, f"meshwright {meshwright.__version__}\n")
    verb = run("env", "--help", PYTHONPATH=no_torch)
    assert verb.returncode == 0, verb.stderr


def test_without_a_verb_it_shows_what_there_is(no_torch: str) -> None:
    alone = run(PYTHONPATH=no_torch)
    assert alone.returncode == 2
    assert "usage: meshwright" in alone.stdout


def test_it_says_the_name_by_which_it_was_called(no_torch: str) -> None:
    """The drop-in distribution has the published command; a process that is started from it says the same name."""
    published = [str(COMMAND.with_name("accelerate")), "launch"]
    child = "import os; from meshwright.program import program_name; print(program_name())"
    environment = {**os.environ, "PYTHONPATH": no_torch}
    said = subprocess.run(published, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert "See accelerate launch --help." in said.stderr
    started = subprocess.run(
        [sys.executable, "-c", child],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "MESHWRIGHT_PROGRAM": "accelerate"},
    )
    assert started.stdout == "accelerate\n"


@pytest.mark.parametrize("verb", ["lanch", "lunch"])
def test_an_unknown_verb_is_answered_with_the_nearest(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _told([verb, "train.py"], capsys) == [
        f"meshwright: {verb} is unknown. Did you mean launch?",
        "See meshwright --help.",
    ]


def test_a_verb_like_no_other_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    (told, _) = _told(["xyzzy"], capsys)
    assert told.startswith("meshwright: xyzzy is unknown. There are check, compare, config, dropin, env,")


def _told(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("verb", ["launch", "plan", "check", "test"])
def test_help_is_short_and_fits_a_terminal(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _help(capsys, verb, "--help")
    assert len(lines) <= 60
    assert not [line for line in lines if len(line) > 80]
    text = " ".join(" ".join(lines).split())
    assert "--config_file" in text
    assert ("--num_processes" in text) == (verb == "launch")
    if verb != "launch":
        assert "see meshwright launch --help" in text
    every = _help(capsys, verb, "--help-all")
    assert not [line for line in every if len(line) > 80]
    assert {"--num_processes", "--megatron_lm_tp_degree", "--dynamo_backend"} <= set(" ".join(every).split())


def _help(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_every_verb_has_a_help_that_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert not [line for line in _help(capsys, verb, "--help") if len(line) > 80], verb


def test_an_unknown_word_after_a_verb_is_answered_by_the_verb() -> None:
    flag = run("launch", "--num_proceses", "2", "train.py")
    assert flag.stderr.splitlines() == [
        "meshwright launch: --num_proceses is unknown. Did you mean --num_processes?",
        "See meshwright launch --help.",
    ]
    word = run("env", "more")
    assert (word.returncode, word.stderr.splitlines()[0]) == (2, "meshwright env: more is unknown.")


@pytest.mark.parametrize("verb", ["check", "launch", "plan"])
def test_a_flag_like_no_other_is_answered_without_a_guess(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _told([verb, "--nope", "train.py"], capsys) == [
        f"meshwright {verb}: --nope is unknown.",
        f"See meshwright {verb} --help.",
    ]
    assert _told(["launch", "--nprocs", "2", "train.py"], capsys)[0].endswith("Did you mean --num_processes?")


def test_env_tells_what_a_bug_report_needs() -> None:
    told = run("env", ACCELERATE_MIXED_PRECISION="bf16", RANK="1", WORLD_SIZE="2")
    assert told.returncode == 0, told.stderr
    facts = dict(line.split("  ", 1) for line in told.stdout.splitlines())
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    assert facts["meshwright"].startswith(meshwright.__version__)
    assert facts["Python"].startswith(f"{platform.python_version()} (")
    assert facts["PyTorch"] == torch.__version__
    assert facts["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert facts["Process"] == "rank 1 of 2, local rank 1 of 2, started by torchrun"
    assert "ACCELERATE_USE_CPU" not in facts, "only what is set"
    assert "Accelerators" in facts


def test_env_shows_a_file_without_the_notation_of_python(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_cpu: true\nmixed_precision: 'no'\ngpu_ids:\nfsdp_config: {fsdp_version: 2}\n")
    lines = [line.split() for line in facts_as_text(str(file)).splitlines()]
    for line in (["use_cpu", "true"], ["mixed_precision", "no"], ["fsdp_config.fsdp_version", "2"]):
        assert line in lines


def test_the_module_is_the_command_too(no_torch: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "meshwright", "--version"],
        env={**os.environ, "PYTHONPATH": no_torch},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout == f"meshwright {meshwright.__version__}\n"
