"""A parser whose help is short and whose errors name the nearest known flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from ...program import program_name

if TYPE_CHECKING:
    from .options import Option

VERBS = {
    "check": "look for mistakes in a script; prove a mesh or a resume",
    "compare": "run a script under accelerate 1.x and here, side by side",
    "config": "create the configuration file interactively",
    "dropin": "write a wheel to install as accelerate: for pins, closed images",
    "env": "print versions, devices and settings, for bug reports",
    "estimate-memory": "estimate the memory of a model without loading it",
    "launch": "start a script on one process or many",
    "merge-weights": "merge a sharded checkpoint into plain model files",
    "plan": "tell what a training run takes: memory, communication, time",
    "report": "show logged runs as an HTML page, or live in the terminal",
    "to-fsdp2": "convert a configuration file from FSDP1 to FSDP2",
    "test": "test this machine: processes, collectives, data and training",
    "tpu-config": "run commands on every host of a TPU pod, by gcloud",
    "watch": "show the step time of every rank: report --live --ranks",
}
GIVEN = "_given"
"""Attribute of the namespace: the names of the options that were given."""
_RARE = "rare"
"""Attribute of an action that only `--help-all` shows."""
_MANY = 8
"""From so many choices on, they are listed in the text of an option instead of beside its flag."""


class HelpFormatter(argparse.HelpFormatter):
    """Show one spelling per option, and only the options that most people use."""

    everything = False

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=35, width=80)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an action, unless it is left to `--help-all`."""
        if self.everything or not getattr(action, _RARE, False):
            super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.metavar is not None and action.choices and action.help:  # too many to stand beside the flag
            return f"{action.help}: {', '.join(map(str, action.choices))}"
        return action.help

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(_shown(action.option_strings)) or super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(_shown(action.option_strings))} {self._format_args(action, default)}"


class _FullHelpFormatter(HelpFormatter):
    everything = True


class _HelpAll(argparse.Action):
    """Print the help with every option."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        parser.formatter_class = _FullHelpFormatter
        parser.print_help()
        parser.exit()


def _shown(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if not (flag.startswith("--") and "-" in flag[2:] and "_" not in flag)]


class Parser(argparse.ArgumentParser):
    """Exact flags only: `--num` is not `--num_processes`, and a script's own flags are left alone."""

    verb: Parser | None = None
    """The parser of the given verb."""
    _words: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the words for `error`."""
        self._words = self._without_scripts_as_values(tuple(sys.argv[1:] if args is None else args))
        return super().parse_known_args(self._words, namespace)

    def _without_scripts_as_values(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Let an option whose value can be left out stand before the script: `--json train.py`."""
        optional = {
            flag: action.const for action in self._actions if action.nargs == "?" for flag in action.option_strings
        }
        for at, (word, after) in enumerate(pairwise(words)):
            if word.endswith(".py"):
                break
            if word in optional and after.endswith(".py"):
                return (*words[:at], f"{word}={optional[word]}", *words[at + 1 :])
        return words

    def error(self, message: str) -> NoReturn:
        """Print the error and the nearest known flag, without the usage of a hundred options."""
        asked = self if self.verb is None else self.verb  # argparse reports a verb's unknown words on the main parser
        prefix = "unrecognized arguments: "
        chosen = next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)
        if message.startswith(prefix):
            message = _unknown(message[len(prefix) :].split(), asked.flags())
        elif chosen is not None and message.startswith(f"argument {chosen.metavar}: invalid choice: "):
            flags = set(self.flags())
            unknown = [word for word in self._words if word.startswith("-") and word.partition("=")[0] not in flags]
            # After an unknown flag, its value is taken for the subcommand.
            message = _unknown(unknown or [message.split("'")[1]], flags if unknown else chosen.choices)
        self.exit(2, f"{asked.prog}: {message}\nSee {asked.prog} --help.\n")

    def flags(self) -> Iterator[str]:
        """Return every flag of this parser and of its verbs."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from verb.flags()


def _unknown(words: Sequence[str], known: Iterable[str]) -> str:
    """Name the unknown one of some words, and the nearest known one."""
    from .files import did_you_mean

    unknown = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    known = tuple(known)
    words = [word for word in known if not word.startswith("-")]
    others = f" There are {', '.join(words)}." if words and not unknown.startswith("-") else ""
    return f"{unknown} is unknown.{did_you_mean(unknown, known) or others}"


def verb_parser(subparsers: Any, verb: str, description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a verb: standalone, as published, or as a subcommand."""
    if subparsers is None:
        return Parser(f"{program_name()} {verb}", description=description or VERBS[verb])
    parser: argparse.ArgumentParser = subparsers.add_parser(verb, help=VERBS[verb], description=description)
    return parser


class _StoreExplicit(argparse.Action):
    """Store a value and mark it as explicit: explicit values override a configuration file, defaults do not."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        _store(namespace, self.dest, self.const if self.nargs == 0 else values)


def _store(namespace: argparse.Namespace, name: str, value: Any) -> None:
    setattr(namespace, GIVEN, getattr(namespace, GIVEN, frozenset()) | {name})
    setattr(namespace, name, value)


class _AppendExplicit(_StoreExplicit):
    """Collect values of a repeated option."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        super().__call__(parser, namespace, [*(getattr(namespace, self.dest) or []), values], option_string)


class StoreMesh(argparse.Action):
    """Store `--mesh dp=4,tp=2` as the options of the sizes, as if they were given one by one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Mark the option as given, and store the sizes, if there are any."""
        setattr(namespace, self.dest, True)
        if values != self.const:
            for name, size in self._sizes(values).items():
                _store(namespace, name, size)

    def _sizes(self, words: str) -> dict[str, int]:
        from .files import did_you_mean
        from .options import MESH_AXES

        sizes: dict[str, int] = {}
        for word in words.split(","):
            axis, _, size = (part.strip() for part in word.partition("="))
            if axis not in MESH_AXES:
                nearest = did_you_mean(axis, MESH_AXES, similarity=0.5)
                known = ", ".join(MESH_AXES)
                raise argparse.ArgumentError(self, f"axis {axis!r} is unknown.{nearest} The axes are {known}.")
            may_be_rest = MESH_AXES[axis] in (MESH_AXES["dp"], MESH_AXES["fsdp"])
            if not (size.isdecimal() and int(size)) and not (may_be_rest and size == "-1"):
                rest = ", or -1 for what is left" if may_be_rest else ""
                raise argparse.ArgumentError(
                    self, f"{word.strip()!r}: expected {axis}=SIZE, a number of processes, 1 or more{rest}."
                )
            if MESH_AXES[axis] in sizes:
                raise argparse.ArgumentError(self, f"{words!r}: the size of {axis!r} is given twice.")
            sizes[MESH_AXES[axis]] = int(size)
        return sizes


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], *, listed: Container[str] | None = None
) -> None:
    """Add options of the table, group by group.

    `listed` has the names of those that `--help` shows. `--help-all`, which is added then, shows the others too.
    """
    from .options import GROUPS, MESH_AXES, PARALLELISM

    if listed is not None:
        parser.add_argument("--help-all", dest="help", action=_HelpAll, nargs=0, help="show every option and exit")
    by_group: dict[str, list[Option]] = {}
    for option in options:
        by_group.setdefault(option.group, []).append(option)
    for name in (group for group in GROUPS if group in by_group):
        group = parser.add_argument_group(name)
        if name == PARALLELISM and "--mesh" not in parser._option_string_actions:  # a verb may have its own
            short = ", ".join(axis for axis in MESH_AXES if "_" not in axis)
            text = f"the mesh, as dp=4,tp=2; axes: {short}"
            group.add_argument("--mesh", action=StoreMesh, default=argparse.SUPPRESS, metavar="AXIS=N,...", help=text)
        for option in by_group[name]:
            if option.has_flag:
                setattr(_add(group, option), _RARE, listed is not None and option.name not in listed)


def _add(group: argparse._ArgumentGroup, option: Option) -> argparse.Action:
    text = option.help.replace("%", "%%")
    from .options import spellings

    if option.switch:
        action = group.add_argument(
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
        return action
    return group.add_argument(
        *option.flags,
        dest=option.name,
        action=_AppendExplicit if option.repeated else _StoreExplicit,
        type=option.read,
        default=option.default,
        choices=option.choices,
        metavar=None if option.choices and len(option.choices) < _MANY else _metavar(option),
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
