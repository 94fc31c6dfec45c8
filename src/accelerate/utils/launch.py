"""Published path of what runs a function in a new process; it lives in `accelerate.launch.notebook.spawned`."""

from ..launch.notebook.spawned import PrepareForLaunch

__all__ = ["PrepareForLaunch"]
