"""What is published and here takes the published parameters, in their order and with their defaults."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from .facts import LEFT_OUT, Signature, resolve, rows, signatures

# Where the default differs, or a parameter is refused as a whole: each on purpose.
DIFFERENT = {
    "accelerate.commands.config.default.default_command_parser": "parents may be left out",
    "accelerate.commands.config.update.update_command_parser": "parents may be left out",
}


def found(signature: Signature) -> Any:
    """Return the function, class or method, or None where it is not here."""
    try:
        return resolve(signature.module, signature.name)
    except ImportError:
        pass
    module, _, owner = signature.module.rpartition(".")
    try:
        return getattr(resolve(module, owner), signature.name, None)
    except ImportError:
        return None


HERE = [s for s in signatures() if s.parameters and s.path not in DIFFERENT and found(s) is not None]


def test_most_of_what_is_published_is_compared() -> None:
    assert len(HERE) > 330


@pytest.mark.parametrize("signature", HERE, ids=[s.path for s in HERE])
def test_parameters_are_the_published_ones(signature: Signature) -> None:
    own = dict(inspect.signature(found(signature)).parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    named = [name for name in signature.parameters if not name.startswith("*")]
    for name in named:
        if name in own:
            _compare(signature.parameters[name], own[name].default)
        else:
            assert takes_any, f"{signature.path} takes no {name}"
    assert [name for name in own if name in named] == [name for name in named if name in own]


def _compare(published: str | None, own: Any) -> None:
    if published is None:
        assert own is inspect.Parameter.empty
    else:
        assert own is not inspect.Parameter.empty
        try:
            expected = ast.literal_eval(published)
        except ValueError:  # an expression of the module's own
            return
        assert own == expected


@pytest.mark.parametrize(("name", "keyword", "libraries"), rows("kwargs.tsv"))
def test_keywords_that_libraries_pass_are_taken(name: str, keyword: str, libraries: str) -> None:
    if keyword == "**":
        pytest.skip("a dict of keywords, whose names are rows of their own")
    owner, _, method = name.partition(".")
    home = next((row[0] for row in rows("names.tsv") if row[1] == owner), None)
    assert home is not None
    if (home, owner) in LEFT_OUT:
        pytest.skip(LEFT_OUT[home, owner])
    target = resolve(home, owner)
    parameters = inspect.signature(getattr(target, method) if method else target).parameters
    assert keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
