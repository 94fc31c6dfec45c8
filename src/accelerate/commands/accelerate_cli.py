"""Entry point of the `accelerate` command. Answers before torch could be imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import __version__
from . import env


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb."""
    parser = argparse.ArgumentParser(
        prog="accelerate",
        description="Take a PyTorch training loop from one process to many.",
        epilog="Start several processes with torchrun: torchrun --nproc_per_node 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"accelerate {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB")
    env.add_parser(verbs)
    parsed = parser.parse_args(arguments)
    if parsed.verb is None:
        parser.print_help()
        raise SystemExit(2)
    parsed.run(parsed)


if __name__ == "__main__":
    main()
