"""`meshwright launch --tpu` and `notebook_launcher`, for real: torch_xla starts the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import needs_xla, run_command

pytestmark = [needs_xla]

SCRIPT = """
import os, sys
def main():
    from meshwright import Accelerator
    here = Accelerator()
    print(__name__, here.process_index, here.num_processes, here.device, here.mixed_precision, sys.argv[1:],
          os.environ.get("XLA_DOWNCAST_BF16"), flush=True)
if __name__ == "__main__":
    main()
"""
NOTEBOOK = """
from meshwright import Accelerator, notebook_launcher
from meshwright.launch.notebook.launcher import _launch_on_xla

def training_function(number=1):
    return number, str(Accelerator().device)

def failing():
    raise ValueError("on purpose")

print("in a process of torch_xla", _launch_on_xla(training_function, (3,), 1, None))
for function, processes in ((failing, None), (training_function, 2)):
    try:
        _launch_on_xla(function, (), processes, None)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
print("here", notebook_launcher(training_function))
"""
LAUNCH = ("-m", "meshwright", "launch", "--tpu")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return "script.py"


def test_a_function_of_the_script_is_called_where_torch_xla_starts_it(script: str, tmp_path: Path) -> None:
    flags = ("--main_training_function", "main", "--mixed_precision", "bf16", "--downcast_bf16")
    ended = run_command(*LAUNCH, *flags, script, "--x", "1", directory=tmp_path)
    assert ended.stdout.splitlines()[-1] == "script 0 1 xla:0 bf16 ['--x', '1'] 1", ended.stderr[-2000:]
    assert ended.returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--main_training_function", "main", "--num_processes", "2"), "torch_xla has started 1 on CPU"),
        (("--main_training_function", "train"), "script.py has no function train"),
        (("--tpu_cluster",), "the hosts of a pod are reached by Google's tools"),
    ],
)
def test_a_launch_that_xla_cannot_follow_is_refused(
    flags: tuple[str, ...], reason: str, script: str, tmp_path: Path
) -> None:
    ended = run_command(*LAUNCH, *flags, script, directory=tmp_path)
    assert ended.returncode != 0
    assert reason in ended.stderr


@pytest.mark.nightly
def test_without_a_function_the_script_runs_as_it_is(script: str, tmp_path: Path) -> None:
    ended = run_command(*LAUNCH, script, directory=tmp_path)
    assert ended.stdout.splitlines()[-1] == "__main__ 0 1 xla:0 no [] None"


@pytest.mark.nightly
def test_a_notebook_launches_in_a_process_of_torch_xla_or_here(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    ended = run_command("notebook.py", directory=tmp_path)
    assert ended.stdout.splitlines() == [
        "in a process of torch_xla (3, 'xla:0')",
        "WorkerFailedError Rank 0 failed with ValueError: on purpose",
        "RuntimeConflictError notebook_launcher(num_processes=2): torch_xla has started 1 on CPU, one for every "
        "device. Leave num_processes out, or say 1.",
        "here (1, 'xla:0')",
    ], ended.stderr[-2000:]
