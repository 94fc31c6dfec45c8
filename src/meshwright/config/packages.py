"""Find optional packages without importing them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version as installed_version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

OPERATIONS: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def has_package(name: str) -> bool:
    """Return whether a package can be imported; it is not imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False
    except ValueError:  # a module in sys.modules without a spec
        return True


def depends_on(package: str, dependency: str) -> bool:
    """Return whether an installed package says in its metadata that it needs another one."""
    import re

    try:
        needed = requires(package) or ()
    except PackageNotFoundError:
        return False
    return any(re.match(rf"{re.escape(dependency)}(?![\w.-])", each) is not None for each in needed)


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package, or a version, with another: `("numpy", ">=", "2.0")`."""
    from packaging.version import parse  # imported on use: few callers compare versions

    if operation not in OPERATIONS:
        raise ValueError(f"`operation` must be one of {', '.join(OPERATIONS)}, not {operation!r}.")
    if isinstance(library_or_version, str):
        try:
            library_or_version = parse(installed_version(library_or_version))
        except PackageNotFoundError:
            raise PackageNotFoundError(
                f"{library_or_version} is not installed, so its version cannot be compared."
            ) from None
    return OPERATIONS[operation](library_or_version, parse(requirement_version))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the packages that this process has imported."""
    return [name for name in library_names if name in sys.modules]
