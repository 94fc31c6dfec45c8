"""One item is loaded ahead, in the order of the last use."""

from __future__ import annotations

import threading

import pytest
import torch

from meshwright.runtime.streams.read_ahead import ReadAhead

HOST = torch.device("cpu")


def use(ahead: ReadAhead[str, str], item: str) -> str | None:
    """Use an item, and start to load the next one."""
    loaded = ahead.take(item)
    following = ahead.next_of(item)
    if following is not None:
        ahead.start(following, lambda: f"loaded {following}", HOST)
    return loaded


def test_the_next_item_is_loaded_ahead() -> None:
    ahead: ReadAhead[str, str] = ReadAhead()
    for item in "abc":
        ahead.add(item)
    assert [use(ahead, item) for item in "abc"] == [None, "loaded b", "loaded c"]


def test_the_order_is_that_of_the_last_use() -> None:
    ahead: ReadAhead[str, str] = ReadAhead()
    for item in "abc":
        ahead.add(item)
    for item in "acb":
        use(ahead, item)
    assert [use(ahead, item) for item in "acb"] == [None, "loaded c", "loaded b"]


def test_what_was_loaded_in_vain_is_discarded() -> None:
    discarded: list[str] = []
    ahead: ReadAhead[str, str] = ReadAhead(discard=discarded.append)
    began = threading.Event()

    def load() -> str:
        began.set()
        return "loaded b"

    ahead.start("b", load, HOST)
    assert began.wait(10)
    assert ahead.take("c") is None
    assert discarded == ["b"]
    assert ahead.take("b") is None


def test_an_error_of_loading_is_raised_where_the_item_is_used() -> None:
    ahead: ReadAhead[str, str] = ReadAhead()

    def fail() -> str:
        raise OSError("the disk is gone")

    ahead.start("b", fail, HOST)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take("b")
