"""fp16 and bf16 through `torch.autocast`; fp16 also scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..config.plugins.handlers import AutocastKwargs, GradScalerKwargs
from ..runtime.collectives.nested import convert_to_fp32
from ..runtime.devices.device import supports_low_precision
from ..runtime.group.runtime import Runtime
from .full import FullPrecision
from .scaler import SharedGradScaler


class AutocastForward:
    """A model's forward pass under autocast, with outputs converted to fp32.

    Building a `torch.autocast` costs more than entering one, so idle ones are pooled. A nested or concurrent call finds
    the pool empty and builds its own.
    """

    def __init__(self, forward: Callable[..., Any], autocast: Callable[[], torch.autocast]) -> None:
        self.forward = forward
        self.autocast = autocast
        self._idle: list[torch.autocast] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        if torch.compiler.is_compiling():  # the compiler can trace a new context, not a pooled one
            with self.autocast():
                return convert_to_fp32(self.forward(*args, **kwargs))
        try:
            context = self._idle.pop()
        except IndexError:
            context = self.autocast()
        try:
            with context:
                outputs = self.forward(*args, **kwargs)
        finally:
            self._idle.append(context)
        return convert_to_fp32(outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the pooled contexts; a bound forward is copied with its model."""
        return {"forward": self.forward, "autocast": self.autocast}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class AmpPrecision(FullPrecision):
    """Compute in fp16 or bf16 where autocast does; parameters and outputs stay fp32."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        autocast: AutocastKwargs,
        scaler: GradScalerKwargs | None = None,
    ) -> None:
        if not supports_low_precision(device, dtype):
            other = "bf16" if dtype == torch.float16 else "fp16"
            raise ValueError(f"{device} cannot compute in {dtype}: use mixed_precision {other} or no.")
        self.dtype = dtype
        self.device_type = device.type
        self.autocast_handler = autocast
        if scaler is not None:
            self.scaler = SharedGradScaler(device.type, **scaler.to_dict())

    def wrap_forward(self, model: nn.Module) -> None:
        """Wrap the model's forward in autocast; the original is kept as `_original_forward`."""
        model = getattr(model, "_orig_mod", model)  # inside the compiled module, so that autocast is compiled too
        model._original_forward = model.forward
        model.forward = AutocastForward(model.forward, self._autocast_of(self.autocast_handler))

    def _autocast_of(self, handler: AutocastKwargs) -> Callable[[], torch.autocast]:
        return partial(torch.autocast, self.device_type, dtype=self.dtype, **handler.to_dict())

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return a new autocast context."""
        return self._autocast_of(handler or self.autocast_handler)()

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss in fp16, so that small gradients do not underflow."""
        return loss if self.scaler is None else self.scaler.scale(loss)


def remove_forward_wrapper(model: nn.Module) -> None:
    """Restore a model's own forward."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    is_class_forward = isinstance(original, MethodType) and original.__func__ is type(model).forward
    if is_class_forward:
        del model.__dict__["forward"]
    else:
        model.forward = original


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast of the newest `Accelerator`'s number format, or a context that does nothing."""
    runtime = Runtime.current()
    dtype = _DTYPES.get(str((runtime.training or {}).get("_mixed_precision")))
    if not native_amp or dtype is None:
        return nullcontext()
    return torch.autocast(runtime.device.type, dtype=dtype, **(autocast_kwargs or AutocastKwargs()).to_kwargs())


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
