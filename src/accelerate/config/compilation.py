"""`TorchDynamoPlugin`: what `torch.compile` is asked for. It holds values; it reads no environment."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

from .enums import DynamoBackend
from .plugins import KwargsHandler

SETTING_OF_FIELD = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
    "use_regional_compilation": "dynamo_use_regional_compilation",
}
"""Fields that the environment can fill where the code leaves them out."""

DEFAULTS: dict[str, Any] = {
    "backend": DynamoBackend.NO,
    "mode": "default",
    "fullgraph": False,
    "use_regional_compilation": False,
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Say how `prepare` compiles models. A field that is None is left to the environment, then to its default."""

    backend: DynamoBackend | str | None = None
    """Who compiles, such as "inductor" or "aot_eager"; "no" compiles nothing."""
    mode: str | None = None
    """How hard to optimise: "default", "reduce-overhead", "max-autotune"."""
    fullgraph: bool | None = None
    """Refuse a model that cannot be compiled into one graph."""
    dynamic: bool | None = None
    """Compile for changing shapes; None lets torch decide after it has seen them change."""
    options: Any = None
    """Options of the backend, instead of a mode."""
    disable: bool = False
    """Make `torch.compile` do nothing, for debugging."""
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks, each by the same code, instead of the whole model."""

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = backend_named(self.backend)

    @property
    def compiles(self) -> bool:
        """Tell whether anything is to be compiled."""
        return self.backend not in (None, DynamoBackend.NO)

    def filled(self) -> TorchDynamoPlugin:
        """Return a copy whose empty fields have their defaults."""
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        values: dict[str, Any] = {name: DEFAULTS.get(name) if value is None else value for name, value in said.items()}
        return TorchDynamoPlugin(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, with the backend as `torch.compile` spells it."""
        filled = self.filled()
        values = copy.deepcopy({item.name: getattr(filled, item.name) for item in fields(filled)})
        return values | {"backend": str(values["backend"]).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from their defaults."""
        values = super().to_kwargs()
        values.pop("use_regional_compilation", None)
        return values


def backend_named(name: str) -> DynamoBackend:
    """Return a backend by its name in any case."""
    return DynamoBackend(str(name).upper())
