"""The prompts of `meshwright config`. An interrupt raises KeyboardInterrupt or EOFError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Check = Callable[[str], "str | None"]
"""Returns what is wrong with an answer, or None."""

_CHOOSE = "(arrow keys, or type to narrow)"
_CHOOSE_SOME = "(space chooses, Enter goes on)"


def choose(question: str, choices: Mapping[str, str], default: str, missing: Mapping[str, str] | None = None) -> str:
    """Ask for one of `choices` (answer -> text); `missing` (answer -> reason) are shown but cannot be chosen."""
    from questionary import Choice, select

    missing = missing or {}
    listed = [
        *(Choice(text, value=answer) for answer, text in choices.items()),
        *(Choice(answer, value=answer, disabled=reason) for answer, reason in missing.items()),
    ]
    while True:
        # Arrow keys skip disabled choices; a search can still select one (questionary 2.1).
        asked = select(question, listed, default, use_jk_keys=False, use_search_filter=True, instruction=_CHOOSE)
        answer = str(asked.unsafe_ask())
        if answer not in missing:
            return answer
        print(f"  {answer} cannot be chosen: {missing[answer]}.")


class BulletMenu:
    """A question with numbered choices, as published: `run` returns the number of the chosen one, from 0."""

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = ()) -> None:
        self.prompt = prompt
        self.choices = list(choices)

    def run(self, default_choice: int = 0) -> int:
        """Ask; Enter alone chooses the default."""
        answers = {str(number): text for number, text in enumerate(self.choices)}
        return int(choose(self.prompt or "", answers, str(default_choice)))


def choose_some(question: str, choices: Mapping[str, str]) -> list[str]:
    """Ask for any number of `choices` (answer -> text)."""
    from questionary import Choice, checkbox

    listed = [Choice(text, value=answer) for answer, text in choices.items()]
    return [str(answer) for answer in checkbox(question, listed, instruction=_CHOOSE_SOME).unsafe_ask()]


def confirm(question: str) -> bool:
    """Ask for yes or no; Enter means yes."""
    from questionary import confirm as yes_or_no

    return bool(yes_or_no(question).unsafe_ask())


def prompt(question: str, default: str | None = None, check: Check | None = None) -> str:
    """Ask for text; Enter alone returns the default, which is shown."""
    from questionary import text

    def validate(typed: str) -> Any:
        answer = typed.strip() or default
        if answer is None:
            return "An answer is needed."
        return (check(answer) if check is not None else None) or True

    shown = question if default is None else f"{question} [{default}]"
    return str(text(shown, validate=validate).unsafe_ask()).strip() or str(default)


def count(question: str, default: int, *, low: int = 1, high: int | None = None, multiple_of: int = 1) -> int:
    """Ask for a whole number in a range."""

    def check(typed: str) -> str | None:
        if not typed.isdecimal():
            return f"{typed!r} is not a whole number."
        number = int(typed)
        if number < low or (high is not None and number > high):
            return f"Type a number from {low} to {high}." if high is not None else f"Type a number of at least {low}."
        if number % multiple_of:
            return f"Type a multiple of {multiple_of}: the processes are shared out evenly among the machines."
        return None

    return int(prompt(question, str(default), check))
