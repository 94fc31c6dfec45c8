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
from functools import partial
from pathlib import Path

import pytest

from tests.sizes import PROFILE

REPOSITORY = Path(__file__).parents[1]
BUILT_FROM = (
    "src",
    "dropin",
    "tests",
    "docs",
    "overrides",
    "examples",
    "benchmarks",
    "hatch_build.py",
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
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
            left_out = shutil.ignore_patterns("__pycache__", "build", "dist")
            shutil.copytree(source, folder / "copy" / name, ignore=left_out, symlinks=True)
        else:
            shutil.copyfile(source, folder / "copy" / name)
    for path in (folder / "copy").rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    return build(folder / "copy", folder / "built")


def test_wheel_and_sdist_are_the_same_however_often_they_are_built(released: dict[str, Path], tmp_path: Path) -> None:
    again = build(released[min(released)].parents[1] / "copy", tmp_path)
    assert sorted("".join(file.suffixes[-1:]) for file in released.values()) == [".gz", ".whl"]
    for name, file in released.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == hashlib.sha256(again[name].read_bytes()).hexdigest()


DOOR = {
    "_meshwright_start.py",
    "meshwright.pth",
    "meshwright.start",
    "meshwright/overlay/accelerate/__init__.py",
    "meshwright/overlay/accelerate/utils/__init__.py",
}
"""What makes `import accelerate` meshwright's where it is asked for."""


def the_wheel(files: dict[str, Path]) -> Path:
    return next(file for name, file in files.items() if name.endswith(".whl"))


def test_the_wheel_has_the_package_and_its_door_and_nothing_else(released: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(the_wheel(released)).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "meshwright",
        *(name for name in DOOR if "/" not in name),
    }
    assert names >= {"meshwright/py.typed", "meshwright/tools/report/page/assets/page.html", *DOOR}


def test_the_sdist_builds_the_same_wheel(released: dict[str, Path], tmp_path: Path) -> None:
    sdist = next(file for name, file in released.items() if name.endswith(".tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "CITATION.cff", "tests/test_release.py", "docs/quick_tour.md", "overrides"):
        assert (folder / name).exists()
    assert (folder / "dropin" / "build_dropin.py").is_file()
    again = build(folder, tmp_path / "again")
    wheel = the_wheel(released)
    assert hashlib.sha256(wheel.read_bytes()).digest() == hashlib.sha256(again[wheel.name].read_bytes()).digest()


def test_the_wheel_in_an_empty_environment_without_a_network(released: dict[str, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this interpreter, in a folder that comes after its own."""
    run_in = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    run_in([sys.executable, "-m", "venv", "empty"], env=environment)
    python = tmp_path / "empty" / "bin" / "python"
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
    packages = Path(
        run_in([python, "-c", "import site; print(site.getsitepackages()[0])"], env=environment).stdout[:-1]
    )
    before = {path for path in packages.rglob("*") if "__pycache__" not in path.parts}
    run_in([python, "-m", "pip", "install", "--no-deps", the_wheel(released)], env=environment)
    (packages / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages")) + "\n"
    )
    (tmp_path / "train.py").write_text("import accelerate, meshwright; print(accelerate.__file__, meshwright.__file__)")
    done = run_in([python, "-m", "meshwright", "train.py"], env=environment)
    of_interface, of_library = map(Path, done.stdout.split()[-2:])
    assert of_interface == packages / "meshwright" / "overlay" / "accelerate" / "__init__.py"
    assert of_library == packages / "meshwright" / "__init__.py"
    assert "launch" in run_in([python.with_name("meshwright"), "--help"], env=environment).stdout
    run_in([python, "-m", "pip", "uninstall", "--yes", "meshwright"], env=environment)
    (packages / "dependencies.pth").unlink()
    assert {path for path in packages.rglob("*") if "__pycache__" not in path.parts} == before


def test_the_quick_tour_from_the_wheel_in_an_empty_environment(released: dict[str, Path], tmp_path: Path) -> None:
    wheel = the_wheel(released)
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
    assert "empty" in run(programs / "python", "-c", "import meshwright; print(meshwright.__file__)")

    tour = (REPOSITORY / "docs" / "quick_tour.md").read_text()
    (tmp_path / "train.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", tour, flags=re.DOTALL)))
    if PROFILE == "nightly":
        assert "loss" in run(programs / "python", "train.py")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # its checkpoints, of one process
    assert run(programs / "meshwright", "launch", "--cpu", "--num_processes", 2, "train.py").count("loss") == 1
    assert "launch" in run(programs / "meshwright", "--help")
    assert "torch" in run(programs / "meshwright", "env").lower()
