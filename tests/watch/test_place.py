"""Where a thread stands, looked at from another one."""

from __future__ import annotations

import ast
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.watch.place import USER_CODE, Place, describe_error, guard_of, place_of, place_of_error, signature_of


def place_while(work: Callable[[threading.Event], object]) -> Place:
    """Look at a thread in the middle of its work, which ends with an event."""
    end = threading.Event()
    thread = threading.Thread(target=work, args=(end,))
    thread.start()
    time.sleep(0.3)
    place = place_of(thread.ident or 0)
    end.set()
    thread.join()
    assert place is not None
    return place


def sleep(end: threading.Event) -> None:
    while not end.is_set():
        time.sleep(0.5)


def this_line() -> int:
    import sys

    return sys._getframe(1).f_lineno


def test_the_users_line_and_what_it_called() -> None:
    def work(end: threading.Event) -> None:
        end.wait(60)

    place = place_while(work)
    assert (place.location(), place.call, place.phase) == (f"test_place.py:{this_line() - 3}", "wait()", USER_CODE)
    assert place.source == "end.wait(60)"
    assert place.at_lock


def test_a_sleep_is_no_lock() -> None:
    assert not place_while(sleep).at_lock


def test_a_thread_that_has_ended() -> None:
    assert place_of(-1) is None
    assert signature_of(-1) is None


def test_where_an_exception_came_from() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert place_of_error(caught.value).location() == f"test_place.py:{this_line() - 1}"
    assert describe_error(caught.value).startswith("ValueError: invalid literal")


def test_an_exception_that_is_being_handled() -> None:
    def work(end: threading.Event) -> None:
        try:
            raise KeyError("sample 7")
        except KeyError:
            sleep(end)

    assert "KeyError: 'sample 7' (test_place.py" in place_while(work).handling


def test_the_condition_around_a_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            if debug:
                if accelerator.is_main_process:
                    a()
                else:
                    b()
            c()
            """
        )
    )
    assert guard_of(str(script), 4) == "`if accelerator.is_main_process:` (line 3)"
    assert guard_of(str(script), 6) == "`else of if accelerator.is_main_process:` (line 3)"
    assert guard_of(str(script), 7) == ""


def test_a_thread_that_parses_at_the_same_time_costs_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("if accelerator.is_main_process:\n    accelerator.gather(loss)  # alone\n")

    def as_python_311(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=39, after=33)")

    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", as_python_311)
        assert guard_of(str(script), 2) == ""
    assert guard_of(str(script), 2) == "`if accelerator.is_main_process:` (line 1)"
