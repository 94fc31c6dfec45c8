"""Runs that were logged as JSON lines, shown as one HTML page or live in a terminal. Needs numpy, not torch."""

from __future__ import annotations


class ReportError(Exception):
    """Say why there is nothing to show, and what to do.

    `meshwright report` and `meshwright watch` read the files of `log_with="jsonl"`. Name the folder of a run that
    logged with it, or a folder above.
    """
