"""Whether a rank fits on a device."""

from __future__ import annotations

from meshwright.tools.plan.memory.fit import EXPANDABLE, FITS, FULL, GROUP, TIGHT, Fit, fit_of, libraries_of
from meshwright.tools.plan.memory.peak import memory_of
from tests.tools.plan.made import MIB, model


def test_the_allocator_decides_between_fits_and_tight() -> None:
    def verdict(capacity: float) -> str:
        return Fit("A100", capacity, libraries=10, allocated=80, reserved=100, expandable=90).verdict

    assert [verdict(capacity) for capacity in (110, 109, 99, 90, 89)] == [FITS, EXPANDABLE, TIGHT, TIGHT, FULL]


def test_the_margin_is_what_remains_beside_driver_and_libraries() -> None:
    memory = memory_of(model(4))
    fit = fit_of(memory, "A100", capacity=400 * MIB, libraries=100 * MIB)
    assert fit.margin == 300 * MIB - memory.reserved
    small = fit_of(memory, "A10", capacity=110 * MIB, libraries=100 * MIB)
    assert small.margin == 10 * MIB - min(memory.reserved, memory.expandable)


def test_every_group_of_ranks_has_buffers() -> None:
    assert libraries_of(600 * MIB, groups=3) == 600 * MIB + 3 * GROUP
