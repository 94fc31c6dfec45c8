"""Published path of the launchers from Python; they live in `accelerate.launch`."""

from .launch.notebook.launcher import debug_launcher, notebook_launcher
from .launch.ray.launcher import ray_launcher

__all__ = ["debug_launcher", "notebook_launcher", "ray_launcher"]
