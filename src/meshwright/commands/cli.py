"""Entry point of the `meshwright` command. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import _meshwright_start as start

from .. import __version__
from ..config.launch.parser import VERBS, Parser
from ..door import DoorError, open_door
from ..launch.processes.worker import open_closed_streams
from ..program import pass_on_program_name, program_name

MODULE_OF = {
    "tpu-config": ".config.tpu",
}
"""Where a verb is implemented, if not in a module of its own name."""
_RUN_SCRIPTS = ("check", "estimate-memory", "launch", "plan")
"""The verbs that run code of the user, for which `import accelerate` is meshwright's."""
_GROUPS = {
    "run": ("launch",),
    "before a run": ("check", "plan", "compare"),
    "after a run": ("report",),
    "set up": ("config", "env", "dropin"),
}
"""What most people need; the other verbs are listed as `more`."""


class _CommandParser(Parser):
    """The parser of the command: its help is one line for each verb."""

    def format_help(self) -> str:
        """Return the verbs in groups."""
        grouped = [verb for verbs in _GROUPS.values() for verb in verbs]
        lines = [self.description or "", ""]
        for group, verbs in _GROUPS.items():
            lines += [f"{group}:", *(f"  {verb:<16}{VERBS[verb]}" for verb in verbs), ""]
        lines += ["more:", *(f"  {verb:<16}{text}" for verb, text in VERBS.items() if verb not in grouped), ""]
        lines += [f"{self.prog} VERB --help shows the options of a verb, {self.prog} --version the version.", ""]
        return "\n".join([f"usage: {self.prog} VERB ...", "", *lines, self.epilog or "", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb."""
    open_closed_streams()
    pass_on_program_name()
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _CommandParser(
        prog=program_name(),
        description="Take a PyTorch training loop from one process to many.",
        epilog=f"Start here: {program_name()} launch --cpu --num_processes 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", parser_class=Parser)
    typed = next((word for word in words if not word.startswith("-")), None)
    for verb, text in VERBS.items():
        if verb == typed:  # only the module of the given verb is imported
            import_module(MODULE_OF.get(verb, f".{verb.replace('-', '_')}"), __package__).add_parser(verbs)
        else:
            verbs.add_parser(verb, help=text)
    parser.verb = verbs.choices.get(typed or "")
    parsed = parser.parse_args(words)
    if parsed.verb is None:
        parser.print_help()
        raise SystemExit(2)
    if parsed.verb in _RUN_SCRIPTS and not start.stays_closed():
        try:
            open_door(getattr(parsed, "training_script", None))
        except DoorError as error:
            raise SystemExit(f"{parser.prog} {parsed.verb}: {error}") from None
    parsed.run(parsed)


if __name__ == "__main__":
    main()
