"""Locate a thread: the phase of training, the call, and the line of the user's script.

Nothing is recorded while training runs. The stack of a thread is inspected from another thread, on demand.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors.callers import PACKAGE, STDLIB, find_user_frame, is_debugger_file, is_user_file, walk_frames
from ..runtime.group.runtime import Runtime

DEBUGGER, COLLECTIVE, BACKWARD, FORWARD, DATA, STEP, SAVING, USER_CODE = (
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
_STORE_POLLS = tuple(
    (function.__code__.co_filename, function.__code__.co_name)
    for function in (Runtime.wait_for_first, Runtime.wait_for_key)
)
"""Functions of ours that poll the store until other ranks have written to it."""
_STORE_WAITS = (
    *_STORE_POLLS,
    (_COLLECTIVES[0], "_new_process_group_helper"),
    (_COLLECTIVES[0], "_store_based_barrier"),
)
_DEBUGGERS = (f"{STDLIB}/bdb.py", f"{STDLIB}/pdb.py", f"{STDLIB}/code.py")
_LOCKS = tuple(f"{STDLIB}/{name}" for name in ("threading.py", "queue.py", "concurrent/futures/"))
# File (or the prefix of its path) and function -> the phase. The innermost frame that matches decides.
_PHASE_RULES: tuple[tuple[str, str | None, str], ...] = (
    *((file, None, DEBUGGER) for file in _DEBUGGERS),
    *((file, None, COLLECTIVE) for file in _COLLECTIVES),
    *((*poll, COLLECTIVE) for poll in _STORE_POLLS),
    (f"{_TORCH}/nn/parallel/distributed.py", "_sync_buffers", COLLECTIVE),
    (f"{_TORCH}/distributed/utils.py", None, COLLECTIVE),
    (f"{_TORCH}/autograd/", None, BACKWARD),
    (f"{_TORCH}/optim/", None, STEP),
    (f"{_TORCH}/utils/data/", None, DATA),
    (f"{PACKAGE}/checkpoint/", None, SAVING),
    (f"{PACKAGE}/data/", None, DATA),
    (f"{_TORCH}/nn/", None, FORWARD),
)
_THREAD_ENTRY_POINTS = {"run", "_bootstrap", "_bootstrap_inner"}
"""Functions of the lock modules that call a thread's target, which may be native code."""
# Layers around a call that are not in the user's code.
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
    """A line of the user's script, and what it is executing."""

    phase: str
    call: str = ""
    """The function that this line called: "gather()"."""
    operation: str = ""
    """The collective below it, with the tensors of this rank: "all_gather(float32[4, 3])"."""
    file: str = ""
    line: int = 0
    source: str = ""
    guard: str = ""
    """The condition on the rank around this line, as written: "`if is_main_process:` (line 87)"."""
    group_ranks: list[int] | None = None
    """The ranks of the collective's process group; None if it is the world."""
    at_lock: bool = False
    """Whether the line acquires a Python lock, or waits for another thread."""
    at_store: bool = False
    """Whether it polls the store for other ranks, perhaps only some: for the main process, or for a new group."""
    handling: str = ""
    """The exception that is being handled around this line."""

    def location(self) -> str:
        """Return the file and line: "train.py:12"."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "outside of any script"

    def describe(self) -> str:
        """Describe the place in one line."""
        call = self.call or self.phase
        below = f" [{self.operation}]" if self.operation and self.operation.partition("(")[0] != call[:-2] else ""
        source = f": `{self.source}`" if self.source else ""
        handling = f", while handling {self.handling}" if self.handling else ""
        return f"{self.location()}, in {call}{below}{source}{handling}"


def place_of(thread: int) -> Place | None:
    """Return the place of a thread of this process; None if it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    place = _place(frame)
    error = _handled_exception(thread)
    return place if error is None else replace(place, handling=describe_error(error))


def place_of_call(frames: list[tuple[str, int, str]], place: Place) -> Place:
    """Return a place with the user's line of a recorded stack: files, lines and functions, innermost first."""
    depth = next(index for index, (file, _, _) in enumerate(frames) if is_user_file(file))
    file, line, _ = frames[depth]
    called = next((name for _, _, name in reversed(frames[:depth]) if name not in _WRAPPERS), "")
    return replace(
        place,
        call=f"{called}()" if called else "",
        file=file,
        line=line,
        source=linecache.getline(file, line).strip(),
        guard=guard_of(file, line) or _guard_of_lines((file, line) for file, line, _ in frames[depth + 1 :]),
    )


def place_of_caller() -> Place:
    """Return the place of the calling thread."""
    return _place(sys._getframe(1))


def place_of_error(error: BaseException) -> Place:
    """Return the place where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return Place(phase=USER_CODE) if trace is None else _place(trace.tb_frame, _lines(error))


def signature_of(thread: int) -> tuple[int, int] | None:
    """Return a value that changes as soon as a thread executes Python code."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    polls = (frame.f_code.co_filename, frame.f_code.co_name) in _STORE_POLLS
    return id(frame), 0 if polls else frame.f_lasti


def is_at_lock(thread: int) -> bool:
    """Return whether a thread acquires a Python lock; inside native code it may wait for anything."""
    frame = sys._current_frames().get(thread)
    return frame is not None and _acquires_lock(frame)


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line, with the line of the script that raised it."""
    place = place_of_error(error)
    return f"{_one_line(error)} ({place.location()}{f': `{place.source}`' if place.source else ''})"


def _handled_exception(thread: int) -> BaseException | None:
    """Return the exception that a thread is handling."""
    found: Any = sys._current_exceptions().get(thread)
    found = found[1] if isinstance(found, tuple) else found  # Python 3.10 and 3.11 give what sys.exc_info() does
    return found if isinstance(found, BaseException) else None


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # code of another library: a diagnosis must not fail over a detail
        text = ""
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


def _lines(error: BaseException) -> dict[FrameType, int]:
    """Return the line at which each frame raised; some have moved on since, to clean up."""
    lines = {}
    trace = error.__traceback__
    while trace is not None:
        lines[trace.tb_frame] = trace.tb_lineno
        trace = trace.tb_next
    return lines


def _place(innermost: FrameType, lines: Mapping[FrameType, int] | None = None) -> Place:
    """Return the place of a stack; `lines` overrides the current lines of its frames."""
    lines = lines or {}
    frames = list(walk_frames(innermost))
    user_frame = find_user_frame(frames)
    depth = len(frames) if user_frame is None else frames.index(user_frame)
    place = _place_in_libraries(frames[:depth])
    if user_frame is None:
        return place
    file, line = user_frame.f_code.co_filename, lines.get(user_frame, user_frame.f_lineno)
    return replace(
        place,
        call="" if place.phase == DEBUGGER else _called_function(frames[:depth]),
        file=file,
        line=line,
        source=linecache.getline(file, line).strip(),
        guard=guard_of(file, line) or _guard_of_callers(frames[depth + 1 :], lines),
        at_lock=_acquires_lock(innermost),
        at_store=any((frame.f_code.co_filename, frame.f_code.co_name) in _STORE_WAITS for frame in frames[:depth]),
    )


def _place_in_libraries(frames: list[FrameType]) -> Place:
    """Return the phase and the collective of the frames below the user's line."""
    phase = next((phase for frame in frames if (phase := _phase(frame))), USER_CODE)
    collective = next((frame for frame in frames if _is_collective(frame)), None)
    if collective is None:
        return Place(phase=phase)
    return Place(phase=phase, operation=_operation(collective), group_ranks=_group_ranks(collective))


def _called_function(frames: list[FrameType]) -> str:
    """Return the outermost function below the user's line that is not a wrapper: "gather()"."""
    names = (frame.f_code.co_name for frame in reversed(frames))
    name = next((name for name in names if name not in _WRAPPERS), "")
    return f"{name}()" if name else ""


def _acquires_lock(innermost: FrameType) -> bool:
    file = innermost.f_code.co_filename
    if file.startswith(_LOCKS):
        return innermost.f_code.co_name not in _THREAD_ENTRY_POINTS
    source = linecache.getline(file, innermost.f_lineno).strip()
    return is_user_file(file) and (".acquire(" in source or source.startswith("with "))


def _phase(frame: FrameType) -> str | None:
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if is_debugger_file(file):
        return DEBUGGER
    return next(
        (phase for prefix, name, phase in _PHASE_RULES if file.startswith(prefix) and name in (None, function)), None
    )


def _is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_COLLECTIVES) and frame.f_code.co_name not in _WRAPPERS


def _group_ranks(frame: FrameType) -> list[int] | None:
    """Return the ranks of a collective's process group; None if it is the world."""
    group = frame.f_locals.get("group") or frame.f_locals.get("pg")
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        ranks = dist.get_process_group_ranks(group)
        return None if len(ranks) == dist.get_world_size() else sorted(ranks)
    except (KeyError, ValueError, RuntimeError):  # destroyed meanwhile
        return None


def _operation(frame: FrameType) -> str:
    """Describe a collective by its name and its tensors."""
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
    """Return the condition around this call, in any frame of the user's, that holds on one rank only; "" if none."""
    return _guard_of_callers(walk_frames(sys._getframe(1)), {})


def _guard_of_callers(frames: Iterable[FrameType], lines: Mapping[FrameType, int]) -> str:
    return _guard_of_lines((frame.f_code.co_filename, lines.get(frame, frame.f_lineno)) for frame in frames)


def _guard_of_lines(lines: Iterable[tuple[str, int]]) -> str:
    for file, line in lines:
        if is_user_file(file):
            for condition in reversed(_conditions(file, line)):
                if not condition.in_else and _holds_on_one_rank(condition.test):
                    return f"{condition.describe()} of {Path(file).name}"
    return ""


def guard_of(file: str, line: int) -> str:
    """Return the innermost condition around a line that tests the rank, as written."""
    for condition in reversed(_conditions(file, line)):
        if any(word in ast.unparse(condition.test) for word in _RANK_WORDS):
            return condition.describe()
    return ""


@dataclass(frozen=True)
class _Condition:
    """An `if` around a line."""

    test: ast.expr
    line: int
    in_else: bool
    """Whether the line is in the `else` branch."""

    def describe(self) -> str:
        return f"`{'else of ' if self.in_else else ''}if {ast.unparse(self.test)}:` (line {self.line})"


def _conditions(file: str, line: int) -> list[_Condition]:
    """Return the conditions around a line, outermost first."""
    try:
        ifs = _ifs("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, SystemError):  # Python 3.11 raises the last one where two threads parse at once
        return []
    return [
        _Condition(found.test, found.line, found.other is not None and line >= found.other)
        for found in ifs
        if found.body <= line <= found.end
    ]


class _If(NamedTuple):
    """Where an `if` statement stands: its first line, that of its body and of its `else`, and its last line."""

    test: ast.expr
    line: int
    body: int
    other: int | None
    end: int


@lru_cache(maxsize=32)
def _ifs(source: str) -> list[_If]:
    """Return the `if` statements of a file, outermost first; parsed once, because the watcher asks again and again."""
    return [
        _If(
            node.test,
            node.lineno,
            node.body[0].lineno,
            node.orelse[0].lineno if node.orelse else None,
            node.end_lineno or 0,
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
    ]


def _holds_on_one_rank(test: ast.expr) -> bool:
    """Return whether a condition cannot hold on two ranks; one with an `or` may hold on all of them."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(_holds_on_one_rank(part) for part in test.values)
    if isinstance(test, ast.Compare):
        tests_index = isinstance(test.left, ast.Attribute) and test.left.attr == "process_index"
        return tests_index and isinstance(test.ops[0], ast.Eq) and isinstance(test.comparators[0], ast.Constant)
    return isinstance(test, ast.Attribute) and test.attr in ("is_main_process", "is_last_process")
