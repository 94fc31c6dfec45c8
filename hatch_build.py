"""Build hook: a wheel and an editable install have the files of the door."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

START = {
    "src/meshwright.pth": "meshwright.pth",
    "src/meshwright.start": "meshwright.start",  # takes the place of .pth files from Python 3.15 on
}
PACKAGE = {
    "src/_meshwright_start.py": "_meshwright_start.py",
    "src/accelerate": "meshwright/overlay/accelerate",  # found through the door only
}


class Door(BuildHookInterface):  # type: ignore[type-arg]
    """Add what lets Python open the door at start-up, and what `import accelerate` finds then."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files. An editable install finds the package in the source tree."""
        if version == "editable":
            build_data["force_include_editable"].update(START)
        else:
            build_data["force_include"].update(START | PACKAGE)
