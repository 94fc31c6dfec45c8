"""Published path of the files of registered objects. Whole checkpoints are made by `Accelerator.save_state`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .formats import codec
from .formats.saving import save
from .layout import custom_file

__all__ = ["load_custom_state", "save_custom_state"]


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object into a folder, as the `index`-th registered object of a checkpoint."""
    save(obj.state_dict(), Path(path) / custom_file(index), save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state of an object from a folder, or from a checkpoint where it was the `index`-th registered object."""
    obj.load_state_dict(codec.read(Path(path) / custom_file(index)))
