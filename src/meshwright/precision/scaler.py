"""A loss scaler that several optimizers can share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import Tensor

from ..runtime.devices.device import default_device


class SharedGradScaler(torch.amp.GradScaler):
    """torch's `GradScaler`, also correct when one backward pass serves several optimizers.

    torch expects one `update()` after the last optimizer step; a prepared optimizer cannot know whether it is the last.
    With several optimizers the update is deferred until the new scale is needed: by the next `scale()`, or when the
    state is read. A second `unscale_` of the same gradients does nothing, so that two parameter sets can be clipped.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.num_optimizers = 0
        self._update_is_due = False
        self._unscaled: set[int] = set()

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if (
            self._scale is None and self.is_enabled()
        ):  # torch's message names scaler.scale(), which users do not call here
            raise RuntimeError(
                f"fp16 needs scaled losses, and {funcname}() was called before a loss was scaled: call "
                "accelerator.backward(loss) instead of loss.backward()."
            )
        return super()._check_scale_growth_tracker(funcname)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per update."""
        if id(optimizer) not in self._unscaled:
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients mesh by mesh, because torch's kernel takes one mesh at a time."""
        by_mesh: dict[Any, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
        found: dict[torch.device, Tensor] = {}
        for params in by_mesh.values():
            part: Any = SimpleNamespace(param_groups=[{"params": params}])
            for device, value in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Any) -> Any: ...
    def scale(self, outputs: Any) -> Any:
        """Multiply by the current scale."""
        self.flush()
        return super().scale(outputs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale; deferred while other optimizers may still step."""
        self._update_is_due = True
        if new_scale is not None or self.num_optimizers <= 1:
            self.flush(new_scale)

    def flush(self, new_scale: float | Tensor | None = None) -> None:
        """Run a deferred update."""
        if self._update_is_due:
            self._update_is_due = False
            self._unscaled.clear()
            super().update(new_scale)

    def get_scale(self) -> float:
        """Return the current scale."""
        self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, after any deferred update."""
        self.flush()
        return super().state_dict()


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's `GradScaler` for this machine's device; it supports sharded gradients."""
    return torch.amp.GradScaler(default_device().type, **kwargs)
