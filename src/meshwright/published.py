"""Make a module of published names: thin, but with an effect.

[Note: overwriting] Some libraries replace a function of a published module and expect the library itself to call the
replacement. The code that would call it stands in another module, with a name of its own for the function. An
assignment to a published name is therefore made wherever the same object has the same name.

[Note: pickles] A pickle names classes by their module. A class says that it is of its published module, so that what
users keep can be read where only the published package is installed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_OURS = ("meshwright", "accelerate")


class PublishedModule(ModuleType):
    """A module where overwriting a name has an effect on the code that uses it."""

    def __setattr__(self, name: str, value: Any) -> None:
        missing = object()
        before = missing if name.startswith("__") else getattr(self, name, missing)
        super().__setattr__(name, value)
        if before is missing or isinstance(before, ModuleType):
            return
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] in _OURS:
                names = vars(module)
                if names.get(name, missing) is before:
                    names[name] = value


def publish(module: str) -> None:
    """Call at the end of a published module: its classes are of this module, and its names can be overwritten."""
    published = sys.modules[module]
    for name, value in list(vars(published).items()):
        if isinstance(value, type) and value.__qualname__ == name and value.__module__.startswith("meshwright."):
            value.__module__ = module
    published.__class__ = PublishedModule
