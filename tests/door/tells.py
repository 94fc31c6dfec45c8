"""Say which `accelerate` this process has, as one line of JSON; with `every`, also what processes say that it starts.

`names` compares every name with meshwright's, which imports torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path


def what_is_here(*, names: bool = False) -> dict[str, object]:
    """Return where accelerate is, what its distribution says, and whether its names are meshwright's."""
    import importlib.metadata

    import accelerate

    said: dict[str, object] = {
        "file": accelerate.__file__,
        "version": importlib.metadata.version("accelerate"),
        "packages": sorted(set(importlib.metadata.packages_distributions()["accelerate"])),
    }
    if "+meshwright." in str(accelerate.__version__):
        import meshwright

        said["same"] = accelerate.ParallelismConfig is meshwright.ParallelismConfig  # imports no torch
        if names:
            said["same"] = all(
                getattr(accelerate, name) is getattr(meshwright, name)
                for name in accelerate.__all__
                if hasattr(meshwright, name) and name != "__version__"
            )
    return said


def in_a_child(answers: multiprocessing.queues.SimpleQueue[dict[str, object]]) -> None:
    """Answer from a process of multiprocessing."""
    answers.put(what_is_here())


def by_multiprocessing(method: str) -> dict[str, object]:
    """Ask a process that multiprocessing starts."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=in_a_child, args=(answers,))
    process.start()
    process.join()
    return {"code": process.exitcode} if answers.empty() else answers.get()


def by_command(*words: str, at: Path | None = None, **variables: str) -> dict[str, object]:
    """Ask a process that a command starts."""
    env = os.environ | variables
    done = subprocess.run([sys.executable, *words], cwd=at, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"code": done.returncode, "complaints": done.stderr[-2000:]}
    return {**json.loads(done.stdout.splitlines()[-1]), "complaints": done.stderr}


def every(scratch: Path, theirs: str) -> dict[str, dict[str, object]]:
    """Ask processes that are started in all ways."""
    here = Path(__file__)
    (scratch / "local").mkdir(exist_ok=True)
    (scratch / "local" / "accelerate.py").write_text("raise SystemExit('the local file was imported')\n")
    (scratch / "local" / "tells.py").write_text(here.read_text())
    code = f"import runpy; runpy.run_path({str(here)!r}, run_name='__main__')"
    started = {
        "script": by_command(str(here)),
        "-m": by_command("-m", "tells", at=here.parent),
        "-c": by_command("-c", code),
        "-I": by_command("-I", str(here)),
        "-E": by_command("-E", str(here)),
        "-s -P": by_command("-s", *(["-P"] if sys.version_info >= (3, 11) else []), str(here)),
        "PYTHONSAFEPATH": by_command(str(here), PYTHONSAFEPATH="1"),
        "PYTHONPATH replaced": by_command(str(here), PYTHONPATH=str(scratch)),
        "another folder": by_command(str(here), at=Path("/")),
        "os.chdir": by_command("-c", f"import os; os.chdir('/'); {code}"),
        "local accelerate.py": by_command(str(scratch / "local" / "tells.py")),
        "a child of a child": by_command(
            "-c", f"import subprocess, sys; subprocess.run([sys.executable, {str(here)!r}])"
        ),
        **{method: by_multiprocessing(method) for method in multiprocessing.get_all_start_methods()},
    }
    if theirs:
        started["their source on PYTHONPATH"] = by_command(str(here), PYTHONPATH=theirs)
    return started


if __name__ == "__main__":
    what = sys.argv[1:2]
    told: dict[str, object] = what_is_here(names=what == ["names"])
    if what == ["every"]:
        told["started"] = every(Path(sys.argv[2]), sys.argv[3])
    print(json.dumps(told), flush=True)
