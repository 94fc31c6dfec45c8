"""The documents that users learn from: their code blocks, read from where the documents lie, never kept here."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
DIRECTORY = Path(os.environ.get("SEED_DOCUMENTS") or _REPOSITORY.parent / "shared" / "seeds")


def python_blocks(number: str) -> list[str]:
    """Return the fenced Python blocks of the document whose name starts with this number, in order."""
    (document,) = DIRECTORY.glob(f"{number}_*.txt")
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def statements(block: str) -> list[str]:
    """Cut a block after each of its statements, so that one block can continue another; joined, they are the block."""
    lines = block.splitlines(keepends=True)
    ends = [node.end_lineno or 0 for node in ast.parse(block).body]
    ends[-1] = len(lines)
    return ["".join(lines[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
