"""Run a script under both packages, in turn, each time in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import _meshwright_start as start

from ... import __version__
from ...errors import InvalidDataError
from ...untrusted import build, parse_object, printable_lines
from . import recorder
from .records import ComparedRun, have_ended, read_run, steps_so_far

_ASK = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("accelerate")
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps(dict(executable=sys.executable, version=version("accelerate"), torch=version("torch"),
                      file=spec.origin or "" if spec else "")))
"""
_MOST_LOG = 4000
_AFTER_THE_LAST_STEP = 30.0
"""Seconds that the processes have to end by themselves after their last step."""


class CannotCompareError(Exception):
    """There is nothing to compare.

    The message says why, and what to do.
    """


@dataclass(frozen=True)
class Interpreter:
    """An interpreter, and which `accelerate` and torch it imports."""

    executable: str
    version: str
    torch: str
    file: str

    @property
    def has_published(self) -> bool:
        """Tell whether its `accelerate` is the published 1.x."""
        is_ours = "+meshwright" in self.version or os.path.realpath(self.file).startswith(
            os.path.realpath(start.FOLDER)
        )
        return self.version.startswith("1.") and bool(self.file) and not is_ours


@dataclass(frozen=True)
class Side:
    """One of the two packages, and how a script is started under it."""

    name: str
    python: str
    variables: Mapping[str, str]
    flags: Sequence[str]
    is_ours: bool

    def command(self, script: Sequence[str], processes: int, *, on_cpu: bool) -> list[str]:
        """Return the command that runs a script on some processes."""
        where = ["--cpu"] if on_cpu and "--cpu" not in self.flags else []
        if self.is_ours:
            launcher = ["-m", "meshwright", "launch", "--num_processes", str(processes)]
            return [self.python, *launcher, *where, *self.flags, *script]
        launcher = ["-m", "accelerate.commands.launch"]
        if on_cpu and processes > 1:  # its launcher starts one process there, so torch's starts the others
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *launcher]
            launcher += ["--num_processes", "1"]
        else:
            launcher += ["--num_processes", str(processes), *(["--multi_gpu"] if processes > 1 else [])]
        return [self.python, *launcher, *where, *self.flags, *script]


def published_side(reference: str, flags: Sequence[str]) -> tuple[Side, Interpreter]:
    """Return the side of 1.x in an interpreter; raise CannotCompareError if that has none."""
    variables = _without_ours(os.environ)
    found = _ask(reference, variables)
    if not found.has_published:
        has = f"{found.version or 'an accelerate without a version'}, in {found.file}" if found.file else "none"
        raise CannotCompareError(
            f"{reference} has no accelerate 1.x to compare with (found: {has}). Install it beside meshwright "
            "(pip install 'accelerate<2'), or name an interpreter of an environment that has it: --reference PYTHON."
        )
    return Side(f"accelerate {found.version}", found.executable, variables, flags, is_ours=False), found


def our_side(flags: Sequence[str]) -> Side:
    """Return the side of this package, with shuffled samples in the order of 1.x unless the caller says otherwise."""
    defaults = {"MESHWRIGHT_DATA_ORDER": "accelerate-1", "MESHWRIGHT_FIRST_STEPS": "off"}
    variables = defaults | dict(os.environ)
    return Side(f"meshwright {__version__}", sys.executable, variables, flags, is_ours=True)


def _ask(python: str, variables: Mapping[str, str]) -> Interpreter:
    try:
        said = subprocess.run([python, "-c", _ASK], env=variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotCompareError(f"{python} cannot be run: {error}. --reference takes a Python interpreter.") from None
    return build(Interpreter, parse_object(said.stdout, f"the answer of {python}"), f"the answer of {python}")


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `import accelerate` is not ours."""
    kept = {name: value for name, value in environment.items() if not name.startswith("MESHWRIGHT_")}
    published = os.path.realpath(os.path.dirname(start.FOLDER))
    path = [place for place in kept.get("PYTHONPATH", "").split(os.pathsep) if place]
    kept["PYTHONPATH"] = os.pathsep.join(place for place in path if os.path.realpath(place) != published)
    return kept


@dataclass(frozen=True)
class Runner:
    """Runs one script, always in the same way."""

    script: Sequence[str]
    steps: int
    seed: int | None
    on_cpu: bool
    in_place: bool
    seconds: float
    folder: Path

    def run(self, side: Side, processes: int) -> Generator[int | ComparedRun, None, None]:
        """Run the script once; yield the number of steps that it has made so far, and finally what was recorded."""
        name = "ours" if side.is_ours else "theirs"
        folder = self.folder / f"{name}-{processes}-{len(list(self.folder.iterdir()))}"
        (folder / recorder.RECORDS).mkdir(parents=True)
        shutil.copyfile(recorder.__file__, folder / "sitecustomize.py")
        settings = {"steps": self.steps, "seed": self.seed}
        (folder / recorder.SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        work = Path.cwd() if self.in_place else _linked(Path.cwd(), folder / "work")
        variables = dict(side.variables)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), variables.get("PYTHONPATH"))))
        log = folder / "log.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                side.command(self.script, processes, on_cpu=self.on_cpu),
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        yield from self._wait(process, folder, processes)
        try:
            yield read_run(folder, [] if self.in_place else _written(work))
        except InvalidDataError as error:
            said = printable_lines(log.read_text(encoding="utf-8", errors="replace")[-_MOST_LOG:])
            where = "on one process" if processes == 1 else f"on {processes} processes"
            raise CannotCompareError(f"under {side.name} {where}, {error}. The end of its output:\n{said}") from None

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, processes: int) -> Iterator[int]:
        deadline, is_at_the_end = time.monotonic() + self.seconds, False
        try:
            while process.poll() is None and time.monotonic() < deadline:
                yield steps_so_far(folder)
                if not is_at_the_end and have_ended(folder, processes):
                    is_at_the_end, deadline = True, min(deadline, time.monotonic() + _AFTER_THE_LAST_STEP)
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):  # also what a launcher has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _linked(original: Path, folder: Path) -> Path:
    """Make a folder that has links to all that is in another one, so that what a run writes is its own."""
    folder.mkdir()
    for entry in original.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def _written(folder: Path) -> list[str]:
    """Return the files that a run has written into its folder."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(str(file.relative_to(folder)) for file in found if not file.is_symlink())
