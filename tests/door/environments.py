"""Environments that are made for a test: real libraries, theirs or not, and meshwright as a wheel of this checkout.

The libraries are links to those that `.ci/install_libraries` has installed, and Hugging Face's accelerate is a copy of
its own, so that a test can see whether a file of it has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from packaging.requirements import Requirement

from meshwright.distribution import write_wheel
from tests.ecosystem.libraries import PYTHON, folder

REPOSITORY = Path(__file__).parents[2]
TELLS = Path(__file__).with_name("tells.py")
_NOT_LINKED = ("accelerate", "__editable__", "_editable", "meshwright", "_meshwright", "__pycache__", "pip")


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    code: int
    printed: str
    complaints: str

    @property
    def told(self) -> dict[str, Any]:
        """What `tells.py` has printed."""
        assert self.code == 0, self.complaints[-4000:]
        return dict(json.loads(self.printed.splitlines()[-1]))


@dataclass(frozen=True)
class Environment:
    """A venv."""

    root: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.root / "bin" / "python")

    @property
    def packages(self) -> Path:
        """The folder of its packages."""
        return next(self.root.glob("lib/python*/site-packages"))

    def program(self, name: str) -> str:
        """Return the path of one of its commands."""
        return str(self.root / "bin" / name)

    def run(self, *words: object, at: Path, time_limit: float = 300.0, **variables: str) -> Done:
        """Run a command in a folder, without the variables of the tests."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MESHWRIGHT_"))}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        env |= {"PATH": f"{self.root / 'bin'}{os.pathsep}{env['PATH']}", **variables}
        done = subprocess.run(
            list(map(str, words)),
            cwd=at,
            env=env,
            capture_output=True,
            text=True,
            timeout=time_limit,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def tell(self, *words: object, at: Path, **variables: str) -> dict[str, Any]:
        """Run `tells.py` with this environment's interpreter, and return what it says."""
        return self.run(self.python, TELLS, *words, at=at, **variables).told

    def theirs(self) -> dict[str, str]:
        """Return a digest of every file of Hugging Face's distribution, by its path."""
        files = [*self.packages.glob("accelerate/**/*"), *self.packages.glob("accelerate-1*/**/*")]
        files += (self.root / "bin").glob("accelerate*")
        return {
            str(file): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in files
            if file.is_file() and file.suffix != ".pyc"
        }


def make_environment(root: Path, *, theirs: bool, wheel: Path | None = None) -> Environment:
    """Make a venv that has the libraries, Hugging Face's accelerate or not, and meshwright if its wheel is given."""
    if not PYTHON:
        pytest.skip("no venv with the libraries: run .ci/install_libraries and set MESHWRIGHT_LIBRARIES_PYTHON")
    venv.create(root, symlinks=True, with_pip=False)
    made = Environment(root)
    for entry in next(Path(PYTHON).parents[1].glob("lib/python*/site-packages")).iterdir():
        if not entry.name.startswith(_NOT_LINKED) and entry.suffix != ".pth":
            (made.packages / entry.name).symlink_to(entry)
    if theirs:
        reference = Path(folder("reference"))
        for entry in reference.glob("accelerate*"):
            shutil.copytree(entry, made.packages / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        for script in (reference / "bin").glob("accelerate*"):
            body = script.read_text().partition("\n")[2]
            (root / "bin" / script.name).write_text(f"#!{made.python}\n{body}")
            (root / "bin" / script.name).chmod(0o755)
    if wheel is not None:
        with ZipFile(wheel) as archive:  # pip would also compile 500 files
            archive.extractall(made.packages)
        script = f"#!{made.python}\nfrom meshwright.commands.cli import main\nmain()\n"
        Path(made.program("meshwright")).write_text(script)
        Path(made.program("meshwright")).chmod(0o755)
    return made


def install(environment: Environment, *wheels: Path) -> None:
    """Install wheels as a user does, without what they require."""
    pip(environment, "install", "--no-deps", "--no-index", "--no-compile", *map(str, wheels))


def pip(environment: Environment, *words: str) -> str:
    """Run the pip of the tests for another environment, and return what it printed."""
    command = [sys.executable, "-m", "pip", "--python", environment.python, "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=environment.root)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(target: Path, source: Path = REPOSITORY) -> Path:
    """Build the wheel of a project of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    return next(target.glob("*.whl"))


def link_distributions(environment: Environment, names: Iterable[str]) -> None:
    """Let an environment see distributions of the tests' own, with what they require."""
    wanted, seen = list(names), set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {Path(file).parts[0] for file in found.files or () if ".." not in Path(file).parts}:
            link = environment.packages / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
        requirements = map(Requirement, found.requires or ())
        wanted += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def run_notebook(environment: Environment, cells: list[str], at: Path) -> list[str]:
    """Run cells in a kernel of an environment, and return what each has shown."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    manager = KernelManager()
    argv = [environment.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="it", language="python")
    client = nbclient.NotebookClient(
        book, km=manager, timeout=300, allow_errors=True, resources={"metadata": {"path": str(at)}}
    )
    client.execute(env={"PATH": f"{environment.root / 'bin'}:/usr/bin:/bin", "HOME": str(at)})
    return [
        "".join(
            output.get("text", "") or "\n".join(output.get("traceback", [])) or str(output.get("data", ""))
            for output in cell.outputs
        )
        for cell in book.cells
    ]


if __name__ == "__main__":  # `.ci/nightly doors`: what seed programs and examples import is linked as well
    with tempfile.TemporaryDirectory() as built:
        made = make_environment(Path(sys.argv[1]), theirs=True, wheel=build_wheel(Path(built)))
        if sys.argv[2:] == ["--dropin"]:
            install(made, write_wheel(Path(built)))
    link_distributions(made, ["scikit-learn", "schedulefree", "torchvision", "pillow", "torchdata", "cloudpickle"])
