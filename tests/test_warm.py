"""A program that starts warm is what it is when it starts cold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.launching import COMMAND

TELLS = """
import json, os, sys, tempfile
print(json.dumps({
    "argv": sys.argv, "first on the path": sys.path[0], "name": __name__, "file": __file__, "folder": os.getcwd(),
    "temporary": tempfile.gettempdir(),
    "variable": os.environ.get("SAID"), "rank": os.environ.get("RANK"), "parent": os.getppid(),
    "leads its session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
}))
print("to the errors", file=sys.stderr)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="zygotes are for Linux")


def both_ways(program: str, tmp_path: Path, *words: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    (tmp_path / "program.py").write_text(program)
    options = {"cwd": tmp_path, "capture_output": True, "text": True, **options}
    environment = os.environ | {"SAID": "yes", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "program.py", *words]
    return [warm.run(command, env=environment | way, **options) for way in ({}, {warm.COLD: "1"})]


def test_a_program_sees_the_same_process(tmp_path: Path) -> None:
    for session in (False, True):
        started_warm, started_cold = both_ways(
            TELLS, tmp_path, "--x", "1", stdin=subprocess.DEVNULL, start_new_session=session
        )
        assert started_warm.stdout == started_cold.stdout
        assert started_warm.stderr == started_cold.stderr == "to the errors\n"
        assert f'"parent": {os.getpid()}' in started_warm.stdout


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a reason')", 1),
        ("raise SystemExit", 0),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os._exit(5)", 5),
        ("def f():\n    raise ValueError('wrong')\nf()", 1),
        ("import atexit; atexit.register(print, 'at the end')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ],
)
def test_it_ends_as_it_would(ending: str, code: int, tmp_path: Path) -> None:
    started_warm, started_cold = both_ways(ending, tmp_path)
    assert (started_warm.returncode, started_cold.returncode) == (code, code)
    assert (started_warm.stdout, started_warm.stderr) == (started_cold.stdout, started_cold.stderr)


def test_it_has_torch_already_and_random_numbers_of_its_own(tmp_path: Path) -> None:
    program = "import sys; print('torch' in sys.modules); import torch, random; print(torch.rand(1), random.random())"
    first, _ = both_ways(program, tmp_path)
    second, cold = both_ways(program, tmp_path)
    assert first.stdout.startswith("True")
    assert cold.stdout.startswith("False")
    assert first.stdout != second.stdout


def test_our_own_commands_and_their_ranks_are_started_warm() -> None:
    for command in ([str(COMMAND), "launch"], [sys.executable, "-m", "meshwright", "launch"]):
        program = warm.Program.of(command)
        assert program is not None
        assert program.starts_programs()
    for module in warm.PRELOADED:
        if module.startswith(("meshwright", "accelerate")):
            import_module(module)  # the zygote leaves out what is not there


def test_what_needs_an_interpreter_of_its_own_is_started_cold() -> None:
    assert warm.Program.of([sys.executable, "-c", "pass"]) is None
    assert warm.Program.of([sys.executable, "-X", "importtime", "program.py"]) is None
    assert warm.Program.of(["bash", "-c", "true"]) is None
    assert warm.Program.of([sys.executable, "-u", "-m", "module", "x"]) == (sys.executable, True, ["module", "x"], 0)


def test_a_signal_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    with warm.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
