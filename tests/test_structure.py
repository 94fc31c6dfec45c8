"""The layout of the library: folders that say what they hold, small functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FIRST

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
FOLDERS = [path for path in (SOURCE, *SOURCE.rglob("*")) if (path / "__init__.py").is_file()]
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension, ast.Assert)


def name_of(folder: Path) -> str:
    return str(folder.relative_to(SOURCE))


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_says_what_it_holds(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_function_has_more_than_15_branches() -> None:
    too_many = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}: {branches}"
        for path in SOURCE.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (branches := sum(map(branches_at, own_nodes(function)))) > 15
    ]
    assert not too_many, "\n".join(too_many)


def test_a_class_name_says_which_class_it_is() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Walk a function's nodes without those of functions and classes inside of it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def branches_at(node: ast.AST) -> int:
    """Count the ways that a node adds: a condition, a loop, a handler, an operand of `and` and `or`."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))


def test_the_files_that_begin_exist() -> None:
    assert [path for path in LONGEST_FIRST if not path.exists()] == []
