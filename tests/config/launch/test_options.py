"""The table of options against the published ones: `cli_options.tsv` says what accelerate 1.15's `launch` takes."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.launch.options import BY_NAME, GROUPS, OPTIONS, three_yes_no, yes_no

with Path(__file__).with_name("cli_options.tsv").open() as _table:
    PUBLISHED = [
        row
        for row in csv.DictReader(_table, delimiter="\t")
        if row["options"] != "<positional>" and row["dest"] != "config_file"
    ]
FLAGS = [row["options"] for row in PUBLISHED]
READERS = {
    "str": str,
    "flag": str,
    "int": int,
    "float": float,
    "bool": yes_no,
    "str_to_bool": yes_no,
    "<lambda>": three_yes_no,
}
# Published as the word, read as what it says.
READ_AT_ONCE = {"fp8_enable_fsdp_float8_all_gather": True, "fp8_pad_inner_dim": True}


def test_the_published_options_are_all_here() -> None:
    assert len(PUBLISHED) > 100
    assert {row["dest"] for row in PUBLISHED} <= set(BY_NAME)


@pytest.mark.parametrize("row", PUBLISHED, ids=FLAGS)
def test_an_option_has_its_published_flags(row: dict[str, str]) -> None:
    option = BY_NAME[row["dest"]]
    if row["action"] == "StoreConstAction":
        assert option.negation is not None
        assert f"--{option.negation}" in row["options"].split()
    else:
        assert set(row["options"].split()) <= set(option.flags)


@pytest.mark.parametrize(
    "row", [row for row in PUBLISHED if row["action"] != "StoreConstAction"], ids=lambda r: r["dest"]
)
def test_an_option_has_its_published_form(row: dict[str, str]) -> None:
    option = BY_NAME[row["dest"]]
    assert option.default == READ_AT_ONCE.get(option.name, ast.literal_eval(row["default"]))
    assert set(filter(None, row["choices"].split(","))) <= set(option.choices or ())
    assert option.switch == (row["action"] == "StoreTrueAction")
    assert option.repeated == (row["action"] == "AppendAction")
    if not option.switch and option.name != "dynamo_backend":  # read in any case: files and variables have capitals
        assert option.read is READERS[row["type"]]


def test_no_flag_and_no_key_is_there_twice() -> None:
    flags = Counter(flag for option in OPTIONS for flag in option.flags)
    keys = Counter(option.yaml for option in OPTIONS if option.yaml is not None)
    assert {name for name, times in (flags + keys).items() if times > 1} == set()


def test_every_option_stands_in_a_group_and_is_explained() -> None:
    assert {option.group for option in OPTIONS} == set(GROUPS)
    assert all(option.help for option in OPTIONS)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_default_is_a_value_that_could_be_typed(option: Any) -> None:
    if option.default not in (None, ""):
        word = ",".join(map(str, option.default)) if isinstance(option.default, tuple) else str(option.default)
        assert option.read(word) == option.default or option.switch
        assert option.choices is None or option.default in option.choices


def test_three_yes_no_words() -> None:
    assert three_yes_no("true,false,1") == (True, False, True)
    assert three_yes_no("false") == (False, False, False)
    with pytest.raises(ValueError, match="needs three words"):
        three_yes_no("true,false")
