"""Published path of `is_..._available`."""

from ..facade import overwritable
from ..runtime import abilities
from ..runtime.abilities import *  # noqa: F403

__all__ = [name for name in dir(abilities) if name.startswith("is_") or name.endswith("_required")]

overwritable(__name__, dict.fromkeys(__all__, (".runtime.abilities",)))
