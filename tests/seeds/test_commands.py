"""Every command line of the documents works as it is written, on a machine without a GPU."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.launching import environment

from .documents import DIRECTORY

pytestmark = [
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason="the documents are not here: set SEED_DOCUMENTS"),
]

SCRIPT = """
import sys
from accelerate import Accelerator
accelerator = Accelerator()
accelerator.print("ran", accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision, *sys.argv[1:])
"""


def command_lines() -> list[str]:
    """Return the shell lines that start `accelerate launch`, a placeholder still in its braces."""
    found: list[str] = []
    for document in sorted(DIRECTORY.glob("*.txt")):
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        found += re.findall(r'(?:CUDA_VISIBLE_DEVICES="0" )?accelerate launch [^`\n]*\.py[^`\n]*', text)
    return list(dict.fromkeys(found))


def filled_in(command: str) -> str:
    """Put a real script, a real file and real arguments where the document has placeholders."""
    command = re.sub(r"\{path[^}]*\}", "config.yaml", command)
    command = re.sub(r"\{?\b(script_name|xxx|script)\.py\}?", "train.py", command)
    return re.sub(r"[{}]|\.\.\.", "", command)


def test_the_documents_have_the_commands_we_know() -> None:
    if DIRECTORY.is_dir():
        assert len(command_lines()) == 5


@pytest.mark.parametrize("command", command_lines())
def test_a_command_works_as_written(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\nuse_cpu: true\n")
    variables = environment(tmp_path, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    words = shlex.split(filled_in(command))
    assigned = dict(word.split("=") for word in itertools.takewhile(lambda word: word != "accelerate", words))
    ended = warm.run(
        words[len(assigned) :], cwd=tmp_path, env=variables | assigned, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    asked_for_gpus = "--multi_gpu" in command
    processes = 4 if asked_for_gpus else 2 if "config" in command else 1
    precision = "fp16" if "fp16" in command else "bf16" if "config" in command else "no"
    arguments = "--arg1 --arg2" if "--arg1" in command else ""
    assert ended.stdout == f"ran {processes} cpu {precision} {arguments}".rstrip() + "\n"
    assert ("no GPU" in ended.stderr) == asked_for_gpus
