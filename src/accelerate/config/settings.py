"""What one Accelerator was asked for, resolved once, with the origin of every value."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedSettingError
from .enums import PrecisionType
from .environment import COMPILE_VARIABLE, read, read_setting, requested_engine, variable_of
from .origins import NOT_YET, ORIGINS_VARIABLE, Resolved
from .plugins import GradientAccumulationPlugin


def resolve(setting: str, in_code: Any, default: Any) -> Resolved:
    """Choose a value: code first, then the environment, then the default."""
    if in_code is not None:
        return Resolved(value=in_code, origin="code")
    from_environment = read_setting(setting)
    if from_environment is not None:
        handed_over = json.loads(read(ORIGINS_VARIABLE) or "{}").get(setting)
        origin = f"accelerate launch, {handed_over}" if handed_over else f"environment variable {variable_of(setting)}"
        return Resolved(value=from_environment, origin=origin)
    return Resolved(value=default, origin="default")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of one Accelerator that shape its training steps."""

    mixed_precision: str
    """Number format of the forward pass: "no", "fp16" or "bf16"."""
    gradient_accumulation: GradientAccumulationPlugin
    """How micro-batches add up to an optimizer step."""
    origins: Mapping[str, str]
    """Field name -> where its value came from."""

    @classmethod
    def from_arguments(
        cls,
        *,
        mixed_precision: str | None,
        gradient_accumulation_steps: int,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    ) -> TrainingSettings:
        """Resolve the arguments of `Accelerator` against the environment."""
        precision = resolve("mixed_precision", mixed_precision, "no")
        check_precision(str(precision.value), precision.origin)
        refuse_requested_engine()
        if gradient_accumulation_plugin is not None:
            if gradient_accumulation_steps != 1:
                raise ValueError(
                    f"Accelerator was given gradient_accumulation_steps={gradient_accumulation_steps} and a "
                    "gradient_accumulation_plugin: give the number in one place, "
                    "GradientAccumulationPlugin(num_steps=...)."
                )
            plugin, origin = gradient_accumulation_plugin, "code"
            if plugin.num_steps is None:
                raise ValueError("GradientAccumulationPlugin needs num_steps, the micro-batches per step.")
        else:
            in_code = gradient_accumulation_steps if gradient_accumulation_steps != 1 else None
            steps = resolve("gradient_accumulation_steps", in_code, 1)
            plugin, origin = GradientAccumulationPlugin(num_steps=steps.value), steps.origin
        if not isinstance(plugin.num_steps, int) or plugin.num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be 1 or more, not {plugin.num_steps!r} ({origin}).")
        return cls(
            mixed_precision=str(PrecisionType(str(precision.value))),
            gradient_accumulation=plugin,
            origins={"mixed_precision": precision.origin, "gradient_accumulation_steps": origin},
        )

    def explain(self) -> str:
        """Say each value and where it came from, one line each."""
        values = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation.num_steps,
        }
        return "\n".join(f"{name} = {value}  ({self.origins[name]})" for name, value in values.items())


def check_precision(name: str, origin: str) -> None:
    """Refuse an unknown number format, and one that has not landed."""
    if name not in PrecisionType:
        raise ValueError(
            f"mixed_precision={name!r} (from {origin}) is unknown: choose one of {', '.join(PrecisionType.list())}."
        )
    if name == PrecisionType.FP8:
        raise UnsupportedSettingError('mixed_precision="fp8"', NOT_YET, "Use bf16 or fp16.")


def refuse_requested_engine() -> None:
    """Raise if the environment asks for an engine that has not landed, instead of quietly running DDP."""
    backend = read(COMPILE_VARIABLE)
    if backend is not None and backend.lower() != "no":
        warnings.warn(f"{COMPILE_VARIABLE}={backend} has no effect: {NOT_YET} Models run uncompiled.", stacklevel=4)
    requested = requested_engine()
    if requested is not None:
        engine, variable = requested
        raise UnsupportedSettingError(f"{variable}=true", f"it asks for {engine}, and {NOT_YET}", f"Unset {variable}.")
