"""Write and read no checkpoints, log nothing: a plan leaves no files."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .....accelerator import Accelerator
from .building import when_imported


def write_nothing() -> None:
    """Make what writes checkpoints, weights and logs do nothing, silently."""
    for name in ("save", "save_model", "load_state", "resume", "log", "log_images", "init_trackers"):
        if hasattr(Accelerator, name):
            setattr(Accelerator, name, _nothing)
    Accelerator.get_tracker = lambda self, name, unwrap=False: _Silent()  # type: ignore[method-assign]
    Accelerator.save_state = _saved  # type: ignore[method-assign, assignment]
    torch.save = _nothing
    when_imported("safetensors.torch", _without(("save_file", "save_model")))
    when_imported("transformers.modeling_utils", _without_method("PreTrainedModel", "save_pretrained", "push_to_hub"))
    when_imported("transformers.trainer", _without_method("Trainer", "save_model", "_save_checkpoint", "push_to_hub"))
    when_imported("diffusers.models.modeling_utils", _without_method("ModelMixin", "save_pretrained", "push_to_hub"))
    when_imported("huggingface_hub.hf_api", _without(("create_repo", "upload_folder")))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


class _Silent:
    """A tracker that accepts every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Silent()


def _saved(self: Any, output_dir: str | os.PathLike[str] | None = None, **options: Any) -> str:
    return os.fspath(output_dir or "")


def _without(names: tuple[str, ...]) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        for name in names:
            setattr(module, name, _nothing)

    return change


def _without_method(kind: str, *names: str) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        for name in names:
            setattr(getattr(module, kind), name, _nothing)

    return change
