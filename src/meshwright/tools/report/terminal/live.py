"""Show runs in the terminal while they run: one frame, redrawn with every update."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from ..runs.finding import RunFinder, read_runs
from ..runs.reading import RunRecords
from .frame import Frame
from .text import as_ascii


def show_live(paths: Sequence[Path], *, interval: float, wanted: Sequence[str] = (), waits: bool = False) -> None:
    """Show the runs until all have ended or the user leaves; without a terminal, show them once.

    With `waits`, the folders need not exist yet.
    """
    out = sys.stdout
    if not has_screen(out):
        show_once(out, Frame(read_runs(paths), wanted, *shutil.get_terminal_size((100, 40))))
        return
    runs = RunFinder(paths)
    if not waits and not all(path.exists() for path in paths):
        read_runs(paths)  # raises for the missing one
    was_cut_off: set[RunRecords] | None = None

    def draw(width: int, height: int, page: int) -> Frame:
        runs.update()
        return Frame(runs, wanted, width, height, page)

    def is_over() -> bool:
        # Runs that were cut off before do not keep the view open, unless they are resumed.
        nonlocal was_cut_off
        cut_off = {run for run in runs if run.state() == "cut off"}
        was_cut_off = cut_off if was_cut_off is None else was_cut_off & cut_off
        ended = {run for run in runs if run.ended is not None}
        return bool(ended) and ended | was_cut_off == set(runs)

    follow(Frame(runs, wanted, 80, 24), draw, is_over, interval)


class View(Protocol):
    """A text in pages."""

    height: int
    pages: int

    def text(self, coloured: bool, final: bool = False) -> str:
        """Return the lines of the current page."""


def has_screen(out: TextIO) -> bool:
    """Return whether the output is a terminal that can be redrawn."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def show_once(out: TextIO, view: View) -> None:
    """Write a view as plain lines."""
    out.write(_plain(view.text(coloured=False, final=True), out) + "\n")


def follow(first: View, draw: Callable[[int, int, int], View], is_over: Callable[[], bool], interval: float) -> None:
    """Redraw a view, for the current size and page, until the run is over or the user quits.

    The last view stays on the terminal; it is `first` if the user quits at once.
    """
    page, view = 0, first
    with Screen(sys.stdout) as screen:
        try:
            while True:
                view = draw(*screen.size(), page)
                screen.show(view)
                if is_over():
                    break
                key = screen.wait(interval)
                if key == "q":
                    break
                page = (page + {"next": 1, "previous": -1}.get(key, 0)) % view.pages
        except KeyboardInterrupt:
            pass
    screen.print_last(view)


class Screen:
    """The terminal's alternate screen, without a cursor and with unbuffered keys."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._coloured = not os.environ.get("NO_COLOR")
        self._has_keys = False
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> Screen:
        def leave(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        before = signal.signal(signal.SIGTERM, leave)  # else the terminal would not be restored
        self._restore.append(lambda: signal.signal(signal.SIGTERM, before))
        if sys.stdin.isatty():
            try:
                import termios
                import tty
            except ImportError:  # no keys on this system; Ctrl-C quits
                pass
            else:
                modes = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin)
                self._has_keys = True
                self._restore.append(lambda: termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes))
        self._out.write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        self._out.write("\x1b[?25h\x1b[?1049l")
        self._out.flush()
        for undo in reversed(self._restore):
            undo()

    def size(self) -> tuple[int, int]:
        """Return the current columns and lines."""
        try:
            size = os.get_terminal_size(self._out.fileno())  # not $COLUMNS, which does not follow the window
        except OSError:
            size = shutil.get_terminal_size()
        return size.columns, size.lines

    def show(self, frame: View) -> None:
        """Draw over the last frame, without flicker."""
        lines = _plain(frame.text(self._coloured), self._out).split("\n")
        self._out.write("\x1b[H" + "\x1b[K\n".join(lines[: frame.height]) + "\x1b[K\x1b[J")
        self._out.flush()

    def print_last(self, frame: View) -> None:
        """Print the last frame to the normal screen."""
        self._out.write(_plain(frame.text(self._coloured, final=True), self._out) + "\n")
        self._out.flush()

    def wait(self, seconds: float) -> str:
        """Wait for a time, a key or a new size of the window."""
        deadline, size = time.monotonic() + seconds, self.size()
        while (left := deadline - time.monotonic()) > 0 and self.size() == size:
            if not self._has_keys:
                time.sleep(min(left, 0.2))
            elif select.select([sys.stdin], [], [], min(left, 0.2))[0]:
                typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
                if not typed or "q" in typed.lower():
                    return "q"
                if typed in ("\x1b[C", "\x1b[B", "\x1b[6~", " ", "n", "\t"):
                    return "next"
                if typed in ("\x1b[D", "\x1b[A", "\x1b[5~", "p"):
                    return "previous"
        return ""


def _plain(text: str, out: TextIO) -> str:
    try:
        text.encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return as_ascii(text).encode(out.encoding or "ascii", "replace").decode(out.encoding or "ascii")
    return text
