"""`tqdm`, as published: one bar per host instead of one per process."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

from ...config.packages import compare_versions
from ..group.runtime import Runtime


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a tqdm bar that only one process per host shows, drawn by rich in a terminal where that is installed."""
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("tqdm draws with the package tqdm: pip install tqdm (and rich).") from error
    if main_process_only and Runtime.current().local_process_index != 0:
        kwargs["disable"] = True
    in_notebook = "notebook" in bar.__module__
    if not in_notebook and kwargs.get("file") is None and sys.stderr.isatty():
        bar = _drawn_by_rich() or bar
    return bar(*args, **kwargs)


@cache
def _drawn_by_rich() -> Any:
    """Return tqdm's class for rich, set up to use stderr and to show the postfix; None where it cannot be used."""
    try:
        from rich.console import Console
        from tqdm import TqdmExperimentalWarning
        from tqdm.rich import tqdm_rich
    except ImportError:
        return None
    if compare_versions("rich", "<", "14.1"):
        return None  # two bars at once are an error there, and nested loops have two
    console = Console(stderr=True)  # one for all bars, so that nested ones do not overwrite each other

    class RichBar(tqdm_rich):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TqdmExperimentalWarning)
                super().__init__(*args, options={"console": console, **kwargs.pop("options", {})}, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            if hasattr(self, "_task_id"):
                text = "  ".join(part for part in ((self.desc or "").removesuffix(": "), self.postfix) if part)
                self._prog.update(self._task_id, completed=self.n, description=text)

    return RichBar
