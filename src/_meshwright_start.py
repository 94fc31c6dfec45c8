"""The door: `import accelerate` finds meshwright's. `meshwright.pth` imports it at start-up if MESHWRIGHT_DOOR is set.

Every Python process of a run passes through this file, so it imports nothing that an interpreter has not imported by
itself, and it is no part of the package `meshwright`, which would be imported first.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution

VARIABLE = "MESHWRIGHT_DOOR"
_HERE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED = os.path.join(_HERE, "meshwright", "overlay")
FOLDER = os.path.join(_INSTALLED if os.path.isdir(_INSTALLED) else _HERE, "accelerate")
"""The published package: inside of an installed meshwright, or beside it in a source tree."""


class Door:
    """Find the package `accelerate` and its distribution, before anything on `sys.path` is asked."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return where the package is. Its modules are found by its `__path__`."""
        if name != "accelerate":
            return None
        from importlib.util import spec_from_file_location

        file = os.path.join(FOLDER, "__init__.py")
        return spec_from_file_location(name, file, submodule_search_locations=[FOLDER])

    @staticmethod
    def find_distributions(context: object = None) -> "Iterator[Distribution]":
        """Return the distribution. Who looks into given folders, as pip does, finds what is installed there."""
        name = getattr(context, "name", None)
        if (context is not None and "path" in vars(context)) or (name or "accelerate").lower() != "accelerate":
            return iter(())
        from meshwright.distribution import PublishedDistribution

        return iter((PublishedDistribution(),))

    @staticmethod
    def invalidate_caches() -> None:
        """There are none."""


def is_open() -> bool:
    """Tell whether this process finds meshwright's `accelerate`."""
    return Door in sys.meta_path


def stays_closed() -> bool:
    """Tell whether the environment says that the door stays closed."""
    return os.environ.get(VARIABLE) == "0"


def open_in_this_process() -> None:
    """Let `import accelerate` find meshwright's from now on."""
    if not is_open():
        sys.meta_path.insert(0, Door)


def enter() -> None:
    """Open the door if the process that started this one says so."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        open_in_this_process()
