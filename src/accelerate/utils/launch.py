"""Published path of what starts a function in a process of its own; it lives in `accelerate.launch.spawned`."""

from ..launch.notebook.spawned import PrepareForLaunch

__all__ = ["PrepareForLaunch"]
