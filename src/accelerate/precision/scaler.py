"""A loss scaler that several optimizers can share."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from ..runtime.device import default_device


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

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per update."""
        if id(optimizer) not in self._unscaled:
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

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
