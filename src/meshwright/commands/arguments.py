"""Parsers of other programs' options, as published: with both spellings, and with a note of what was given."""

from __future__ import annotations

import argparse
from typing import Any


class _BothSpellings(argparse._ActionsContainer):
    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Add an argument; an option with underscores is taken with dashes, too."""
        dashed = {flag: flag.replace("_", "-") if flag.startswith("--") else flag for flag in flags}
        action = super().add_argument(*dict.fromkeys(flag for pair in dashed.items() for flag in pair), **options)
        action.__class__ = _noting(type(action))
        return action


class CustomArgumentGroup(_BothSpellings, argparse._ArgumentGroup):
    """A group of options, each with underscores and with dashes."""


class CustomArgumentParser(_BothSpellings, argparse.ArgumentParser):
    """A parser that takes options with underscores and with dashes.

    What it returns has a set `nondefault` with the names of the arguments that were given.
    """

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a group of options."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter for subcommands: the usage leaves out the `<command> [<args>]` of the program's name."""

    def add_usage(self, usage: str | None, *args: Any, **kwargs: Any) -> None:
        """Add the usage."""
        self._prog = self._prog.replace("<command> [<args>] ", "")
        super().add_usage(usage, *args, **kwargs)


def _noting(kind: type[argparse.Action]) -> type[argparse.Action]:
    class Noting(kind):  # type: ignore[misc, valid-type]
        def __call__(self, parser: Any, namespace: argparse.Namespace, *args: Any, **kwargs: Any) -> None:
            super().__call__(parser, namespace, *args, **kwargs)
            namespace.nondefault = getattr(namespace, "nondefault", set()) | {self.dest}

    return Noting
