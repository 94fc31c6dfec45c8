from __future__ import annotations

import resource
import warnings

import pytest

from tests.sizes import sized

from .__main__ import run
from .targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_returns_or_refuses(name: str) -> None:
    inputs = {"table": 10_000, "program": 10_000, "torch": 1_000, "yaml": 500}.get(name, 2_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(name, TARGETS[name], inputs * sized(gate=1, nightly=100), seed=20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024, "KiB more than before"
