"""Write and read no checkpoints, log nothing: a plan leaves no files."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .....accelerator import Accelerator
from .....accelerator.effects import begin_dry_run
from .building import when_imported


def write_nothing() -> None:
    """Make what writes checkpoints, weights and logs do nothing, silently."""
    for name in ("load_state", "resume"):  # what is there has numbers, and a traced model has none
        setattr(Accelerator, name, _nothing)
    begin_dry_run()
    torch.save = _nothing
    when_imported("safetensors.torch", _without(("save_file", "save_model")))
    when_imported("transformers.modeling_utils", _without_method("PreTrainedModel", "save_pretrained", "push_to_hub"))
    when_imported("transformers.trainer", _without_method("Trainer", "save_model", "_save_checkpoint", "push_to_hub"))
    when_imported("diffusers.models.modeling_utils", _without_method("ModelMixin", "save_pretrained", "push_to_hub"))
    when_imported("huggingface_hub.hf_api", _without(("create_repo", "upload_folder")))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


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
