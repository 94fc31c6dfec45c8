from __future__ import annotations

import resource
import warnings

import pytest

from tests.sizes import sized

from .__main__ import run
from .targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_returns_or_refuses(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(name, TARGETS[name], sized(gate=10_000, nightly=1_000_000), seed=20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024, "KiB more than before"
