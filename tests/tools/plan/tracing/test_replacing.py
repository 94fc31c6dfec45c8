"""Names of torch that a plan replaces: one that is gone is an error."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.tools.plan.tracing.replacing import replaced


class Place:
    """A class of torch."""

    @staticmethod
    def static() -> None:
        """Do nothing."""


def test_a_name_is_what_it_stands_for() -> None:
    assert replaced(DeviceMesh, "_flatten") is DeviceMesh._flatten
    assert isinstance(replaced(Place, "static"), staticmethod)


def test_a_name_that_is_gone_is_named_with_the_versions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.40.1+cpu")
    message = r"replaces Place\.gone, and torch 2\.40\.1\+cpu has no such name.* made for torch 2\.9, 2\.13, 2\.15"
    with pytest.raises(RuntimeError, match=message):
        replaced(Place, "gone")


def test_a_name_that_an_old_version_does_not_have_yet_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeviceMesh, "_unflatten")
    with pytest.raises(RuntimeError, match=r"DeviceMesh\._unflatten"):
        replaced(DeviceMesh, "_unflatten")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert replaced(DeviceMesh, "_unflatten") is None
