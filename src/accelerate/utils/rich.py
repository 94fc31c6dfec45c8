"""Importing this lets rich print tracebacks, as published."""

from importlib.util import find_spec

if find_spec("rich") is None:
    raise ModuleNotFoundError("accelerate.utils.rich needs rich: pip install rich")

from rich.traceback import install

install(show_locals=False)
