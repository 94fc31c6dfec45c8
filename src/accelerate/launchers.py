"""Published path of the launchers from Python; they live in `accelerate.launch.notebook`."""

from .launch.notebook.launcher import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
