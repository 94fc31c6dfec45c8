"""The pages that a reader sees, and the blocks in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOT_PAGES = [
    ROOT / name
    for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "SECURITY.md")
    if (ROOT / name).exists()
]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *ROOT_PAGES]

_BLOCK = re.compile(
    r"(?:^<!-- not run here: (?P<why_not>.+?) -->\n)?"
    r"(?:^```(?P<language>[\w-]*)\n(?P<fenced>.*?)^```$"
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n)+))",
    flags=re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"(meshwright|bash|mpirun|pip|python|srun|torchrun) ")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page."""

    page: Path
    line: int
    language: str
    code: str
    is_fenced: bool
    why_not: str | None
    """Why it cannot run in a test, as the comment above it says."""

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of a page, of one language or all."""
    return [block for block in _blocks(page) if language in (None, block.language)]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        code = found["fenced"] if found["indented"] is None else textwrap.dedent(found["indented"])
        language = found["language"] if found["indented"] is None else "bash" if _COMMAND.match(code) else "text"
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=language or "text",
            code=code,
            is_fenced=found["indented"] is None,
            why_not=found["why_not"],
        )


def pages_with(language: str) -> list[Path]:
    """Return the pages that have a block of a language."""
    return [page for page in PAGES if blocks_of(page, language)]


def name_of(page: Path) -> str:
    """Return the name of a page, for a test's identifier."""
    return page.relative_to(ROOT).as_posix()
