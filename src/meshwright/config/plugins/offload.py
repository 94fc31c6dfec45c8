"""`OffloadConfig`: where the repeated blocks of a model are kept while they do not compute."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..origins import resolve

PLACEMENTS = ("host", "disk")


@dataclass(frozen=True)
class OffloadConfig:
    """Keep the repeated blocks of a model, their gradients and their optimizer state outside of the device."""

    placement: str = "host"
    """Where the blocks are kept: "host" (pinned memory) or "disk"."""
    folder: str | os.PathLike[str] | None = None
    """A folder on the disk to use; by default that of temporary files."""
    block_classes: tuple[str, ...] | None = None
    """Class names of the blocks; by default those that the model or its lists of modules name."""
    step_in_backward: bool | None = None
    """Whether a block's parameters are updated as soon as its gradients are complete, while the backward pass goes on.
    None does so from the second step on, if the first one shows that it gives the same result."""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"OffloadConfig(placement={self.placement!r}): choose one of {', '.join(PLACEMENTS)}.")
        if self.folder is not None and self.placement != "disk":
            raise ValueError(f"OffloadConfig(folder=...) is for placement='disk', not {self.placement!r}.")
        if self.block_classes is not None:
            object.__setattr__(self, "block_classes", tuple(self.block_classes))  # a list is fine, too


def resolve_offload(in_code: OffloadConfig | str | None) -> OffloadConfig | None:
    """Return how blocks are offloaded, by code or by `--offload_training`; None if they are not."""
    if isinstance(in_code, OffloadConfig):
        return in_code
    if in_code is not None and not isinstance(in_code, str):
        raise TypeError(f"`offload` must be an OffloadConfig or a placement, not a {type(in_code).__name__}.")
    placement: Any = resolve("offload_training", in_code, None).value
    return None if placement is None else OffloadConfig(placement=placement)
