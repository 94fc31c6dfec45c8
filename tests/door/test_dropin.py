"""The drop-in distribution satisfies what libraries require of accelerate, and both ways to build it are one."""

from __future__ import annotations

import stat
import subprocess
import sys
from email.parser import Parser
from email.policy import compat32
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from meshwright.distribution import interface_version, write_wheel
from tests.door.environments import REPOSITORY, Environment, install, make_environment, pip

REQUIREMENTS = {
    "axolotl 0.21.0": "accelerate==1.15.0",
    "autogluon 1.6.3": "accelerate<2",
    "chronos-forecasting 2.3.2": "accelerate<2",
    "lerobot": "accelerate<2.0.0",
    "colpali-engine": "accelerate<2.0.0",
    "trl 1.16.0": "accelerate>=1.10.1",
    "gptqmodel 7.7.0": "accelerate>=1.15.0",
    "peft 0.21.2": "accelerate>=0.21.0",
}
"""What libraries require of accelerate."""


@pytest.fixture(scope="module")
def dropin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `meshwright dropin` writes."""
    return write_wheel(tmp_path_factory.mktemp("dropin"))


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_pip_check_is_clean_beside_libraries_that_pin_accelerate(wheel: Path, dropin: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "it", theirs=True)
    install(environment, wheel, dropin)  # takes the place of theirs
    listed = pip(environment, "list", "--format", "freeze").splitlines()
    assert [line for line in listed if line.startswith("accelerate")] == [f"accelerate=={interface_version()}"]
    for library, requirement in REQUIREMENTS.items():
        name, _, version = library.partition(" ")
        version = version or "1"
        info = environment.packages / f"made_up_{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: made-up-{name}\nVersion: {version}\n"
        (info / "METADATA").write_text(f"{text}Requires-Dist: {requirement}\n")
    command = [sys.executable, "-m", "pip", "--python", environment.python, "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    complaints = [line for line in done.stdout.splitlines() if "accelerate" in line]
    assert complaints == [], done.stdout
    assert is_complete(environment, tmp_path)


def is_complete(environment: Environment, at: Path) -> bool:
    """Tell whether what is installed runs without a door, and its commands, too."""
    program = "import accelerate; from meshwright import install; install(); print(accelerate.__version__)"
    done = environment.run(environment.python, "-c", program, at=at)
    assert (done.printed, done.complaints) == (f"{interface_version()}\n", ""), done
    return environment.run(environment.program("accelerate-launch"), "--help", at=at).code == 0


@pytest.mark.parametrize(
    ("specifier", "satisfied"),
    [
        ("==1.15.*", True),
        ("~=1.15", True),
        ("<=1.15", True),
        ("===1.15.0", False),
        (">1.15.0", False),
        ("<=1.11", False),
    ],
)
def test_specifiers_of_the_page(specifier: str, satisfied: bool) -> None:
    page = (REPOSITORY / "docs" / "doors.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("|") and f"`{specifier}`" in line)
    assert row.rstrip(" |").endswith("yes" if satisfied else "no")
    assert Requirement(f"accelerate{specifier}").specifier.contains(Version(interface_version())) == satisfied


def test_both_ways_to_build_it_are_one(dropin: Path, tmp_path: Path) -> None:
    program = "import build_dropin, sys; print(build_dropin.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    built = subprocess.run(command, cwd=REPOSITORY / "dropin", check=True, capture_output=True, text=True).stdout
    assert (tmp_path / built.strip()).read_bytes() == dropin.read_bytes()


@pytest.mark.nightly
def test_pip_builds_the_same_from_the_project_and_from_its_sdist(dropin: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    sdist = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(sdist, cwd=REPOSITORY / "dropin", check=True, capture_output=True, timeout=300)
    for source in (REPOSITORY / "dropin", next(tmp_path.glob("*.tar.gz"))):
        target = tmp_path / ("from_folder" if source.is_dir() else "from_sdist")
        subprocess.run([*command, str(target), str(source)], check=True, capture_output=True, timeout=300)
        assert next(target.glob("*.whl")).read_bytes() == dropin.read_bytes()


def test_it_says_whose_it_is(dropin: Path) -> None:
    files = contents(dropin)
    metadata = Parser(policy=compat32).parsestr(files[f"accelerate-{interface_version()}.dist-info/METADATA"].decode())
    assert metadata["Name"] == "accelerate"
    assert "Independent of Hugging Face" in metadata["Summary"]
    assert "is not Hugging Face's" in str(metadata.get_payload())
    # What sentence-transformers asks before it trains.
    assert "huggingface" in metadata["Home-page"]


def test_its_files_can_be_read_by_all(dropin: Path) -> None:
    with ZipFile(dropin) as archive:
        assert {stat.filemode(entry.external_attr >> 16) for entry in archive.infolist()} == {"-rw-r--r--"}


def test_its_project_says_the_same(dropin: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((REPOSITORY / "dropin" / "pyproject.toml").read_text())["project"]
    files = contents(dropin)
    info = f"accelerate-{interface_version()}.dist-info"
    metadata = Parser(policy=compat32).parsestr(files[f"{info}/METADATA"].decode())
    assert metadata["Summary"] == project["description"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == project["license"]
    extras = [f'{line}; extra == "deepspeed"' for line in project["optional-dependencies"]["deepspeed"]]
    assert metadata.get_all("Requires-Dist") == [*project["dependencies"], *extras]
    commands = files[f"{info}/entry_points.txt"].decode().splitlines()[1:]
    assert dict(line.split(" = ") for line in commands) == project["scripts"]
