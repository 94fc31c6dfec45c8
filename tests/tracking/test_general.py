from __future__ import annotations

from typing import Any

import pytest

from meshwright import GeneralTracker, on_main_process
from meshwright.tracking.general import BlankTracker
from tests.ranks import ranks


class Whole(GeneralTracker):
    name = "whole"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def tracker(self) -> list[str]:
        raise RuntimeError("there is no run before start()")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append("log")


class Everywhere(Whole):
    main_process_only = False


def test_a_tracker_that_has_everything_is_made_without_asking_its_client() -> None:
    assert Whole().name == "whole"


def test_all_missing_attributes_raise_at_construction() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half is missing the following required attributes") as raised:
        Half()
    assert "requires_logging_directory = False" in str(raised.value)
    assert "a property `tracker`" in str(raised.value)
    assert "name =" not in str(raised.value)


def test_names_that_are_set_in_the_constructor_count() -> None:
    class Late(GeneralTracker):
        def __init__(self) -> None:
            self.name, self.requires_logging_directory, self.tracker = "late", False, object()
            super().__init__()

    assert Late().name == "late"


@ranks(2)
def test_guarded_methods_run_on_the_main_process_unless_the_tracker_is_for_every_process() -> None:
    from meshwright import PartialState

    main_only, everywhere = Whole(), Everywhere()
    main_only.log({})
    everywhere.log({})
    assert main_only.calls == (["log"] if PartialState().is_main_process else [])
    assert everywhere.calls == ["log"]


def test_a_blank_tracker_takes_every_call_and_stays_blank() -> None:
    blank = BlankTracker()
    assert blank.tracker.experiment.log_artifact("x", step=1) is blank
    blank.summary["best"] = 7
    with blank.span("x") as inside:
        assert inside["y"] is blank
    assert not hasattr(blank, "__len__")
