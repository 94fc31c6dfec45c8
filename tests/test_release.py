"""What is released: built twice it is the same, and it works where nothing else is installed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.sizes import PROFILE

REPOSITORY = Path(__file__).parents[1]
BUILT_FROM = (
    "src",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)


def build(source: Path, target: Path) -> dict[str, Path]:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    return {file.name: file for file in target.iterdir()}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, from a copy of the sources at another place and time."""
    folder = tmp_path_factory.mktemp("release")
    for name in BUILT_FROM:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copyfile(source, folder / "copy" / name)
    for path in (folder / "copy").rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return build(folder / "copy", folder / "built")


def test_wheel_and_sdist_are_the_same_however_often_they_are_built(released: dict[str, Path], tmp_path: Path) -> None:
    again = build(released[min(released)].parents[1] / "copy", tmp_path)
    assert sorted("".join(file.suffixes[-1:]) for file in released.values()) == [".gz", ".whl"]
    for name, file in released.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == hashlib.sha256(again[name].read_bytes()).hexdigest()


def test_the_wheel_has_the_package_and_nothing_else(released: dict[str, Path]) -> None:
    wheel = next(file for name, file in released.items() if name.endswith(".whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"accelerate"}
    assert {"accelerate/py.typed", "accelerate/commands/views/page/assets/page.html"} <= set(names)
    sdist = next(file for name, file in released.items() if name.endswith(".tar.gz"))
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "tests/test_release.py", "docs/quick_tour.md", "examples/minimal_loop.py"} <= inside


def test_the_quick_tour_from_the_wheel_in_an_empty_environment(released: dict[str, Path], tmp_path: Path) -> None:
    wheel = next(file for name, file in released.items() if name.endswith(".whl"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run(*command: object, time_limit: float = 300) -> str:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=time_limit,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    uv = shutil.which("uv")
    run(sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), "empty")
    programs = tmp_path / "empty" / "bin"
    constraints = ("--constraint", REPOSITORY / ".ci" / "constraints.txt") if (REPOSITORY / ".ci").exists() else ()
    with_uv = (uv, "pip", "install", "--python", programs / "python")
    with_pip = (programs / "python", "-m", "pip", "install")
    run(*(with_uv if uv else with_pip), "--quiet", *constraints, wheel, time_limit=400)
    assert "empty" in run(programs / "python", "-c", "import accelerate; print(accelerate.__file__)")

    tour = (REPOSITORY / "docs" / "quick_tour.md").read_text()
    (tmp_path / "train.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", tour, flags=re.DOTALL)))
    if PROFILE == "nightly":
        assert "loss" in run(programs / "python", "train.py")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # its checkpoints, of one process
    assert run(programs / "accelerate", "launch", "--cpu", "--num_processes", 2, "train.py").count("loss") == 1
    assert "launch" in run(programs / "accelerate", "--help")
    assert "torch" in run(programs / "accelerate", "env").lower()
