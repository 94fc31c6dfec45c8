"""Names of Megatron-LM's engine, which is not here: scripts import them, and use them only where it runs."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import UnsupportedSettingError


class _OfMegatron:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedSettingError(
            f"{type(self).__name__}(...)",
            "the Megatron-LM engine is not part of this version.",
            "Use ParallelismConfig for tensor, pipeline, context and sharded data parallelism.",
        )


class MegatronLMPlugin(_OfMegatron):
    """Ask for Megatron-LM: refused, by name."""


class MegatronLMDummyScheduler(_OfMegatron):
    """Stand for the scheduler that Megatron-LM makes: refused, by name."""


class MegatronLMDummyDataLoader(_OfMegatron):
    """Stand for the data loader that Megatron-LM makes: refused, by name."""
