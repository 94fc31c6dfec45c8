"""The tensors of a model's files, read one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.formats.model_files import files_of_model
from .weights import TensorFile


class LazyModelFiles:
    """A model in a file, an index, or a folder with either."""

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.path = Path(checkpoint)
        self.names: dict[str, TensorFile] = {}
        for path in files_of_model(checkpoint):
            file = TensorFile.open(path)
            self.names |= dict.fromkeys(file.names(), file)

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor; nothing else of its file stays in memory."""
        shown = self.names[name].view(name)
        copy = torch.empty(shown.shape, dtype=shown.dtype)
        self.names[name].read_into(name, copy)
        return copy
