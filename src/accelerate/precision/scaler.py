"""A loss scaler that several optimizers can share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import Tensor

from ..runtime.devices.device import default_device


class SharedGradScaler(torch.amp.GradScaler):
    """torch's `GradScaler`, right also when one backward pass feeds several optimizers.

    torch wants `update()` once, after the last optimizer has stepped; a prepared optimizer cannot know whether it is
    the last. With more than one optimizer the update therefore waits for whatever needs the new scale: the next
    `scale()`, or a look at the state. `unscale_` may be called again for the same gradients and then does nothing,
    so that clipping two parameter sets is not an error.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.num_optimizers = 0
        self._update_is_due = False
        self._unscaled: set[int] = set()

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None and self.is_enabled():  # torch speaks of scaler.scale(), which users here do not call
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
        """Divide gradients mesh by mesh: torch's kernel takes those of one at a time, or plain ones."""
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
        self.settle()
        return super().scale(outputs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale to what the optimizers saw; deferred while others may still step."""
        self._update_is_due = True
        if new_scale is not None or self.num_optimizers <= 1:
            self.settle(new_scale)

    def settle(self, new_scale: float | Tensor | None = None) -> None:
        """Carry out an update that is due."""
        if self._update_is_due:
            self._update_is_due = False
            self._unscaled.clear()
            super().update(new_scale)

    def get_scale(self) -> float:
        """Return the current scale."""
        self.settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, with no update outstanding."""
        self.settle()
        return super().state_dict()


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's loss scaler for this machine's device; it knows sharded gradients too."""
    return torch.amp.GradScaler(default_device().type, **kwargs)
