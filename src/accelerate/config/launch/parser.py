"""A parser whose help is short and whose errors name the nearest known flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .options import Option

VERBS = {
    "config": "create the configuration file interactively",
    "env": "print versions, devices and settings, for bug reports",
    "estimate-memory": "estimate the memory of a model without loading it",
    "launch": "start a script on one process or many",
    "merge-weights": "merge a sharded checkpoint into plain model files",
    "plan": "tell what a training run takes: memory, communication, time",
    "report": "show logged runs as an HTML page, or live in the terminal",
    "to-fsdp2": "convert a configuration file from FSDP1 to FSDP2",
    "verify-parallel": "check that a script computes the same on many processes as on one",
    "verify-resume": "check that a script resumes exactly",
    "test": "test this machine: processes, collectives, data and training",
    "tpu-config": "run commands on every host of a TPU pod, by gcloud",
    "watch": "show the step time of every rank, live in the terminal",
}
GIVEN = "_given"
"""Attribute of the namespace: the names of the options that were given."""


class HelpFormatter(argparse.HelpFormatter):
    """Show one spelling per option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(_shown(action.option_strings)) or super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(_shown(action.option_strings))} {self._format_args(action, default)}"


def _shown(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if not (flag.startswith("--") and "-" in flag[2:] and "_" not in flag)]


class Parser(argparse.ArgumentParser):
    """Exact flags only: `--num` is not `--num_processes`, and a script's own flags are left alone."""

    verb: Parser | None = None
    """The parser of the given verb."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print the error and the nearest known flag, without the usage of a hundred options."""
        from .files import did_you_mean

        asked = self if self.verb is None else self.verb  # argparse reports a verb's unknown words on the main parser
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            words = message[len(prefix) :].split()
            unknown = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
            message = f"{unknown} is unknown.{did_you_mean(unknown, tuple(asked.flags()))}"
        elif message.startswith("argument VERB: invalid choice: "):
            message += f".{did_you_mean(message.split(chr(39))[1], VERBS)}"
        self.exit(2, f"{asked.prog}: {message}\nSee {asked.prog} --help.\n")

    def flags(self) -> Iterator[str]:
        """Return every flag of this parser and of its verbs."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from verb.flags()


def verb_parser(subparsers: Any, verb: str, description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a verb: standalone, as published, or as a subcommand."""
    if subparsers is None:
        return Parser(f"accelerate {verb}", description=description or VERBS[verb])
    parser: argparse.ArgumentParser = subparsers.add_parser(verb, help=VERBS[verb], description=description)
    return parser


class _StoreExplicit(argparse.Action):
    """Store a value and mark it as explicit: explicit values override a configuration file, defaults do not."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if self.nargs == 0:
            values = self.const
        setattr(namespace, GIVEN, getattr(namespace, GIVEN, frozenset()) | {self.dest})
        setattr(namespace, self.dest, values)


class _AppendExplicit(_StoreExplicit):
    """Collect values of a repeated option."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        super().__call__(parser, namespace, [*(getattr(namespace, self.dest) or []), values], option_string)


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options of the table, group by group."""
    from .options import GROUPS

    by_group: dict[str, list[Option]] = {}
    for option in options:
        by_group.setdefault(option.group, []).append(option)
    for name in (group for group in GROUPS if group in by_group):
        group = parser.add_argument_group(name)
        for option in by_group[name]:
            _add(group, option)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.help.replace("%", "%%")
    from .options import spellings

    if option.switch:
        group.add_argument(
            *option.flags,
            dest=option.name,
            action=_StoreExplicit,
            nargs=0,
            const=True,
            default=option.default,
            help=text,
        )
        if option.negation is not None:
            group.add_argument(
                *spellings(option.negation), dest=option.name, action=_StoreExplicit, nargs=0, const=False,
                default=option.default, help=argparse.SUPPRESS,
            )  # fmt: skip
        return
    group.add_argument(
        *option.flags,
        dest=option.name,
        action=_AppendExplicit if option.repeated else _StoreExplicit,
        type=option.read,
        default=option.default,
        choices=option.choices,
        metavar=None if option.choices else _metavar(option),
        help=text,
    )


_METAVARS = {
    "main_process_ip": "ADDRESS",
    "nnodes": "MIN:MAX",
    "rdzv_conf": "KEY=VALUE,...",
    "role": "NAME",
    "tee": "STREAMS",
    "redirects": "STREAMS",
    "monitor_interval": "SECONDS",
    "grace_period": "SECONDS",
    "mpirun_hostfile": "FILE",
    "accelerators": "NAME:NUMBER",
    "storage": "SOURCE:PATH",
}


def _metavar(option: Option) -> str:
    """Return the metavar of an option: N for a number, unless its name says more."""
    last = option.name.split("_")[-1]
    if option.name in _METAVARS:
        return _METAVARS[option.name]
    if option.read is int and last not in ("rank", "port"):
        return "N"
    return "TRUE|FALSE" if getattr(option.read, "__name__", "") == "yes_no" else last.upper()


def explicit_options(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Return the options that were given; for a namespace from elsewhere, those that differ from their default."""
    given = getattr(args, GIVEN, None)
    values = {option.name: getattr(args, option.name, option.default) for option in options}
    if given is None:
        defaults = {option.name: option.default for option in options}
        return {name: value for name, value in values.items() if value != defaults[name]}
    return {name: value for name, value in values.items() if name in given}
