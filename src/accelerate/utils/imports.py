"""Published path of `is_..._available`."""

from ..runtime.devices import abilities
from ..runtime.devices.abilities import *  # noqa: F403
from .facade import overwritable

__all__ = [name for name in dir(abilities) if name.startswith("is_") or name.endswith("_required")]

overwritable(__name__, dict.fromkeys(__all__, (".runtime.devices.abilities",)))
