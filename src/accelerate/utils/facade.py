"""Published paths: modules that hand names on, and hand back what other libraries put in their place.

[Note: overwriting] Some libraries replace a function of a published module and expect the library itself to call the
replacement. The code that would call it stands in another module, with a name of its own for the function. A published
module therefore says where its names are used, and an assignment to one of them is made there too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class PublishedModule(ModuleType):
    """A module where overwriting a name has an effect on the code that uses it."""

    _used_in: Mapping[str, tuple[str, ...]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for place in self._used_in.get(name, ()):
            setattr(import_module(place, "accelerate"), name, value)


def overwritable(module: str, used_in: Mapping[str, tuple[str, ...]]) -> None:
    """Let assignments to names of a module reach the modules where they are used: {name: (".room.file", ...)}."""
    published = sys.modules[module]
    published.__dict__["_used_in"] = used_in
    published.__class__ = PublishedModule
