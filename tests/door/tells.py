"""Say which `accelerate` this process has, as one line of JSON; with `every`, also what processes say that it starts.

`far` starts them by torchrun, `meshwright launch`, a notebook's kernel and Ray, where it is installed. `names` compares
every name of the interface with meshwright's, which imports torch.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType


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
            said["others"] = others = not_ours()
            said["same"] = not others
    return said


def not_ours() -> list[str]:
    """Return the names of the interface that are not the very objects of meshwright."""
    import meshwright

    table = Path(__file__).parents[1] / "interface"
    left_out = {tuple(line.split("\t")[:2]) for line in (table / "left_out.tsv").read_text().splitlines()}
    files = [table / file for file in ("exports.tsv", "imports.tsv", "names.tsv")]
    named = {tuple(line.split("\t")[:2]) for file in files for line in file.read_text().splitlines()} - left_out
    values = {}
    for module, name in sorted(named):
        package = import_module(module)
        values[module, name] = getattr(package, name, package) if name != "(module)" else package
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "meshwright"]
    natives = {id(value) for module in modules for value in vars(module).values()}
    found = []
    for (module, name), value in values.items():
        same = name not in meshwright.__all__ or name == "__version__" or value is getattr(meshwright, name)
        if isinstance(value, type | FunctionType) and value.__module__.partition(".")[0] in (
            "accelerate",
            "meshwright",
        ):
            same &= id(value) in natives
        if not same:
            found.append(f"{module}.{name}")
    return found if len(values) > 400 else [f"only {len(values)} names were found"]


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


def by_notebook() -> dict[str, object]:
    """Ask a kernel that a notebook's server starts."""
    from jupyter_client.manager import start_new_kernel

    printed: list[str] = []
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute_interactive(
            f"%run {__file__}",
            timeout=120,
            output_hook=lambda message: printed.append(str(message["content"].get("text", ""))),
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    lines = "".join(printed).splitlines()
    return dict(json.loads(lines[-1])) if lines else {"code": "nothing printed"}


def by_ray() -> dict[str, object]:
    """Ask a worker of a cluster that is started here."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
    try:
        return dict(ray.get(ray.remote(what_is_here).remote()))
    finally:
        ray.shutdown()


def far() -> dict[str, dict[str, object]]:
    """Ask processes that launchers and servers start."""
    here = str(Path(__file__))
    started = {
        "torchrun": by_command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", here),
        "launch": by_command("-m", "meshwright", "launch", "--cpu", here),
        "spawn": by_multiprocessing("spawn"),
        "notebook": by_notebook(),
    }
    if importlib.util.find_spec("ray") is not None:
        started["Ray"] = by_ray()
    return started


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
    if what == ["far"]:
        told["started"] = far()
    print(json.dumps(told), flush=True)
