"""Draw random mutants of the source, run tests on each, and list those that nobody noticed.

    python -m tests.mutants 25 --seed 1          # in a copy of src, which is changed; the repository is not

A mutant is one changed operator, number, comparison or branch in a module where numbers are made. The tests that mirror
the module run first, then the others of its part of the package. A mutant that none of them notices is either
equivalent, which reading shows, or a missing assertion.

[Note: forks] Tests of a mutant run in a fork of this process, which has imported what they need, and their ranks in
forks of that one. If a function is changed, the fork replaces its code. If a module or a class is changed in what it
computes when it is imported, the fork imports the package, so these are tried first, before this process imports it.
Tests that were short begin: most mutants are noticed by many.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

import pytest

from tests import warm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "meshwright"
PLACES = [
    "accelerator/accumulation.py",
    "checkpoint",
    "data",
    "inference/planning",
    "launch/devices.py",
    "launch/machines",
    "launch/notebook",
    "launch/processes",
    "optimizer.py",
    "parallel/base.py",
    "parallel/mesh",
    "parallel/modules",
    "parallel/pipeline",
    "parallel/replicas",
    "precision",
    "runtime/collectives",
    "scheduler.py",
    "tools/meter",
]
"""The modules where numbers are made, and those that start the processes."""

SHORTEST_LIMIT, FIRST_LIMIT = 60.0, 240.0
"""Seconds for a test: at least, and where nobody knows how long it takes. A test that does not end notices a mutant."""

NOT_TRIED = 98
"""The exit code where the changed code cannot stand for the old one: such a mutant is counted as missed."""

OURS = ("meshwright", "accelerate", "transformers")
"""What is or imports the package; a mutant of what a module computes when it is imported is tried before."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass
class Change:
    """A change of one expression or statement: what it replaces, and by what."""

    node: ast.expr | ast.stmt
    new: ast.expr | ast.stmt


def changes_of(tree: ast.Module) -> Iterator[Change]:
    """Yield every change that can be made to a module."""
    for node in _walked(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            operator = _COMPARISONS[type(node.ops[0])]()
            yield Change(node, ast.Compare(left=node.left, ops=[operator], comparators=node.comparators))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _has_text(node):
            yield Change(node, ast.BinOp(left=node.left, op=_OPERATORS[type(node.op)](), right=node.right))
        elif isinstance(node, ast.BoolOp):
            yield Change(
                node, ast.BoolOp(op=ast.Or() if isinstance(node.op, ast.And) else ast.And(), values=node.values)
            )
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Change(node, node.operand)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Change(node, ast.Constant(node.value + 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Change(node, ast.Constant(not node.value))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield Change(node, ast.Pass())


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: not messages, annotations, and the arguments of decorators."""
    yield node
    if isinstance(node, (ast.JoinedStr, ast.Raise)):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walked(child)


def _has_text(node: ast.BinOp) -> bool:
    """Return whether text is put together: its operators make no numbers."""
    return any(isinstance(part, (ast.JoinedStr, ast.List)) or _is_text(part) for part in ast.walk(node))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutated(source: str, change: Change) -> str:
    """Return a source with one change; all else stays as it is written."""
    node = change.node
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    new = ast.unparse(ast.fix_missing_locations(ast.copy_location(change.new, node)))
    new = f"({new})" if isinstance(change.new, ast.expr) and not isinstance(change.new, ast.Constant) else new
    content = source.encode()
    return (content[:first] + new.encode() + content[last:]).decode()


def tests_of(module: Path) -> list[Path]:
    """Return the tests that mirror a module: its own file, or else those of its folder, or else the next folder up."""
    where = module.relative_to(PACKAGE)
    own = ROOT / "tests" / where.parent / f"test_{where.name}"
    if own.is_file():
        return [own]
    for folder in where.parents:
        named = ROOT / "tests" / folder.parent / f"test_{folder.name}.py"
        if named.is_file():
            return [named]
        if found := sorted((ROOT / "tests" / folder).glob("test_*.py")):
            return found
    return []


def other_tests_of(module: Path) -> list[Path]:
    """Return the other tests of the part of the package that a module belongs to, and those of the whole."""
    part = module.relative_to(PACKAGE).parts[0]
    found = sorted((ROOT / "tests" / part).rglob("test_*.py")) or [ROOT / "tests" / f"test_{part}"]
    whole = [ROOT / "tests" / "accelerator" / f"test_{name}.py" for name in ("accelerator", "accumulation", "mistakes")]
    first = tests_of(module)
    return [path for path in dict.fromkeys([*found, *whole]) if path not in first and path.is_file()]


@dataclass
class Mutant:
    """A module with one change."""

    path: Path
    change: Change

    @property
    def place(self) -> str:
        """The line, as reports name it."""
        return f"{self.path.relative_to(PACKAGE)}:{self.change.node.lineno}"

    def source(self) -> str:
        """Return the changed module."""
        return mutated(self.path.read_text(encoding="utf-8"), self.change)

    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the outermost function whose body is changed; None if importing the module computes it."""
        line = self.change.node.lineno, self.change.node.col_offset
        nodes: list[ast.stmt] = list(ast.parse(self.path.read_text(encoding="utf-8")).body)
        while nodes:
            node = nodes.pop()
            if not (node.lineno, node.col_offset) <= line < (node.end_lineno or 0, node.end_col_offset or 0):
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return node if (node.body[0].lineno, node.body[0].col_offset) <= line else None
            nodes += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
        return None

    def replace_code(self, path: Path) -> bool:
        """Give the functions of this process their changed code; tell whether that can be done."""
        if all(getattr(module, "__file__", None) != str(path) for module in list(sys.modules.values())):
            return True  # it is imported later, with its change
        function = self.function()
        if function is None:
            return False
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        sources = self.path.read_text(encoding="utf-8"), self.source()
        before, after = (list(_functions(compile(source, str(path), "exec"))) for source in sources)
        if len(before) != len(after):
            return False
        (pair,) = ((old, new) for old, new in zip(before, after, strict=True) if old.co_firstlineno == first)
        codes = dict(_pairs(*pair))
        replaced = 0
        for found in gc.get_objects():
            if isinstance(found, types.FunctionType) and found.__code__.co_filename == str(path):
                new = codes.get(_name(found.__code__))
                if new is not None:
                    found.__code__ = new
                    replaced += found.__code__.co_firstlineno == first
        return replaced > 0


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the functions of a module and of its classes."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            if part.co_flags & 0x2:  # of a function, and not of a class
                yield part
            else:
                yield from _functions(part)


def _pairs(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """Yield by name the new code of a function and of those inside it."""
    yield _name(old), new
    inner = [[part for part in code.co_consts if isinstance(part, types.CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for parts in zip(*inner, strict=True):
            yield from _pairs(*parts)


def _name(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


@dataclass
class Telling:
    """What pytest tells the process that waits: the tests that begin, and how long they took. Short tests begin."""

    to: Connection
    seconds: dict[str, float]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Begin with the tests that were short."""
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that a test begins."""
        self.to.send((nodeid, None))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell that a test has ended."""
        self.to.send((nodeid, "ended"))


@dataclass
class Trial:
    """A copy of the source in which mutants are tried, one at a time."""

    copy: Path
    patience: float
    """For how long the tests of a mutant may run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each test took when it passed last."""

    def noticed_by(self, mutant: Mutant, tests: list[Path]) -> str | None:
        """Return the test that fails, or does not end; None if all pass."""
        target = self.copy / mutant.path.relative_to(PACKAGE.parent)
        target.write_text(mutant.source(), encoding="utf-8")
        try:
            here, there = Pipe(duplex=False)
            child = os.fork()
            if child == 0:
                here.close()
                self._run(mutant, target, tests, there)
            there.close()
            return self._wait(child, here)
        finally:
            shutil.copyfile(mutant.path, target)

    def _run(self, mutant: Mutant, target: Path, tests: list[Path], to: Connection) -> NoReturn:
        os.setsid()
        log = os.open(self.copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        code = 99
        try:
            if not mutant.replace_code(target):
                os._exit(NOT_TRIED)
            warm.preload(warm.PRELOADED)
            warm.fork_zygote()
            arguments = ["-q", "-x", "-p", "no:cacheprovider", *map(str, tests)]
            code = int(pytest.main(arguments, [Telling(to, self.seconds)]))
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _wait(self, child: int, told: Connection) -> str | None:
        test, began = "the collection of tests", time.monotonic()
        until = began + self.patience
        while True:
            limit = max(SHORTEST_LIMIT, 5 * self.seconds.get(test, FIRST_LIMIT / 5))
            with suppress(EOFError, pickle.UnpicklingError):
                if told.poll(0.05):
                    named, ended = told.recv()
                    if ended:
                        self.seconds[named] = time.monotonic() - began
                    test, began = named, time.monotonic()
                    continue
            if (status := os.waitpid(child, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(status[1])
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # ranks that are left
                return None if code in (0, NOT_TRIED) else f"{test} ({code})"
            does_not_end = time.monotonic() - began > limit
            if does_not_end or time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)  # with the ranks that the tests have started
                os.waitpid(child, 0)
                return f"{test} (it did not end)" if does_not_end else None


def drawn(count: int, seed: int, places: list[str]) -> list[Mutant]:
    """Return random mutants; those that need an import of their own come first."""
    modules = [
        path
        for place in places
        for path in sorted([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"))
    ]
    found = [
        Mutant(path, change)
        for path in modules
        if tests_of(path)
        for change in changes_of(ast.parse(path.read_text(encoding="utf-8")))
    ]
    sample = random.Random(seed).sample(found, min(count, len(found)))
    return sorted(sample, key=lambda mutant: mutant.function() is not None)


def survivors(mutants: list[Mutant], patience: float, tell: Callable[[str], None]) -> int:
    """Try mutants, tell of each, and return how many nobody noticed."""
    missed = 0
    copy = Path(tempfile.mkdtemp()) / "src"  # not TemporaryDirectory, which every forked process deletes at its end
    try:
        shutil.copytree(PACKAGE.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
        sys.path[:0] = [str(copy)]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(ROOT)])
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        os.environ["OMP_NUM_THREADS"] = "1"
        trial = Trial(copy, patience)
        warm.preload([name for name in warm.PRELOADED if not name.startswith(OURS)])
        for mutant in mutants:
            if mutant.function() is not None and "meshwright" not in sys.modules:
                warm.preload(warm.PRELOADED)  # [Note: forks]
            began = time.monotonic()
            noticed = trial.noticed_by(mutant, tests_of(mutant.path))
            noticed = noticed or trial.noticed_by(mutant, other_tests_of(mutant.path))
            missed += noticed is None
            change = mutant.change
            before, after = (ast.unparse(node).splitlines()[0] for node in (change.node, change.new))
            by = f"by {noticed}" if noticed else ""
            tell(
                f"{'noticed' if noticed else 'MISSED '}  {mutant.place}  {before}  ->  {after}  "
                f"[{time.monotonic() - began:.0f} s] {by}"
            )
    finally:
        shutil.rmtree(copy.parent)
    return missed


def main() -> None:
    """Run as a program; end with 1 if more mutants were missed than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allowed", type=float, default=0.03, help="part of the mutants that may be missed")
    parser.add_argument("--places", nargs="+", default=PLACES, help="modules and folders of the package")
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds for the tests of a mutant, or it is missed"
    )
    args = parser.parse_args()
    mutants = drawn(args.count, args.seed, args.places)
    missed = survivors(mutants, args.patience, lambda line: print(line, flush=True))
    print(f"{len(mutants) - missed} of {len(mutants)} mutants were noticed")
    raise SystemExit(missed > args.allowed * len(mutants))


if __name__ == "__main__":
    main()
