"""Entry point of the `accelerate` command. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..config.launch.parser import VERBS, Parser

MODULE_OF = {
    "estimate-memory": ".models.estimate_memory",
    "merge-weights": ".models.merge_weights",
    "plan": ".models.plan",
    "report": ".views.report",
    "tpu-config": ".config.tpu",
    "verify-parallel": ".verify.parallel",
    "verify-resume": ".verify.resume",
    "watch": ".views.watch",
}
"""Where a verb is implemented, if not in a module of its own name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog="accelerate",
        description="Take a PyTorch training loop from one process to many.",
        epilog="Start here: accelerate launch --cpu --num_processes 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"accelerate {__version__}")
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
    parsed.run(parsed)


if __name__ == "__main__":
    main()
