"""Published path of the environment helpers; they live in `accelerate.config.environment`."""

from ..config.environment import clear_environment, patch_environment, str_to_bool

__all__ = ["clear_environment", "patch_environment", "str_to_bool"]
