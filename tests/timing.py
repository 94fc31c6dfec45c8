"""How long something may take: judged on a machine of its own, with much room beside other tests."""

from __future__ import annotations

import os

ALONE = os.environ.get("MESHWRIGHT_TEST_RATIOS") == "all"
"""Nothing else uses the machine: `.ci/nightly ratios` runs every test file that imports this module, and says so."""


def limit(seconds: float) -> float:
    """Return the seconds that something may take; in the gate ten times what it may take on a machine of its own."""
    return seconds if ALONE else 10 * seconds
