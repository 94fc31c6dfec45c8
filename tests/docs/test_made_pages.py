"""What pages say of arguments, flags, verdicts and errors is what the code says."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

import accelerate
import accelerate.utils
import meshwright
from meshwright.commands.launch import launch_command_parser
from meshwright.watch.hangs import verdict

from .pages import ROOT

REFERENCE = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
_IS_A_SETTING = re.compile(r"\w+(Plugin|Kwargs|Config|Configuration)")
CONFIG_CLASSES = sorted(
    {
        found
        for place in (accelerate, accelerate.utils, meshwright)
        for name in place.__all__
        if _IS_A_SETTING.fullmatch(name) and dataclasses.is_dataclass(found := getattr(place, name))
    },
    key=lambda found: found.__name__,
)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_tables", ROOT / "docs" / "site_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- arguments --------------------------------------------------------------------------------------------------------


def _methods_with_arguments() -> list[Any]:
    methods = [method for _, method in inspect.getmembers(accelerate.Accelerator, inspect.isfunction)]
    public = [method for method in methods if not method.__name__.startswith("_")]
    return [method for method in public if len(inspect.signature(method).parameters) > 1]


@pytest.mark.parametrize(
    ("function", "docstring"),
    [
        (accelerate.Accelerator.__init__, accelerate.Accelerator.__doc__),
        *((method, method.__doc__) for method in _methods_with_arguments()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_argument_is_described(function: object, docstring: str) -> None:
    arguments = set(inspect.signature(function).parameters) - {"self"}  # type: ignore[arg-type]
    described = re.findall(r"^    \*{0,2}(\w+): \S", _section(docstring, "Args"), flags=re.MULTILINE)
    assert set(described) == arguments
    assert len(described) == len(arguments)


def _section(docstring: str, name: str) -> str:
    """Return what is indented below a heading."""
    found = re.search(rf"^{name}:\n(?P<text>(?:    .*\n|\n)+)", inspect.cleandoc(docstring) + "\n", flags=re.MULTILINE)
    assert found is not None, f"no {name}"
    return found["text"]


@pytest.mark.parametrize("config", CONFIG_CLASSES, ids=lambda config: config.__name__)
def test_every_field_of_a_config_class_is_described(config: type) -> None:
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    described = {name for base in config.__mro__[:-1] for name in _described_fields(base)}
    assert not fields - described, f"{config.__name__}: no docstring below {', '.join(sorted(fields - described))}"
    assert re.search(rf"^::: [\w.]+\.{config.__name__}$", REFERENCE, flags=re.MULTILINE), "not in docs/reference"


def _described_fields(config: type) -> set[str]:
    """Return the fields that have a docstring below them."""
    [body] = [
        node.body
        for file in (ROOT / "src" / "meshwright" / "config").rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == config.__name__
    ]
    return {
        field.target.id
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below)
    }


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_the_config_classes_are_found() -> None:
    names = {config.__name__ for config in CONFIG_CLASSES}
    assert {"DataLoaderConfiguration", "FullyShardedDataParallelPlugin", "ParallelismConfig", "ProfileKwargs"} <= names


# --- pages that are made ----------------------------------------------------------------------------------------------


def test_the_committed_pages_are_what_the_code_says(tables: ModuleType) -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "<!-- made: " in page.read_text(encoding="utf-8")]
    assert {page.name for page in pages} == {"combinations.md", "launch_options.md", "troubleshooting.md"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"run `python docs/site_tables.py`: {page.name} is not what the code says"


def test_every_flag_of_a_launch_is_listed() -> None:
    page = (ROOT / "docs" / "launch_options.md").read_text(encoding="utf-8")
    shown = [
        action for action in launch_command_parser()._actions if action.dest != "help" and action.help != "==SUPPRESS=="
    ]
    assert len(shown) > 90
    assert not [action.dest for action in shown if action.option_strings and f"`{action.option_strings[0]}" not in page]


def test_every_sentence_of_a_verdict_is_listed() -> None:
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split())
    unlisted = [words for words in _words_of_verdicts() if words not in page]
    assert not unlisted, "give docs/site_tables.py a situation in which the watcher says it"


def _words_of_verdicts() -> list[str]:
    """Return the longer pieces of what the watcher's judge says."""
    judge = ast.parse(inspect.getsource(verdict))
    sayings = [
        node for node in judge.body if isinstance(node, ast.FunctionDef) and node.name != "_format_flight_records"
    ]
    docstrings = {ast.get_docstring(node, clean=False) for node in sayings}
    pieces = [
        node.value
        for saying in sayings
        for node in ast.walk(saying)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings
    ]
    found = [" ".join(piece.split()) for piece in pieces if len(piece) > 20]
    assert len(found) > 12
    return found


def test_every_error_says_what_to_do(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = list(tables.exceptions())
    assert {"StuckError", "CheckpointError", "LaunchError", "WorkerFailedError"} <= {name for _, name, _ in found}
    for _, name, text in found:
        assert f"### `{name}`" in page
        assert len(text.split("\n\n")) >= 2, f"{name}: its docstring says what it is, and not what to do"


def test_a_verdict_that_is_listed_as_the_end_of_a_run_is_fatal(tables: ModuleType) -> None:
    notices = {say().splitlines()[0] for _, _, say in tables.NOTICES}
    verdicts = {say().splitlines()[0] for _, _, say in tables.FATAL}
    assert not notices & verdicts
    assert len(notices) + len(verdicts) == len(tables.NOTICES) + len(tables.FATAL)
