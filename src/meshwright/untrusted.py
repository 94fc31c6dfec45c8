"""Read small files and messages that another party may have written: as data, of exact types, bounded.

A checkpoint, a record of a run, a configuration file and a line at a port may be damaged or forged. Everything in this
package that reads one goes through this module, so that there is one set of rules and one error, `InvalidDataError`:

- `open_regular` opens regular files only: a named pipe would block for ever.
- `parse_json` and `parse_yaml` return plain values, no deeper and no larger than allowed, with finite numbers and
  without keys that appear twice.
- `build` makes a dataclass of such a value. The annotations of its fields are the rules: an `int` is no `bool`, an
  unknown field is an error, and what `__post_init__` raises as ValueError is reported as the rest.
- `read_message` does both with a key of a torch store, into which every process can write that reaches its port.
- `printable` returns a text that a terminal shows as it is.

Pickled files are read elsewhere: `checkpoint/formats` turns bytes into objects.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InvalidDataError

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What JSON and YAML can say."""
T = TypeVar("T")

MOST_BYTES = 1 << 24
MOST_LEVELS = 64
MOST_HELD = 1 << 26
"""Bytes that the objects of a small file or message may take."""
_HELD_PER_CHARACTER = 8
_HELD_BY = {"{": 184, "[": 88, ":": 100, ",": 40}
"""Bytes of an object, a list, an entry and a value in Python."""
_SMALL = MOST_HELD >> 6
"""No text of this length can make more."""
MAPPINGS = (dict, OrderedDict, Counter)
CONTAINERS = (*MAPPINGS, list, tuple, set, frozenset)
_MOST_DIGITS = 40
_LARGEST = 1e300
_MOST_YAML = 1 << 20
_MOST_MERGED = 10_000
_MOST_BRACKETS = 400  # in comments and texts, too
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What is no text, but for lines and tabs, and what turns the direction of writing."""
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


def open_regular(path: str | os.PathLike[str], what: str, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading; raise InvalidDataError for a pipe, a device or a folder.

    With `follow_links=False` a symbolic link is refused, too: in folders where every user can write.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidDataError(f"{what} is not a regular file: {os.fspath(path)}")
    return open(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], what: str, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file that is not larger than `most_bytes`."""
    with open_regular(path, what) as stream:
        # As much as there is: a buffer of the largest size would be allocated at once.
        content = stream.read(min(os.fstat(stream.fileno()).st_size, most_bytes) + 1)
    if len(content) > most_bytes:
        raise InvalidDataError(f"{what} is larger than {most_bytes:,} bytes: {os.fspath(path)}")
    return content


def read_text(path: str | os.PathLike[str], what: str, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8 that is not larger than `most_bytes`."""
    try:
        return read_bytes(path, what, most_bytes=most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{what} is not text in UTF-8: {error}") from None


def read_json(path: str | os.PathLike[str], what: str, *, most_bytes: int = MOST_BYTES) -> Plain:
    """Return the value that a JSON file holds."""
    return parse_json(read_bytes(path, what, most_bytes=most_bytes), what, most_bytes=most_bytes)


def parse_json(text: str | bytes, what: str, *, most_bytes: int = MOST_BYTES, most_levels: int = MOST_LEVELS) -> Plain:
    """Return the value of a JSON text; raise InvalidDataError for anything that is not exactly one."""
    if len(text) > most_bytes:
        raise InvalidDataError(f"{what} is larger than {most_bytes:,} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        # Each value needs one of these characters and more memory than text: they are counted before.
        if len(text) > _SMALL and sum(text.count(mark) * size for mark, size in _HELD_BY.items()) > (
            MOST_HELD + _HELD_PER_CHARACTER * len(text)
        ):
            raise InvalidDataError(f"{what} holds too many values: they take too much memory")
        value: Plain = _DECODER.decode(text)
    except RecursionError:
        raise InvalidDataError(f"{what} is nested too deeply") from None
    except InvalidDataError:
        raise
    except ValueError as error:
        raise InvalidDataError(f"{what} is damaged: {error}") from None
    # A text with few brackets cannot be deep: most are not walked through.
    if text.count("[") + text.count("{") > most_levels:
        require_bounds(value, what, most_levels, len(text))
    return value


def parse_object(text: str | bytes, what: str, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the value of a JSON text that has to be an object."""
    value = parse_json(text, what, most_bytes=most_bytes)
    if not isinstance(value, dict):
        raise InvalidDataError(f"{what} is damaged: expected an object, found {_kind(value)}")
    return value


def parse_yaml(text: str, what: str) -> Any:
    """Return the value of a YAML text, read by the safe loader; aliases count as often as they are used."""
    import yaml

    if len(text) > _MOST_YAML:
        raise InvalidDataError(f"{what} is larger than {_MOST_YAML:,} characters")
    # The loader takes time with the square of the depth.
    if max(accumulate(_BRACKETS.get(character, 0) for character in text), default=0) > _MOST_BRACKETS:
        raise InvalidDataError(f"{what} is nested too deeply")
    try:
        value = yaml.load(text, _yaml_loader())
        require_bounds(value, what, MOST_LEVELS, 100_000)
    except RecursionError:
        raise InvalidDataError(f"{what} is nested too deeply") from None
    except InvalidDataError:
        raise
    except yaml.YAMLError as error:
        raise InvalidDataError(f"{what} is not valid YAML: {error}") from None
    except Exception as error:  # a value that its tag does not allow, such as `!!timestamp x`
        raise InvalidDataError(f"{what} holds a value that YAML cannot read: {error}") from None
    return value


@cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, with bounds for what a short text can make long: merged mappings and numbers."""

        num_merged = 0

        def flatten_mapping(self, node: Any) -> None:
            merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
            parts = [part for value in merged for part in (value.value if value.id == "sequence" else [value])]
            for part in parts:
                if part.id == "mapping":
                    self.flatten_mapping(part)
                    self.num_merged += len(part.value)
                    if self.num_merged > _MOST_MERGED:
                        raise InvalidDataError(f"it merges more than {_MOST_MERGED:,} values")
            super().flatten_mapping(node)

    def number(kind: str) -> Any:
        construct = getattr(yaml.SafeLoader, f"construct_yaml_{kind}")

        def make(loader: Any, node: Any) -> Any:
            if len(str(node.value)) > _MOST_DIGITS:
                raise ValueError(f"a number has {len(node.value)} digits")
            value = construct(loader, node)
            if kind == "int" and abs(value) >= 1 << 63:  # as keys they could all have the same hash
                raise ValueError("a number is out of range")
            return value

        return make

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", number(kind))
    return Loader


def build(kind: type[T], value: object, what: str) -> T:
    """Return a plain value as an object of a type; raise InvalidDataError unless it is exactly of that type.

    The type is a dataclass or what the fields of one may be: `int`, `float` (finite), `str`, `bool`, `None`, `Literal`,
    `list[...]`, `tuple[..., ...]`, `Mapping[str, ...]`, unions, `Any`.
    """
    try:
        return _build(kind, value, "")  # type: ignore[no-any-return]
    except _MismatchError as error:
        raise InvalidDataError(f"{what} is damaged: {error}") from None


def read_message(store: Any, key: str, kind: type[T]) -> T:
    """Return what a process has written under a key of a torch store, as an object of a type."""
    what = f"{printable(key)} in the store of the run"
    return build(kind, parse_json(store.get(key), what), what)


def require_bounds(
    root: object,
    what: str,
    most_levels: int,
    most_values: int,
    refused: Mapping[type, Callable[[Any], Exception]] = types.MappingProxyType({}),
) -> None:
    """Refuse a value that is too deep, that holds itself, or that is too large to follow.

    What is referred to twice counts twice and is looked at once. `refused` has the errors for types of parts.
    """
    walked = {*CONTAINERS, *refused}
    sizes: dict[int, int] = {}  # the number of values in each container, by id; 0 while one is open
    levels: dict[int, int] = {}
    pending = [root] if type(root) in walked else []
    while pending:
        value = pending[-1]
        if type(value) in refused:
            raise refused[type(value)](value)
        key, parts = id(value), _parts(value)
        if walked.isdisjoint(map(type, parts)):
            size, level = 1 + len(parts), 1
        elif key not in sizes:  # its parts come first
            sizes[key] = 0
            inner = [part for part in parts if type(part) in walked]
            if any(sizes.get(id(part)) == 0 for part in inner):
                raise InvalidDataError(f"{what} holds itself")
            pending += [part for part in inner if id(part) not in sizes]
            continue
        elif sizes[key] == 0:
            size = 1 + sum(sizes.get(id(part), 1) for part in parts)
            level = 1 + max(levels.get(id(part), 0) for part in parts)
        else:
            pending.pop()
            continue
        _require_size(what, size, most_values, level, most_levels)
        sizes[key], levels[key] = size, level
        pending.pop()


def _require_size(what: str, size: int, most_values: int, level: int, most_levels: int) -> None:
    if size > most_values:
        raise InvalidDataError(f"{what} holds more than {most_values:,} values")
    if level > most_levels:
        raise InvalidDataError(f"{what} is nested deeper than {most_levels} levels")


def _parts(value: Any) -> Collection[Any]:
    return (*value, *value.values()) if type(value) in MAPPINGS else value


def printable(text: str, most: int = 200) -> str:
    """Return a text without control characters, and not longer than `most`: it may come from a stranger."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return "".join(character if character.isprintable() else "·" for character in cut)


def require_no_control(root: object, what: str) -> None:
    """Refuse texts that would steer a terminal when a message shows them; lines and tabs are allowed."""
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and _CONTROL.search(value):
            raise InvalidDataError(f"{what} has control characters in {printable(value, 60)!r}")
        if isinstance(value, CONTAINERS):
            pending += _parts(value)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` returns it."""
    return "\n".join(printable(line.expandtabs(), 2000) for line in text.split("\n"))


def require_plain_name(name: object, what: str) -> str:
    """Return the name of a file relative to a folder; raise InvalidDataError if it leads elsewhere."""
    if (
        type(name) is not str
        or not name
        or "\0" in name
        or "\\" in name
        or name.startswith("/")
        or Path(name).drive
        or {".", ".."} & set(name.split("/"))
        or not can_be_encoded(name)
    ):
        raise InvalidDataError(f"{what} names a file outside of its folder: {printable(str(name))!r}")
    return name


def can_be_encoded(name: str) -> bool:
    """Return whether the system can have a file of a name: JSON can say more."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


# --- JSON, beyond the standard library's rules ------------------------------------------------------------------------


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _bounded_int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is out of range: {text[:_MOST_DIGITS]}")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=_bounded_int,
    parse_float=_finite_float,
    object_pairs_hook=_unique_keys,
)


# --- From plain values to dataclasses ---------------------------------------------------------------------------------


class _MismatchError(ValueError):
    """Report where a value is not what its annotation says."""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


@cache
def _fields_of(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and whether it has to be given."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def _build(kind: Any, value: Any, at: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, at)
    origin = get_origin(kind) or kind
    if origin in (Union, types.UnionType):
        return _build_union(get_args(kind), value, at)
    if origin in (list, tuple, Sequence) and type(value) is list:
        return _build_sequence(kind, origin, value, at)
    if origin in (dict, Mapping) and type(value) is dict:
        inner = (get_args(kind) or (str, Any))[1]
        return {key: _build(inner, item, f"{at}.{printable(key, 60)}") for key, item in value.items()}
    if not _is_simple(kind, value):
        raise _MismatchError(f"{at.lstrip('.') or 'it'} is {_kind(value)}, expected {_name(kind)}")
    return float(value) if kind is float else value


def _is_simple(kind: Any, value: Any) -> bool:
    """Tell whether a value without parts is of a type; a whole number may stand for a float."""
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if kind is float:
        return type(value) in (int, float) and abs(value) < _LARGEST
    if kind is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is (type(None) if kind is None else kind)


def _build_dataclass(kind: Any, value: Any, at: str) -> Any:
    if type(value) is not dict:
        raise _MismatchError(f"{at.lstrip('.') or 'it'} is {_kind(value)}, expected an object")
    fields = _fields_of(kind)
    for name in value:
        if name not in fields:
            raise _MismatchError(f"{at.lstrip('.') or 'it'} has the unknown field {printable(str(name), 60)!r}")
    for name, (_, is_required) in fields.items():
        if is_required and name not in value:
            raise _MismatchError(f"{at.lstrip('.') or 'it'} lacks the field {name!r}")
    built = {name: _build(fields[name][0], item, f"{at}.{name}") for name, item in value.items()}
    try:
        return kind(**built)
    except ValueError as error:
        raise _MismatchError(str(error)) from None


def _build_union(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    first: _MismatchError | None = None
    for kind in kinds:
        try:
            return _build(kind, value, at)
        except _MismatchError as error:
            first = first or error
    assert first is not None
    raise first


def _build_sequence(kind: Any, origin: Any, value: list[Any], at: str) -> Any:
    inner = get_args(kind)
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise _MismatchError(f"{at.lstrip('.') or 'it'} has {len(value)} values, expected {len(inner)}")
        return tuple(_build(each, item, f"{at}[{i}]") for i, (each, item) in enumerate(zip(inner, value, strict=True)))
    each = inner[0] if inner else Any
    built = [_build(each, item, f"{at}[{index}]") for index, item in enumerate(value)]
    return tuple(built) if origin is tuple else built


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
