"""Open the door: `import accelerate` is meshwright's, in this process and in those that it starts.

What is needed only to refuse is imported then: opening must not slow a start down.
"""

from __future__ import annotations

import os
import site
import sys

import _meshwright_start as start

from . import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NOTE_WHAT_IS_INSTALLED = ("transformers", "diffusers")
"""Packages that look for `accelerate` once, when they are imported."""


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers say which process this is: one of many speaks."""

_NAMES = (("accelerate.py",), ("accelerate", "__init__.py"))

_EARLIER = (
    "Open the door before that: call meshwright.install() or %load_ext meshwright first, or start with "
    "`python -m meshwright`."
)


class DoorError(ImportError):
    """The door cannot be opened: `import accelerate` would be the other package's in some places.

    The message says why, and at which line of the script. Open the door earlier, or install the drop-in distribution.
    """


def open_door(script: str | None = None) -> None:
    """Let `import accelerate` be meshwright's, here and in the processes that are started from here.

    Nothing happens where meshwright's drop-in distribution is installed, because it is so already.

    Args:
        script: The script that will run, in whose folder something may lie that is named accelerate, too.

    Raises:
        DoorError: If another `accelerate` was imported before, or a package that has found none; if Ray has started
            its workers; if Python would not open the door in the processes that are started from here.
    """
    if start.is_open():
        os.environ[start.VARIABLE] = "1"
        return
    _require_nothing_imported()
    if _is_ours_without_a_door():
        return
    _require_open_children()
    hidden = _hidden(script)
    start.open_in_this_process()
    os.environ[start.VARIABLE] = "1"
    if all(os.environ.get(rank, "0") == "0" for rank in _RANKS):
        print(
            f"meshwright {__version__}: `import accelerate` is meshwright's, here and in child processes.",
            *(f"{place} is not imported." for place in hidden),
            file=sys.stderr,
            flush=True,
        )


def _require_nothing_imported() -> None:
    loaded = sys.modules.get("accelerate")
    if loaded is not None and not _is_ours(getattr(loaded, "__file__", None)):
        from .imported_at import imported_at

        raise DoorError(
            f"accelerate {getattr(loaded, '__version__', '(unknown version)')} is imported already, from "
            f"{getattr(loaded, '__file__', None) or 'an unknown place'}.{imported_at('accelerate')} {_EARLIER}"
        )
    early = next((name for name in _NOTE_WHAT_IS_INSTALLED if name in sys.modules), None)
    if loaded is None and early is not None and _installed_version() is None:
        from .imported_at import imported_at

        raise DoorError(
            f"{early} is imported already, and has found that accelerate is not installed.{imported_at(early)} "
            f"{_EARLIER}"
        )
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)() and not _is_open_for_workers(ray):
        raise DoorError(
            "Ray is initialized already, and its workers would import the other accelerate. Call meshwright.install() "
            "before ray.init(). A cluster that runs already also needs "
            f'ray.init(runtime_env={{"env_vars": {{"{start.VARIABLE}": "1"}}}}).'
        )


def _is_open_for_workers(ray: Any) -> bool:
    """Tell whether Ray gives its workers the variable that opens the door."""
    try:
        variables = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    except AttributeError:
        return False
    return bool(variables.get(start.VARIABLE))


def _is_ours(file: str | None) -> bool:
    """Tell whether a package is the published one, behind the door or in the drop-in distribution."""
    if file is None or os.path.basename(file) != "__init__.py" or not os.path.isfile(file):
        return False
    if os.path.samefile(os.path.dirname(file), start.FOLDER):
        return True
    with open(file, "rb") as opened:
        return b"+meshwright." in opened.read(1000)


def _installed_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("accelerate")
    except PackageNotFoundError:
        return None


def _is_ours_without_a_door() -> bool:
    """Tell whether the drop-in distribution is installed. A source tree of ours has no distribution."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec("accelerate", None, None) if find_spec is not None else None
        if spec is not None:
            return _is_ours(spec.origin) and "+meshwright." in (_installed_version() or "")
    return False


def _require_open_children() -> None:
    """Raise unless an interpreter that is started from here would process meshwright's `.pth` file."""
    folders = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    if not any(os.path.isfile(os.path.join(folder, "meshwright.pth")) for folder in folders):
        raise DoorError(
            f"meshwright lies in {os.path.dirname(start.__file__)}, where Python processes no .pth files: processes "
            "that are started from here would import the other accelerate. Install meshwright into the environment, or "
            "install its drop-in distribution: `meshwright dropin --wheel DIR`. For a script that imports meshwright "
            f"only, {start.VARIABLE}=0 leaves the door closed."
        )


def _hidden(script: str | None) -> list[str]:
    """Return local files and source trees named accelerate that would be imported if the door were closed."""
    first = sys.path if script is None else [os.path.dirname(script) or os.curdir, *sys.path]
    installed = ("site-packages", "dist-packages")
    places = dict.fromkeys(os.path.abspath(folder) for folder in first if not folder.rstrip(os.sep).endswith(installed))
    files = (os.path.join(place, *name) for place in places for name in _NAMES)
    return [file for file in files if os.path.isfile(file) and not _is_ours(file)]
