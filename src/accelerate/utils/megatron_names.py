"""Names of Megatron-LM's engine, which is not here: its settings run on torch's engines."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedSettingError


class MegatronLMDummyDataLoader:
    """Stand for the data loader that Megatron-LM makes: refused, by name."""

    def __init__(self, **dataset_kwargs: Any) -> None:
        raise UnsupportedSettingError(
            "MegatronLMDummyDataLoader(...)",
            "Megatron-LM's data sets are not here.",
            "Give prepare() a DataLoader.",
        )
