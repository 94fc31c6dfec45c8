"""Interpret pickles as data: the opcodes that checkpoints have, and only the names that a vocabulary knows.

[Note: pickles] A pickle is a program. Python's own machine lets it import names, call them, and set attributes of what
it finds: of classes and modules, too, and for the whole process, even if the file is refused later. This interpreter
runs the opcodes that write plain values, containers, and objects of a known name. What a name means is decided by a
`Vocabulary`, which returns a value, or a `Constructor` that checks its arguments. Three rules make it safe:

- Nothing is set on an object. BUILD completes a `PendingObject`, which gives a new object, or it is for the vocabulary.
- What is called is a `Constructor` of the vocabulary, never a value that the program made.
- A program takes time and memory in proportion to its size: no opcode declares a size that is not there, every object
  is counted with the bytes that it takes in Python before the next one is made, and a result that refers to itself, or
  to one part so often that following it takes for ever, is refused.

Everything else ends in `InvalidDataError`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from sys import getsizeof
from typing import Any, NamedTuple, Protocol

from ...errors import InvalidDataError, UnsafeFileError
from ...untrusted import CONTAINERS, MAPPINGS, MOST_HELD, printable, require_bounds

_SIZED = (*CONTAINERS, str, bytes, bytearray)
_MOST_VALUES = 1_000_000
_VALUES_PER_BYTE = 16  # one container may be referred to several times
_MOST_LEVELS = 100  # those who walk through the result use recursion
_MOST_KEY_LEVELS = 8
_MOST_KEY_PARTS = 64
_MOST_KEY = 1 << 60  # larger numbers have equal hashes
_MOST_COPIED = 1 << 24
_MOST_INT_BYTES = 1024
_HELD_PER_BYTE = 24  # a small dictionary takes 17 times its size in the file
_PLACE = 9  # bytes: of an object on the stack, in a list, or in the memo
_NUMBER = 32 + _PLACE
_MOST_MARKS = 1_000
_SIMPLE_KEYS = {str, bool, type(None), float, bytes}
_HASHED_BY_VALUE = (complex, Decimal, Fraction)  # of which many can have the same hash


class Constructor(NamedTuple):
    """A name that a pickle may call; `make` checks its arguments."""

    name: str
    make: Callable[..., Any]
    held: int = 256
    """Bytes that a result takes, besides what is counted where it is copied."""


class PendingObject:
    """An object whose state follows in the pickle; `complete` makes it of that state."""

    __slots__ = ("complete", "memo_keys")

    def __init__(self, complete: Callable[[Any], Any]) -> None:
        self.complete = complete
        self.memo_keys: tuple[int, ...] = ()


class Vocabulary(Protocol):
    """What the names in a pickle mean."""

    def find(self, module: str, name: str) -> Any:
        """Return the value or the `Constructor` of a name; raise UnsafeFileError if it has none."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a call of anything but a `Constructor`, or raise UnsafeFileError."""

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Return an object of a class that is no `Constructor`, or raise UnsafeFileError."""

    def build(self, instance: Any, state: Any) -> None:
        """Give a state to an object that is not a `PendingObject`, or raise UnsafeFileError."""

    def storage(self, key: Any) -> Any:
        """Return the object that a pickle refers to by a key."""


def interpret(program: bytes, vocabulary: Vocabulary, what: str, *, most_held: int | None = None) -> Any:
    """Return the value of a pickle; raise InvalidDataError for anything but data.

    Its objects may take `most_held` bytes: by default 64 MiB, and 24 times the size of the program.
    """
    return interpret_at(program, 0, vocabulary, what, most_held=most_held)[0]


def interpret_at(
    program: bytes, start: int, vocabulary: Vocabulary, what: str, *, most_held: int | None = None
) -> tuple[Any, int]:
    """Return the value of the pickle that begins at a position, and where it ends."""
    machine = _Machine(
        program, vocabulary, start, MOST_HELD + _HELD_PER_BYTE * len(program) if most_held is None else most_held
    )
    try:
        result = machine.run()
        require_finished(result, len(program))
    except UnsafeFileError as error:
        message = f"{what} is not loaded, because it holds more than data ({printable(error.culprit)})"
        raise UnsafeFileError(message, error.culprit) from None
    except Exception as error:  # of a constructor, too
        reason = str(error) if isinstance(error, InvalidDataError) else f"{type(error).__name__}: {error}"
        reason = "it ends early" if isinstance(error, struct.error) else reason
        raise InvalidDataError(f"{what} is damaged: {printable(reason, 400)}") from error
    return result, machine.position


def require(condition: bool, reason: str) -> None:
    """Raise InvalidDataError unless the condition holds."""
    if not condition:
        raise InvalidDataError(reason)


def require_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that Python hashes by recursion without a bound, or of which many have the same hash."""
    for key in keys:
        if type(key) in _SIMPLE_KEYS:
            continue
        level = [key]
        for _ in range(_MOST_KEY_LEVELS):
            is_small = all(type(part) is not int or abs(part) < _MOST_KEY for part in level)
            require(is_small, "a key is too large a number")
            require(not any(type(part) in _HASHED_BY_VALUE for part in level), "a key is a number of another kind")
            nested = [part for part in level if type(part) in (tuple, frozenset)]
            require(sum(map(len, nested)) <= _MOST_KEY_PARTS, "a key has too many parts")
            level = [inner for part in nested for inner in part]
        require(not level, "a key is nested too deeply")


class _Machine:
    def __init__(self, program: bytes, vocabulary: Vocabulary, start: int, most_held: int) -> None:
        self.program = program
        self.vocabulary = vocabulary
        self.position = start
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []
        self.may_copy = _MOST_COPIED + 8 * len(program)
        self.may_hold = most_held

    def run(self) -> Any:
        """Execute opcode after opcode until STOP."""
        program, operations = self.program, _OPERATIONS
        while True:
            require(self.position < len(program), "it ends early")
            opcode = program[self.position]
            self.position += 1
            if opcode == _STOP:
                return self.stack.pop()
            operation = operations.get(opcode)
            if operation is None:
                raise InvalidDataError(f"the opcode {bytes([opcode])!r} has no place in a checkpoint")
            operation(self)

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        start, self.position = self.position, self.position + count
        require(self.position <= len(self.program), "it ends early")
        return self.program[start : self.position]

    def number(self, form: struct.Struct) -> Any:
        """Return the number that follows in the program."""
        (value,) = form.unpack_from(self.program, self.position)
        self.position += form.size
        return value

    def line(self) -> str:
        """Return the rest of a line of the program."""
        end = self.program.index(b"\n", self.position)
        text = self.take(end - self.position).decode("utf-8")
        self.position += 1
        return text

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last MARK."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def count_copied(self, arguments: tuple[Any, ...]) -> None:
        """Refuse a program that passes long arguments so often that copies of them fill the memory."""
        for argument in arguments:
            self.may_copy -= len(argument) if type(argument) in _SIZED else 0
        require(self.may_copy >= 0, "it copies its values too often")

    def hold(self, num_bytes: int) -> None:
        """Refuse a program whose objects need much more memory than it has bytes."""
        self.may_hold -= num_bytes
        if self.may_hold < 0:
            raise InvalidDataError("its objects take too much memory")

    def push(self, value: Any) -> None:
        """Push a new object, whose size is counted."""
        self.hold(getsizeof(value) + _PLACE)
        self.stack.append(value)

    def remember(self, key: int) -> None:
        """Store the top of the stack under a key, the next one or one that was used."""
        top = self.stack[-1]
        if key == len(self.memo):
            self.hold(_PLACE)
            self.memo.append(top)
        else:
            require(key < len(self.memo), "it leaves out a number of its memo")
            self.memo[key] = top
        if type(top) is PendingObject:
            self.hold(_NUMBER)
            top.memo_keys += (key,)


def _mark(machine: _Machine) -> None:
    require(len(machine.outer) < _MOST_MARKS, "it is nested too deeply")
    machine.outer.append(machine.stack)
    machine.stack = []


def _protocol(machine: _Machine) -> None:
    machine.take(1)


def _frame(machine: _Machine) -> None:
    length = machine.number(struct.Struct("<Q"))
    require(machine.position + length <= len(machine.program), "it ends early")


def _push_same(value: Any) -> Callable[[_Machine], None]:
    """Push what there is once in Python."""

    def push(machine: _Machine) -> None:
        machine.hold(_PLACE)
        machine.stack.append(value)

    return push


def _push_new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(make())


def _push_number(form: str) -> Callable[[_Machine], None]:
    packed = struct.Struct(form)

    def push(machine: _Machine) -> None:
        machine.hold(_NUMBER)
        machine.stack.append(machine.number(packed))

    return push


def _push_text(form: str) -> Callable[[_Machine], None]:
    length = struct.Struct(form)
    return lambda machine: machine.push(machine.take(machine.number(length)).decode("utf-8", "surrogatepass"))


def _push_bytes(form: str, kind: Callable[[bytes], Any] = bytes) -> Callable[[_Machine], None]:
    length = struct.Struct(form)
    return lambda machine: machine.push(kind(machine.take(machine.number(length))))


def _push_int(form: str) -> Callable[[_Machine], None]:
    length = struct.Struct(form)

    def push(machine: _Machine) -> None:
        count = machine.number(length)
        require(0 <= count <= _MOST_INT_BYTES, "a number is too long")
        machine.push(int.from_bytes(machine.take(count), "little", signed=True))

    return push


def _put(form: str) -> Callable[[_Machine], None]:
    key = struct.Struct(form)
    return lambda machine: machine.remember(machine.number(key))


def _get(form: str) -> Callable[[_Machine], None]:
    key = struct.Struct(form)

    def push(machine: _Machine) -> None:
        machine.hold(_PLACE)
        machine.stack.append(machine.memo[machine.number(key)])

    return push


def _memoize(machine: _Machine) -> None:
    machine.remember(len(machine.memo))


def _tuple(machine: _Machine) -> None:
    machine.push(tuple(machine.pop_mark()))


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    size = getsizeof((None,) * count)

    def make(machine: _Machine) -> None:
        require(len(machine.stack) >= count, "it takes what is not there")
        machine.hold(size)
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return make


def _adding(
    kinds: tuple[type, ...], take: Callable[[_Machine], Any], add: Callable[[Any, Any], None]
) -> Callable[[_Machine], None]:
    """Return an operation that adds to the container on the stack what it takes from there."""

    def operate(machine: _Machine) -> None:
        items = take(machine)
        top = machine.stack[-1]
        require(type(top) in kinds, f"it adds to an object of {type(top).__name__}")
        before = getsizeof(top)
        add(top, items)
        machine.hold(getsizeof(top) - before)

    return operate


def _take_members(machine: _Machine) -> list[Any]:
    items = machine.pop_mark()
    require_keys(items)
    return items


def _take_pair(machine: _Machine) -> list[Any]:
    value, key = machine.stack.pop(), machine.stack.pop()
    require_keys((key,))
    return [key, value]


def _take_pairs(machine: _Machine) -> list[Any]:
    items = machine.pop_mark()
    require(len(items) % 2 == 0, "a key has no value")
    require_keys(items[::2])
    return items


def _set_pairs(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key] = value


def _frozen(machine: _Machine) -> None:
    machine.push(frozenset(_take_members(machine)))


def _global(machine: _Machine) -> None:
    machine.stack.append(machine.vocabulary.find(machine.line(), machine.line()))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    require(type(name) is str and type(module) is str, "a name is not a text")
    machine.stack.append(machine.vocabulary.find(module, name))


def _call(machine: _Machine) -> None:
    _construct(machine, machine.vocabulary.call)


def _new(machine: _Machine) -> None:
    _construct(machine, machine.vocabulary.new)


def _construct(machine: _Machine, otherwise: Callable[[Any, tuple[Any, ...]], Any]) -> None:
    arguments = machine.stack.pop()
    function = machine.stack[-1]
    require(type(arguments) is tuple, "arguments are not a tuple")
    machine.count_copied(arguments)
    if type(function) is Constructor:
        machine.hold(function.held)
        machine.stack[-1] = function.make(*arguments)
    else:
        machine.stack[-1] = otherwise(function, arguments)


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    instance = machine.stack[-1]
    if type(instance) is not PendingObject:
        machine.vocabulary.build(instance, state)
        return
    machine.count_copied((*state, *state.values()) if type(state) is dict else state if type(state) is tuple else ())
    built = instance.complete(state)
    machine.stack[-1] = built
    for key in instance.memo_keys:
        if machine.memo[key] is instance:
            machine.memo[key] = built


def _persistent(machine: _Machine) -> None:
    machine.stack.append(machine.vocabulary.storage(machine.stack.pop()))


_STOP = pickle.STOP[0]
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: _protocol,
        pickle.FRAME: _frame,
        pickle.MARK: _mark,
        pickle.NONE: _push_same(None),
        pickle.NEWTRUE: _push_same(True),
        pickle.NEWFALSE: _push_same(False),
        pickle.EMPTY_TUPLE: _push_same(()),
        pickle.EMPTY_LIST: _push_new(list),
        pickle.EMPTY_DICT: _push_new(dict),
        pickle.EMPTY_SET: _push_new(set),
        pickle.BININT: _push_number("<i"),
        pickle.BININT1: _push_number("<B"),
        pickle.BININT2: _push_number("<H"),
        pickle.BINFLOAT: _push_number(">d"),
        pickle.LONG1: _push_int("<B"),
        pickle.LONG4: _push_int("<i"),
        pickle.BINUNICODE: _push_text("<I"),
        pickle.SHORT_BINUNICODE: _push_text("<B"),
        pickle.BINUNICODE8: _push_text("<Q"),
        pickle.BINBYTES: _push_bytes("<I"),
        pickle.SHORT_BINBYTES: _push_bytes("<B"),
        pickle.BINBYTES8: _push_bytes("<Q"),
        pickle.BYTEARRAY8: _push_bytes("<Q", bytearray),
        pickle.TUPLE: _tuple,
        pickle.TUPLE1: _tuple_of(1),
        pickle.TUPLE2: _tuple_of(2),
        pickle.TUPLE3: _tuple_of(3),
        pickle.APPEND: _adding((list,), lambda machine: machine.stack.pop(), list.append),
        pickle.APPENDS: _adding((list,), _Machine.pop_mark, list.extend),
        pickle.ADDITEMS: _adding((set,), _take_members, set.update),
        pickle.SETITEM: _adding(MAPPINGS, _take_pair, _set_pairs),
        pickle.SETITEMS: _adding(MAPPINGS, _take_pairs, _set_pairs),
        pickle.FROZENSET: _frozen,
        pickle.BINPUT: _put("<B"),
        pickle.LONG_BINPUT: _put("<I"),
        pickle.MEMOIZE: _memoize,
        pickle.BINGET: _get("<B"),
        pickle.LONG_BINGET: _get("<I"),
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.REDUCE: _call,
        pickle.NEWOBJ: _new,
        pickle.BUILD: _build,
        pickle.BINPERSID: _persistent,
    }.items()
}


def require_finished(result: Any, num_bytes: int = 0) -> None:
    """Refuse a result with a draft or a constructor in it, with itself in it, too deep, or too large to follow."""
    most_values = _MOST_VALUES + _VALUES_PER_BYTE * num_bytes
    require_bounds(result, "it", _MOST_LEVELS, most_values, _UNFINISHED)


_UNFINISHED: dict[type, Callable[[Any], Exception]] = {
    PendingObject: lambda _: InvalidDataError("an object has no state"),
    Constructor: lambda constructor: UnsafeFileError(constructor.name),
}
