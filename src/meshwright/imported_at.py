"""Find the statement of a user by which a package was imported."""

from __future__ import annotations

import ast
import linecache
import sys


def imported_at(package: str) -> str:
    """Return a sentence with the user's first statement that has imported a package, if it can be found.

    `sys.modules` is in the order in which the bodies of modules ended. The statement is the first one in the script, or
    in the cells of a notebook, one of whose modules ended when the package had.
    """
    order = {name: index for index, name in enumerate(sys.modules)}
    main = sys.modules["__main__"]
    for where, text in _sources(main):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in sorted(statements, key=lambda statement: statement.lineno):
            names = [name for name in _modules_of(node, main) if name.partition(".")[0] != "meshwright"]
            if any(order.get(name, -1) >= order[package] for name in names):
                return f" It was imported by {where}, line {node.lineno}: {text.splitlines()[node.lineno - 1].strip()}"
    return ""


def _sources(main: object) -> list[tuple[str, str]]:
    cells = getattr(main, "In", None)
    if isinstance(cells, list):
        found = [(f"cell {number}", text) for number, text in enumerate(cells) if isinstance(text, str) and text]
    else:
        file = getattr(main, "__file__", None)
        found = [(file, "".join(linecache.getlines(file)))] if isinstance(file, str) else []
    plain = lambda line: "" if line.lstrip()[:1] in ("%", "!") else line  # noqa: E731
    return [(where, "\n".join(map(plain, text.splitlines()))) for where, text in found]


def _modules_of(node: ast.Import | ast.ImportFrom, main: object) -> list[str]:
    """Return the modules that a statement may have imported: those it names, and those where its names come from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    names = [module]
    for alias in node.names:
        value = getattr(main, alias.asname or alias.name, None)
        names += [f"{module}.{alias.name}", str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))]
    return names
