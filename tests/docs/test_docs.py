"""Every Python block of a page runs, one after the other, as a reader would type them; settings can be read."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

from meshwright.commands.config import load_config_from_file

from .pages import PAGES, ROOT, blocks_of, name_of, pages_with


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes is not left in the checkout
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")  # nobody sits at a debugger here
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # DeepSpeed's ZeRO-3 replaces it
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page, "python"):
        code = compile("\n" * block.line + block.code, str(page), "exec")
        if block.why_not is None:
            exec(code, names)


@pytest.mark.parametrize("page", pages_with("yaml"), ids=name_of)
def test_the_settings_of_a_page_can_be_read(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks_of(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.code)
        config = load_config_from_file(file)
        for key, value in yaml.safe_load(block.code).items():
            assert key in config.to_dict(), f"{block.place}: nobody reads {key}"
            assert value is not None


@pytest.mark.parametrize("page", pages_with("diff"), ids=name_of)
def test_both_sides_of_a_difference_are_python(page: Path) -> None:
    for block in blocks_of(page, "diff"):
        for left_out in "+-":
            lines = [line[2:] for line in block.code.splitlines() if not line.startswith(left_out)]
            ast.parse(textwrap.dedent("\n".join(lines)), filename=block.place)


def test_code_fits_the_column_of_the_site() -> None:
    wide = [
        f"{block.place}: {line}"
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
        for block in blocks_of(page)
        for line in block.code.splitlines()
        if len(line) > 88
    ]
    assert not wide, "\n".join(wide)


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        fences = page.read_text(encoding="utf-8").count("```")
        assert fences == 2 * sum(block.is_fenced for block in blocks_of(page)), f"{page}: a fence that no test finds"
    languages = {block.language for page in PAGES for block in blocks_of(page)}
    assert languages <= {"bash", "diff", "python", "text", "yaml"}, "a language that no test reads"
