"""Compile the device once for all test processes, and keep it for the next run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "source"
NAME = "simulated_accelerator"
FLAGS = ["-O1"]


@functools.cache
def extension() -> ModuleType:
    """Return the compiled module: importing it changes the process."""
    return _imported(compiled())


@functools.cache
def compiled() -> Path:
    """Return the library; compile it if no earlier run did."""
    folder = _folder()
    library = folder / f"{NAME}-{_digest_of_sources()}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):  # the system frees it if its holder is killed
            if not library.exists():
                _compile(folder / "objects", library)
    return library


def why_not() -> str | None:
    """Return why the device cannot be compiled here, or None."""
    if sys.platform != "linux":
        return "the simulated accelerator is compiled on Linux only"
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"the simulated accelerator needs a C++ compiler ({compiler})"
    return None if cpp_extension.is_ninja_available() else "the simulated accelerator needs ninja"


def _folder() -> Path:
    """Return the folder of this Python and this torch among those that survive a test run."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode()).hexdigest()[:12]
    return Path(cpp_extension.get_default_build_root()) / f"{NAME}-{digest}"


def _digest_of_sources() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(objects: Path, library: Path) -> None:
    """Compile in another process, where loading the library does no harm, and put it in its place at once."""
    objects.mkdir(exist_ok=True)
    (objects / "lock").unlink(missing_ok=True)  # torch's, of a compilation that was killed: we hold our own
    environment = {"MAX_JOBS": "2", **os.environ}
    command = [sys.executable, "-c", f"from {__name__} import _compile_here; _compile_here({str(objects)!r})"]
    finished = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if finished.returncode != 0:
        raise RuntimeError(f"the simulated accelerator does not compile:\n{finished.stdout[-20000:]}")
    (objects / f"{NAME}.so").rename(library)


def _compile_here(objects: str) -> None:
    whole = Path(objects) / "whole.cpp"  # torch's headers, which take most of the time, are read once
    whole.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCE.glob("*.cpp"))))
    cpp_extension.load(NAME, [str(whole)], build_directory=objects, extra_cflags=FLAGS)


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    from tests.simulated_accelerator import build  # not __main__, which another process could not import from

    print(build.why_not() or build.compiled())
