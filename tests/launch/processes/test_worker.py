"""A script that is launched runs as `python` would run it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.processes import worker

WORKER = worker.__file__
LAUNCH = "meshwright"

SCRIPT = """
import json, multiprocessing, os, pickle, sys
import neighbour  # lies beside the script

class Thing:
    pass

def square(x):
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [3])
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": os.path.basename(__file__), "spec": __spec__ is None,
        "path": sys.path[0], "squares": squares, "pickled": type(pickle.loads(pickle.dumps(Thing()))).__name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
    }))
"""


def run(*words: object, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=directory,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(SCRIPT)
    (tmp_path / "sub" / "neighbour.py").write_text("")
    bare = run("sub/train.py", "--lr", "1", directory=tmp_path)
    launched = run(WORKER, "sub/train.py", "--lr", "1", directory=tmp_path)
    assert bare.returncode == 0, bare.stderr
    assert json.loads(launched.stdout) == json.loads(bare.stdout)


def test_a_module_sees_what_python_m_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(
        "import os, sys; from . import __name__ as parent\n"
        "print(__name__, parent, sys.argv, os.path.basename(__file__), sys.path[0])"
    )
    bare = run("-m", "package.train", "--lr", "1", directory=tmp_path)
    launched = run(WORKER, "-m", "package.train", "--lr", "1", directory=tmp_path)
    assert bare.returncode == 0, bare.stderr
    assert launched.stdout == bare.stdout


FAILING = {
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "chained": "try:\n    {}['a']\nexcept KeyError as error:\n    raise OSError('b') from error",
    "syntax": "x = = 1",
    "exit": "import sys\nsys.exit('a sentence')",
    "library": "import json\njson.loads('{')",
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_prints_what_python_prints_and_leaves_a_record(kind: str, tmp_path: Path) -> None:
    script, error_file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text(FAILING[kind])
    bare = run(script, directory=tmp_path)
    launched = run(WORKER, script, directory=tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert launched.returncode == bare.returncode == 1
    assert launched.stderr == bare.stderr
    contents = json.loads(error_file.read_text())
    assert contents["message"]["extraInfo"]["timestamp"].isdigit(), "torchelastic reads this"
    ending: dict[str, Any] = contents["ending"]
    expected = {
        "exception": ("ValueError", 2, None),
        "chained": ("OSError", 4, "KeyError: 'a'"),
        "syntax": ("SyntaxError", 1, None),
        "exit": ("SystemExit", 2, None),
        "library": ("JSONDecodeError", 2, None),
    }[kind]
    assert (ending["type"], ending["frames"][-1]["line"], ending["cause"]) == expected
    assert ending["frames"][-1]["file"] == str(script), "the last frame is the user's, not the library's"


def test_success_leaves_no_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(0)")
    error_file = tmp_path / "error.json"
    assert run(WORKER, "train.py", directory=tmp_path, TORCHELASTIC_ERROR_FILE=str(error_file)).returncode == 0
    assert not error_file.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by prctl")
def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    ended = run(WORKER, "train.py", directory=tmp_path, MESHWRIGHT_LAUNCHER_PID="1")
    assert (ended.returncode, ended.stdout) == (143, "")


SWALLOWS_CTRL_C = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100_000): pass
except KeyboardInterrupt:
    pass  # as the C++ of the real one does
"""


def test_ctrl_c_is_not_lost_inside_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS_CTRL_C)
    (tmp_path / "train.py").write_text("import torch\nprint('goes on')")
    assert run("train.py", directory=tmp_path).stdout == "goes on\n", "by Python alone it is"
    launched = run(WORKER, "train.py", directory=tmp_path)
    assert launched.returncode == -signal.SIGINT
    assert launched.stdout == ""


DESTRUCTOR_SWALLOWS_CTRL_C = """
import os, signal, time

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

Held()
try:
    time.sleep(5)
except KeyboardInterrupt:
    print("saved")
"""


def test_ctrl_c_that_python_ignores_comes_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DESTRUCTOR_SWALLOWS_CTRL_C)
    bare = run("train.py", directory=tmp_path)
    assert "Exception ignored" in bare.stderr
    assert bare.stdout == "", "by Python alone it is lost"
    launched = run(WORKER, "train.py", directory=tmp_path)
    assert (launched.returncode, launched.stdout, launched.stderr) == (0, "saved\n", "")


def test_ctrl_c_is_a_keyboard_interrupt_once_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "train.py").write_text(f"import torch\n{SWALLOWS_CTRL_C}\nprint('saved')")
    launched = run(WORKER, "train.py", directory=tmp_path)
    assert (launched.returncode, launched.stdout) == (0, "saved\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_fail_no_run(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print('to stdout'); print('to stderr', file=sys.stderr)\n"
        "with open('weights', 'w') as file:\n"
        "    os.system('echo from a child; echo from a child >&2')\n"
        "    file.write('weights')\n"
    )
    for words in ([WORKER, "train.py"], ["-m", LAUNCH, "launch", "--cpu", "--num_processes", "1", "train.py"]):
        command = shlex.join([sys.executable, *words])
        ended = subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=tmp_path, stdin=subprocess.DEVNULL)
        assert ended.returncode == 0, words
        assert (tmp_path / "weights").read_text() == "weights", "no child writes into a file"
