"""The published utility names: façades that only hand names on. Nothing inside the library imports from here."""

from importlib import import_module
from typing import Any

from . import (
    ao,
    constants,
    dataclasses,
    environment,
    imports,
    memory,
    modeling,
    offload,
    operations,
    other,
    random,
    versions,
)
from .ao import *  # noqa: F403
from .constants import *  # noqa: F403
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .imports import *  # noqa: F403
from .memory import *  # noqa: F403
from .modeling import *  # noqa: F403
from .offload import *  # noqa: F403
from .operations import *  # noqa: F403
from .other import *  # noqa: F403
from .random import *  # noqa: F403
from .versions import *  # noqa: F403

__all__ = sorted(
    {
        *ao.__all__,
        *constants.__all__,
        *dataclasses.__all__,
        *environment.__all__,
        *imports.__all__,
        *memory.__all__,
        *modeling.__all__,
        *offload.__all__,
        *operations.__all__,
        *other.__all__,
        *random.__all__,
        *versions.__all__,
    }
)

# Loaded on first use, because torch's checkpoint engine takes long to import.
_OF_FSDP_UTILS = (
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
)
_OF_BNB = ("has_4bit_bnb_layers", "load_and_quantize_model")
__all__ += [*_OF_FSDP_UTILS, *_OF_BNB]


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for (PEP 562)."""
    module = ".fsdp_utils" if name in _OF_FSDP_UTILS else ".bnb" if name in _OF_BNB else None
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
