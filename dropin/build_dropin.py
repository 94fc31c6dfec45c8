"""Build backend: the wheel is the one that `meshwright dropin` writes, and the rest is hatchling's."""

import sys
from pathlib import Path
from typing import Any

from hatchling.build import (
    build_editable as build_editable,
    build_sdist as build_sdist,
    get_requires_for_build_editable as get_requires_for_build_editable,
    get_requires_for_build_sdist as get_requires_for_build_sdist,
)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return what the wheel needs beside Python, which is nothing."""
    return []


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write the wheel, and return its name."""
    project = Path(__file__).resolve().parent
    sources = project / "src"  # a link, which the sdist of the whole checkout does not have
    sys.path.insert(0, str(sources if sources.is_dir() else project.parent / "src"))
    from meshwright.distribution import write_wheel

    return write_wheel(wheel_directory).name
