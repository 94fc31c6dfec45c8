"""Environments that several files of this folder use."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.distribution import write_wheel
from tests.door.environments import Environment, build_wheel, install, make_environment

INSTALLED = {"theirs": True, "without_theirs": False}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def with_theirs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """A venv with libraries, Hugging Face's accelerate, and meshwright."""
    return make_environment(tmp_path_factory.mktemp("venv") / "it", theirs=True, wheel=wheel)


@pytest.fixture(scope="session")
def without_theirs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """A venv with libraries and meshwright."""
    return make_environment(tmp_path_factory.mktemp("venv") / "it", theirs=False, wheel=wheel)


@pytest.fixture(scope="session")
def dropped_in(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """A venv with libraries, meshwright, and its drop-in distribution in the place of Hugging Face's accelerate."""
    made = make_environment(tmp_path_factory.mktemp("venv") / "it", theirs=True, wheel=wheel)
    install(made, write_wheel(tmp_path_factory.mktemp("dropin")))
    return made


@pytest.fixture(params=INSTALLED)
def environment(request: pytest.FixtureRequest) -> Environment:
    """Both, one after the other."""
    name = "with_theirs" if INSTALLED[request.param] else "without_theirs"
    made: Environment = request.getfixturevalue(name)
    return made
