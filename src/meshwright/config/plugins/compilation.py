"""`TorchDynamoPlugin`: the arguments of `torch.compile`, from the code or the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..enums import DynamoBackend
from ..environment import read_setting, variable_of
from .handlers import KwargsHandler

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
    """Configure how `prepare` compiles models. A field that is None comes from the environment, or has its default."""

    backend: DynamoBackend | str | None = None
    """Backend of `torch.compile`, such as "inductor" or "aot_eager"; "no" compiles nothing."""
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
        self.in_code = frozenset(field for field in SETTING_OF_FIELD if getattr(self, field) is not None)
        for field, setting in SETTING_OF_FIELD.items():
            if field not in self.in_code:
                value = read_setting(setting)
                setattr(self, field, DEFAULTS.get(field) if value is None else value)
        try:
            self.backend = backend_named(self.backend)
        except ValueError as error:
            origin = "code" if "backend" in self.in_code else f"environment variable {variable_of('dynamo_backend')}"
            raise ValueError(f"dynamo_backend (from {origin}): {error}") from None

    @property
    def compiles(self) -> bool:
        """Return whether anything is to be compiled."""
        return self.backend != DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return all values, with the backend as `torch.compile` spells it."""
        return super().to_dict() | {"backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from their defaults, independent of the environment."""
        defaults: dict[str, Any] = DEFAULTS | {"backend": str(DEFAULTS["backend"]).lower(), "disable": False}
        return {
            name: value
            for name, value in self.to_dict().items()
            if name != "use_regional_compilation" and value != defaults.get(name)
        }


def backend_named(name: Any) -> DynamoBackend:
    """Return a backend by its name in any case."""
    return DynamoBackend(str(name).upper())
