"""Where a thread stands: in which phase of training, in which call, at which line of the user's script.

Nothing is recorded while training runs. A thread that waits is looked at from outside, when somebody wants to know.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..errors.callers import PACKAGE, STDLIB, is_of_a_debugger, is_of_the_user, outwards, users_frame

DEBUGGER, COLLECTIVE, BACKWARD, FORWARD, DATA, STEP, SAVING, USERS = (
    "a debugger",
    "a collective",
    "the backward pass",
    "the forward pass",
    "waiting for data",
    "the optimizer's step",
    "saving or loading",
    "the script's own code",
)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (f"{_TORCH}/distributed/distributed_c10d.py", f"{_TORCH}/distributed/_functional_collectives.py")
_WAITS_AT_THE_STORE = tuple((f"{PACKAGE}/runtime/runtime.py", name) for name in ("_await_turn", "await_note"))
_AT_THE_STORE = (
    *_WAITS_AT_THE_STORE,
    (_COLLECTIVES[0], "_new_process_group_helper"),
    (_COLLECTIVES[0], "_store_based_barrier"),
)
_DEBUGGERS = (f"{STDLIB}/bdb.py", f"{STDLIB}/pdb.py", f"{STDLIB}/code.py")
_LOCKS = tuple(f"{STDLIB}/{name}" for name in ("threading.py", "queue.py", "concurrent/futures/"))
# File (or the beginning of its path) and function -> the phase. The first that a frame fits, from the inside out.
_MARKS: tuple[tuple[str, str | None, str], ...] = (
    *((file, None, DEBUGGER) for file in _DEBUGGERS),
    *((file, None, COLLECTIVE) for file in _COLLECTIVES),
    *((*wait, COLLECTIVE) for wait in _WAITS_AT_THE_STORE),
    (f"{_TORCH}/nn/parallel/distributed.py", "_sync_buffers", COLLECTIVE),
    (f"{_TORCH}/distributed/utils.py", None, COLLECTIVE),
    (f"{_TORCH}/autograd/", None, BACKWARD),
    (f"{_TORCH}/optim/", None, STEP),
    (f"{_TORCH}/utils/data/", None, DATA),
    (f"{PACKAGE}/checkpoint/", None, SAVING),
    (f"{PACKAGE}/data/", None, DATA),
    (f"{_TORCH}/nn/", None, FORWARD),
)
_STARTERS = {"run", "_bootstrap", "_bootstrap_inner"}
"""Functions among those of locks that call what a thread is for, perhaps native code."""
# Layers around a call that people do not write themselves.
_WRAPPERS = {
    "wrapper",
    "inner",
    "checked",
    "decorate_context",
    "_fn",
    "_call_impl",
    "_wrapped_call_impl",
    "__call__",
    "__enter__",
}
_RANK_WORDS = ("main_process", "process_index", "last_process", "rank")


@dataclass(frozen=True)
class Place:
    """A line of the user's script, and what goes on below it."""

    phase: str
    call: str = ""
    """What that line called: "gather()"."""
    operation: str = ""
    """The collective below it, with what this process brings: "all_gather(float32[4, 3])"."""
    file: str = ""
    line: int = 0
    source: str = ""
    guard: str = ""
    """The condition on the rank around that line, as it is written: "`if is_main_process:` (line 87)"."""
    members: list[int] | None = None
    """The ranks of the collective's group if they are not all, or None."""
    at_a_lock: bool = False
    """Whether the line asks for a lock of Python's, or waits for another thread."""
    at_the_store: bool = False
    """Whether it waits at the store until ranks have come, some of them perhaps: for a turn, or for a new group."""
    handling: str = ""
    """The exception that is being handled around that line."""

    def where(self) -> str:
        """Return the line as people write it."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "outside of any script"

    def shown(self) -> str:
        """Describe the place in one line."""
        doing = self.call or self.phase
        below = f" [{self.operation}]" if self.operation and self.operation.partition("(")[0] != doing[:-2] else ""
        source = f": `{self.source}`" if self.source else ""
        handling = f", while handling {self.handling}" if self.handling else ""
        return f"{self.where()}, in {doing}{below}{source}{handling}"


def place_of(thread: int) -> Place | None:
    """Look at a thread of this process; None once it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    place = _place(frame)
    error = _handled(thread)
    return place if error is None else replace(place, handling=described(error))


def place_of_caller() -> Place:
    """Look where this very thread came from."""
    return _place(sys._getframe(1))


def place_of_error(error: BaseException) -> Place:
    """Look where an exception came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return Place(phase=USERS) if trace is None else _place(trace.tb_frame, _lines(error))


def signature_of(thread: int) -> tuple[int, int] | None:
    """Return what changes as soon as a thread runs on in Python."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    asks_again = (frame.f_code.co_filename, frame.f_code.co_name) in _WAITS_AT_THE_STORE
    return id(frame), 0 if asks_again else frame.f_lasti


def is_at_a_lock(thread: int) -> bool:
    """Tell whether a thread asks for a lock of Python's; one inside a library's own code may wait for anything."""
    frame = sys._current_frames().get(thread)
    return frame is not None and _asks_for_a_lock(frame)


def described(error: BaseException) -> str:
    """Describe an exception in one line, with the line of the script that it came from."""
    place = place_of_error(error)
    return f"{_one_line(error)} ({place.where()}{f': `{place.source}`' if place.source else ''})"


def _handled(thread: int) -> BaseException | None:
    """Return the exception that a thread handles just now."""
    found: Any = sys._current_exceptions().get(thread)
    found = found[1] if isinstance(found, tuple) else found  # Python 3.10 and 3.11 give what sys.exc_info() does
    return found if isinstance(found, BaseException) else None


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # somebody else's code: a diagnosis must not fail for want of a detail
        text = ""
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


def _lines(error: BaseException) -> dict[FrameType, int]:
    """Return the lines at which frames were left; some have gone on since, to clean up."""
    lines = {}
    trace = error.__traceback__
    while trace is not None:
        lines[trace.tb_frame] = trace.tb_lineno
        trace = trace.tb_next
    return lines


def _place(innermost: FrameType, lines: Mapping[FrameType, int] | None = None) -> Place:
    frames = list(outwards(innermost))
    users = users_frame(frames)
    below = frames if users is None else frames[: frames.index(users)]
    phase = next((mark for frame in below if (mark := _phase(frame))), USERS)
    collective = next((frame for frame in below if _is_collective(frame)), None)
    operation = _operation(collective) if collective is not None else ""
    members = _members(collective) if collective is not None else None
    if users is None:
        return Place(phase=phase, operation=operation, members=members)
    file, line = users.f_code.co_filename, (lines or {}).get(users, users.f_lineno)
    called = next((frame.f_code.co_name for frame in reversed(below) if frame.f_code.co_name not in _WRAPPERS), "")
    source = linecache.getline(file, line).strip()
    return Place(
        phase=phase,
        call=f"{called}()" if called and phase != DEBUGGER else "",
        operation=operation,
        file=file,
        line=line,
        source=source,
        guard=guard_of(file, line) or _guard_of_callers(frames[frames.index(users) + 1 :], lines or {}),
        members=members,
        at_a_lock=_asks_for_a_lock(innermost),
        at_the_store=any((frame.f_code.co_filename, frame.f_code.co_name) in _AT_THE_STORE for frame in below),
    )


def _asks_for_a_lock(innermost: FrameType) -> bool:
    file = innermost.f_code.co_filename
    if file.startswith(_LOCKS):
        return innermost.f_code.co_name not in _STARTERS
    source = linecache.getline(file, innermost.f_lineno).strip()
    return is_of_the_user(file) and (".acquire(" in source or source.startswith("with "))


def _phase(frame: FrameType) -> str | None:
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if is_of_a_debugger(file):
        return DEBUGGER
    return next((phase for start, name, phase in _MARKS if file.startswith(start) and name in (None, function)), None)


def _is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_COLLECTIVES) and frame.f_code.co_name not in _WRAPPERS


def _members(frame: FrameType) -> list[int] | None:
    """Return the ranks of a collective's group if they are not all."""
    group = frame.f_locals.get("group") or frame.f_locals.get("pg")
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        ranks = dist.get_process_group_ranks(group)
        return None if len(ranks) == dist.get_world_size() else sorted(ranks)
    except (KeyError, ValueError, RuntimeError):  # closed by now
        return None


def _operation(frame: FrameType) -> str:
    """Describe a collective by its name and the tensors it was given."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    tensors = (value for name in names for value in _tensors(frame.f_locals.get(name)))
    return f"{frame.f_code.co_name}({', '.join(_shape(tensor) for tensor in tensors)})"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def guard_of_caller() -> str:
    """Return the condition around this call that holds on one rank only, in any frame of the user's; "" if none."""
    return _guard_of_callers(outwards(sys._getframe(1)), {})


def _guard_of_callers(frames: Iterable[FrameType], lines: Mapping[FrameType, int]) -> str:
    for frame in frames:
        if is_of_the_user(frame.f_code.co_filename):
            for condition in reversed(_conditions(frame.f_code.co_filename, lines.get(frame, frame.f_lineno))):
                if not condition.otherwise and _holds_on_one_rank(condition.test):
                    return f"{condition.shown()} of {Path(frame.f_code.co_filename).name}"
    return ""


@cache
def guard_of(file: str, line: int) -> str:
    """Return the innermost condition around a line that asks which process this is, as it is written."""
    for condition in reversed(_conditions(file, line)):
        if any(word in ast.unparse(condition.test) for word in _RANK_WORDS):
            return condition.shown()
    return ""


@dataclass(frozen=True)
class _Condition:
    """An `if` around a line."""

    test: ast.expr
    line: int
    otherwise: bool
    """Whether the line is in its `else`."""

    def shown(self) -> str:
        return f"`{'else of ' if self.otherwise else ''}if {ast.unparse(self.test)}:` (line {self.line})"


def _conditions(file: str, line: int) -> list[_Condition]:
    """Return the conditions around a line, the outer ones first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        _Condition(node.test, node.lineno, bool(node.orelse) and line >= node.orelse[0].lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.body[0].lineno <= line <= (node.end_lineno or 0)
    ]


def _holds_on_one_rank(test: ast.expr) -> bool:
    """Tell a condition that cannot hold on two ranks; one with an `or` may hold on all of them."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(_holds_on_one_rank(part) for part in test.values)
    if isinstance(test, ast.Compare):
        asks_index = isinstance(test.left, ast.Attribute) and test.left.attr == "process_index"
        return asks_index and isinstance(test.ops[0], ast.Eq) and isinstance(test.comparators[0], ast.Constant)
    return isinstance(test, ast.Attribute) and test.attr in ("is_main_process", "is_last_process")
