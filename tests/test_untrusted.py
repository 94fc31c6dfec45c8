from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

from meshwright.errors import InvalidDataError
from meshwright.untrusted import (
    build,
    open_regular,
    parse_json,
    parse_object,
    parse_yaml,
    printable,
    read_bytes,
    read_json,
    require_plain_name,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Inner:
    size: int
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size is negative")


@dataclass(frozen=True)
class Record:
    number: int
    share: float
    name: str
    done: bool = False
    kind: Literal["a", "b"] = "a"
    maybe: int | None = None
    inner: Mapping[str, Inner] = field(default_factory=dict)
    pair: tuple[int, int] = (0, 0)
    names: list[str] = field(default_factory=list)


GOOD: dict[str, Any] = {"number": 1, "share": 0.5, "name": "x"}


@given(PLAIN)
def test_what_json_wrote_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value), "it") == value


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,]", "nan", "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100_000, '{"a":' * 100_000,
        "[" * 65 + "]" * 65, '{"a": 1, "a": 2}', "1 2", b"\xff\xfe", b"\x00", "\x00",
    ],
)  # fmt: skip
def test_other_texts_are_refused_by_one_error(text: str | bytes) -> None:
    with pytest.raises(InvalidDataError, match="the note"):
        parse_json(text, "the note")


@pytest.mark.parametrize("piece", ["[],", "{},", "0,"])
def test_a_text_of_many_values_is_refused_before_they_are_made(piece: str) -> None:
    text = "[" + piece * 5_000_000 + "1]"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidDataError, match="holds too many values"):
            parse_json(text, "the file")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_text_has_a_largest_size() -> None:
    with pytest.raises(InvalidDataError, match="larger than 10 bytes"):
        parse_json('"0123456789"', "the note", most_bytes=10)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        parse_object(content, "it")
    except InvalidDataError:
        return
    json.loads(content)


def test_a_dataclass_is_built_with_all_its_parts() -> None:
    value = GOOD | {"share": 1, "maybe": 3, "inner": {"f": {"size": 2}}, "pair": [1, 2], "names": ["n"], "kind": "b"}
    assert build(Record, value, "it") == Record(1, 1.0, "x", False, "b", 3, {"f": Inner(2)}, (1, 2), ["n"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "number is true or false, expected int"),
        ({"number": 1.0}, "number is a number, expected int"),
        ({"number": "1"}, "number is a text"),
        ({"number": 1 << 70}, "number is a number"),
        ({"share": True}, "share is true or false, expected float"),
        ({"name": None}, "name is null"),
        ({"done": 1}, "done is a number, expected bool"),
        ({"kind": "c"}, "kind is a text"),
        ({"kind": ["a"]}, "kind is a list"),
        ({"maybe": "x"}, "maybe is a text"),
        ({"inner": []}, "inner is a list"),
        ({"inner": {"f": {"size": -1}}}, "size is negative"),
        ({"inner": {"f": {}}}, "inner.f lacks the field 'size'"),
        ({"inner": {"f": {"size": 1, "extra": 1}}}, "inner.f has the unknown field 'extra'"),
        ({"pair": [1]}, "pair has 1 values, expected 2"),
        ({"names": [1]}, r"names\[0\] is a number"),
        ({"names": "abc"}, "names is a text"),
        ({"__class__": "x"}, "unknown field '__class__'"),
    ],
)
def test_a_value_of_another_type_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidDataError, match=f"the record is damaged: .*{reason}"):
        build(Record, GOOD | change, "the record")


@pytest.mark.parametrize("value", [None, 1, [], "x"])
def test_something_else_than_an_object_is_no_record(value: Any) -> None:
    with pytest.raises(InvalidDataError, match="expected an object"):
        build(Record, value, "the record")


@given(PLAIN)
def test_any_value_is_built_or_refused(value: Any) -> None:
    with pytest.raises(InvalidDataError):
        build(Record, value, "it")
    with pytest.raises(InvalidDataError):
        build(Record, GOOD | {"inner": {"x": value}}, "it")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000, "a: [", "!!timestamp x", "!!int x", "!!python/object/apply:os.system [true]", "&a [*a]",
        "? [1]\n: 2", "0: &0 [x, x]\n" + "".join(f"{i}: &{i} [*{i - 1}, *{i - 1}]\n" for i in range(1, 30)),
        "\x00",
    ],
)  # fmt: skip
def test_yaml_that_is_no_plain_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidDataError, match="the file"):
        parse_yaml(text, "the file")


def test_yaml_is_read_as_plain_values() -> None:
    assert parse_yaml("a: 1\nb: [x, null]\nc: &d {e: 1.5}\nf: *d\n", "it") == {
        "a": 1,
        "b": ["x", None],
        "c": {"e": 1.5},
        "f": {"e": 1.5},
    }


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused: list[BaseException] = []

    def open_it() -> None:
        try:
            open_regular(pipe, "the record")
        except InvalidDataError as error:
            refused.append(error)

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(10)
    assert "not a regular file" in str(refused[0])
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises((InvalidDataError, IsADirectoryError)):
            open_regular(other, "the record")
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link", "it") == [1]
    with pytest.raises(OSError, match="symbolic"):
        open_regular(tmp_path / "link", "it", follow_links=False)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_bytes(tmp_path / "file", "it", most_bytes=11) == b"x" * 11
    with pytest.raises(InvalidDataError, match="larger than 10 bytes"):
        read_bytes(tmp_path / "file", "it", most_bytes=10)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a\\..\\x", "a\0b", ".", "a/./b", "\ud800", None, 3, b"x"]
)
def test_names_that_lead_elsewhere_are_refused(name: Any) -> None:
    with pytest.raises(InvalidDataError, match="outside of its folder"):
        require_plain_name(name, "the record")


def test_plain_names_pass() -> None:
    assert [require_plain_name(name, "it") for name in ("a", "a/b.c", "..a", "a..b")] == ["a", "a/b.c", "..a", "a..b"]


def test_control_characters_are_not_printed() -> None:
    assert printable("a\x1b[2J\nb\u202ec\ud800") == "a·[2J·b·c·"
    assert printable("x" * 300, most=5) == "xxxxx…"
