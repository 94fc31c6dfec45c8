"""Reading and writing the environment: words, numbers, engines, and putting everything back."""

from __future__ import annotations

import os

import pytest

from meshwright.config import environment
from meshwright.config.environment import (
    clear_environment,
    export_settings,
    patch_environment,
    read_setting,
    str_to_bool,
)


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", "on", "y", "t", " yes "])
def test_words_for_yes(word: str) -> None:
    assert str_to_bool(word) == 1
    assert type(str_to_bool(word)) is int
    assert str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["0", "false", "FALSE", "no", "Off", "n", "f", ""])
def test_words_for_no(word: str) -> None:
    assert str_to_bool(word) == 0
    assert type(str_to_bool(word)) is int
    assert str_to_bool(word, to_bool=True) is False


def test_other_words_are_refused_with_the_ones_that_are_understood() -> None:
    with pytest.raises(ValueError, match="'maybe' is neither yes nor no: use one of 1, 0, true, false"):
        str_to_bool("maybe")


@pytest.mark.parametrize(
    ("setting", "variable", "raw", "value"),
    [
        ("cpu", "ACCELERATE_USE_CPU", "true", True),
        ("debug", "ACCELERATE_DEBUG_MODE", "0", False),
        ("device", "ACCELERATE_TORCH_DEVICE", "cuda:1", "cuda:1"),
        ("fork_launched", "FORK_LAUNCHED", "1", True),
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", 4),
        ("log_level", "ACCELERATE_LOG_LEVEL", "debug", "debug"),
        ("mixed_precision", "ACCELERATE_MIXED_PRECISION", "bf16", "bf16"),
    ],
)
def test_settings_are_read_from_their_published_variables(
    monkeypatch: pytest.MonkeyPatch, setting: str, variable: str, raw: str, value: object
) -> None:
    assert read_setting(setting) is None
    monkeypatch.setenv(variable, raw)
    assert read_setting(setting) == value
    assert type(read_setting(setting)) is type(value)


@pytest.mark.parametrize(
    ("setting", "raw", "message"),
    [
        ("cpu", "maybe", "ACCELERATE_USE_CPU='maybe' is not a valid bool: .* use one of 1, 0"),
        ("gradient_accumulation_steps", "four", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS='four' is not a valid int"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_with_the_variable_that_has_it(
    monkeypatch: pytest.MonkeyPatch, setting: str, raw: str, message: str
) -> None:
    monkeypatch.setenv(environment.variable_of(setting), raw)
    with pytest.raises(ValueError, match=message):
        read_setting(setting)


def test_exported_settings_are_read_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"cpu": True, "debug": False, "gradient_accumulation_steps": 3, "mixed_precision": "fp16"}
    exported = export_settings({**settings, "log_level": None})
    assert set(exported) == {environment.variable_of(name) for name in settings}, "None is left out"
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert {name: read_setting(name) for name in settings} == settings


def test_patched_variables_are_upper_case_strings_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "old")
    monkeypatch.delenv("ABSENT", raising=False)
    with patch_environment(before=1, absent="x"):
        assert (os.environ["BEFORE"], os.environ["ABSENT"]) == ("1", "x")
        del os.environ["ABSENT"]  # the block may meddle too
    assert os.environ["BEFORE"] == "old"
    assert "ABSENT" not in os.environ


def break_off() -> None:
    raise KeyError("the reason")


def test_patched_variables_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    with pytest.raises(KeyError, match="the reason"), patch_environment(absent="x"):
        break_off()
    assert "ABSENT" not in os.environ


def test_a_cleared_environment_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "old")
    before = dict(os.environ)
    with clear_environment():
        assert dict(os.environ) == {}
        os.environ["INSIDE"] = "1"
    assert dict(os.environ) == before
    with pytest.raises(KeyError, match="the reason"), clear_environment():
        break_off()
    assert dict(os.environ) == before
