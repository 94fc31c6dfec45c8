"""Published path of what concerns a model's weights."""

from ..checkpoint.model_files import load_checkpoint_in_model

__all__ = ["load_checkpoint_in_model"]
