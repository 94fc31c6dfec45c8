"""Every name that a library imports is importable from the path it uses; what is left out has a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from .facts import LEFT_OUT, resolve, rows

IMPORTED = {(module, name): libraries for module, name, libraries in rows("imports.tsv") + rows("names.tsv")}
EXPORTED = [(module, name) for module, name, *_ in rows("exports.tsv")]
PAGE = (Path(__file__).parents[2] / "docs" / "surface.md").read_text()

# For no other reason may a name be missing that a library imports.
EXCUSES = {
    "not published: axolotl asks with hasattr",
    "axolotl's own mark, which it sets and reads with a default",
}


@pytest.mark.parametrize(("module", "name"), [key for key in IMPORTED if key not in LEFT_OUT])
def test_what_libraries_import_is_there(module: str, name: str) -> None:
    assert resolve(module, name) is not None


@pytest.mark.parametrize("key", [key for key in IMPORTED if key in LEFT_OUT], ids=".".join)
def test_what_libraries_import_is_missing_only_with_an_excuse(key: tuple[str, str]) -> None:
    assert LEFT_OUT[key] in EXCUSES, f"{IMPORTED[key]} need it"


@pytest.mark.parametrize(("module", "name"), EXPORTED)
def test_what_was_exported_is_there_or_left_out(module: str, name: str) -> None:
    if (module, name) not in LEFT_OUT:
        assert resolve(module, name) is not None


@pytest.mark.parametrize(("module", "name"), LEFT_OUT)
def test_what_is_left_out_is_really_missing_and_on_the_page(module: str, name: str) -> None:
    with pytest.raises(ImportError):
        resolve(module, name)
    assert f"`{name}`" in PAGE
