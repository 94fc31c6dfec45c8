"""The published interface as data: names, parameters and members, and which libraries use them.

`left_out.tsv` has what is not here and why: module, name, reason. A name that comes is taken out of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def rows(file: str) -> list[list[str]]:
    return [line.split("\t") for line in (FOLDER / file).read_text().splitlines() if line]


LEFT_OUT = {(module, name): reason for module, name, reason in rows("left_out.tsv")}


def resolve(module: str, name: str) -> Any:
    """Return what `from module import name` gives; `(module)` is the module itself."""
    found = import_module(module)
    if name == "(module)":
        return found
    try:
        return getattr(found, name)
    except AttributeError:
        return import_module(f"{module}.{name}")


@dataclass
class Signature:
    """A published function, class or method, and its parameters with their defaults as text."""

    path: str
    is_class: bool
    parameters: dict[str, str | None] = field(default_factory=dict)
    """Name -> default; variadic ones keep their stars, and keyword-only ones have none."""

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def signatures() -> list[Signature]:
    """Read `signatures.txt`; methods have the path of their class before them."""
    found: list[Signature] = []
    owner = ""
    for line in (FOLDER / "signatures.txt").read_text().splitlines():
        head = re.match(r"(class )?(\s+\.)?([\w.]+)(?:\((.*)\))?$", line)
        assert head is not None, line
        if head[2] is None:
            owner = head[3]
        path = head[3] if head[2] is None else f"{owner}.{head[3]}"
        found.append(Signature(path, head[1] is not None, _parameters(head[4] or "")))
    return found


def _parameters(text: str) -> dict[str, str | None]:
    parameters: dict[str, str | None] = {}
    for part in re.split(r",\s*(?![^()\[\]]*[)\]])", text):
        name, _, default = part.removeprefix("[kw]").partition("=")
        if name:
            parameters[name] = default or None
    return parameters
