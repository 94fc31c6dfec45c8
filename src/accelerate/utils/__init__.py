"""The published utility names: façades that only hand names on. Nothing inside the library imports from here."""

from . import constants, dataclasses, environment, memory, modeling, operations, other, random
from .constants import *  # noqa: F403
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .memory import *  # noqa: F403
from .modeling import *  # noqa: F403
from .operations import *  # noqa: F403
from .other import *  # noqa: F403
from .random import *  # noqa: F403

__all__ = sorted(
    {
        *constants.__all__,
        *dataclasses.__all__,
        *environment.__all__,
        *memory.__all__,
        *modeling.__all__,
        *operations.__all__,
        *other.__all__,
        *random.__all__,
    }
)
