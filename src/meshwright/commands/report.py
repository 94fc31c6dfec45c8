"""`meshwright report`: show runs of `log_with="jsonl"` as one HTML page, or live in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..program import program_name

DEFAULT_RUN_DIR = "runs"
_PAGE = "report.html"
_DESCRIPTION = (
    'Show runs that were logged with log_with="jsonl", as one HTML page with interactive charts, which needs no '
    "network and no other file, or with --live in the terminal."
)


def report_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "report", _DESCRIPTION)
    parser.add_argument(
        "run_dirs", nargs="*", metavar="RUN_DIR",
        help=f"folder of a run, or a parent folder of several runs; default: {DEFAULT_RUN_DIR}",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        *spellings("output"),
        metavar="FILE",
        help=f"where to write the page; default: {_PAGE} in the first RUN_DIR",
    )
    parser.add_argument(*spellings("open"), action="store_true", help="open the page in a browser")
    parser.add_argument(*spellings("live"), action="store_true", help="show the runs in the terminal while they run")
    parser.add_argument(
        *spellings("ranks"), action="store_true", help="with --live: the step time of every rank of the newest run"
    )
    parser.add_argument(
        *spellings("interval"), type=seconds, default=1.0, metavar="SECONDS",
        help="update interval with --live; default: 1",
    )  # fmt: skip
    parser.add_argument(
        *spellings("metric"), action="append", default=[], metavar="NAME",
        help="only metrics whose name contains this, or matches a pattern such as 'eval/*'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        *spellings("points"), type=_points, metavar="N",
        help="keep at most N points per curve, extremes first; default: 2000, fewer on pages with very many curves",
    )  # fmt: skip
    parser.set_defaults(run=report_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    report_command_parser(verbs)


def report_command(args: argparse.Namespace) -> None:
    """Write the page, or show the runs live."""
    from ..tools.report import ReportError

    paths = [Path(path) for path in args.run_dirs or [DEFAULT_RUN_DIR]]
    try:
        if args.ranks:
            _refuse_with_ranks(args)
            from ..tools.report.terminal.ranks import show_ranks

            show_ranks(paths, interval=args.interval)
        elif args.live:
            _refuse_with_live(args)
            from ..tools.report.terminal.live import show_live

            show_live(paths, interval=args.interval, wanted=args.metric, waits=not args.run_dirs)
        else:
            _write_page(args, paths)
    except ReportError as error:
        raise SystemExit(f"{program_name()} report: {error}") from None


def _refuse_with_ranks(args: argparse.Namespace) -> None:
    if not args.live:
        raise SystemExit(f"{program_name()} report: --ranks is for the terminal. Add --live.")
    _refuse_with_live(args)
    if args.metric:
        raise SystemExit(f"{program_name()} report: --ranks shows no metrics. Leave --metric out.")


def _refuse_with_live(args: argparse.Namespace) -> None:
    for name, given in (("output", args.output), ("open", args.open), ("points", args.points)):
        if given:
            raise SystemExit(
                f"{program_name()} report: --{name} is for the page, --live shows none. Leave one of them out."
            )


def _write_page(args: argparse.Namespace, paths: list[Path]) -> None:
    from ..tools.report.page.page import build_page
    from ..tools.report.runs.finding import read_runs

    began = time.monotonic()
    runs = list(read_runs(paths))
    page = build_page(runs, version=__version__, points=args.points, wanted=args.metric)
    file = _page_file(args.output, paths[0])
    _write_atomically(file, page)
    values = sum(len(series) for run in runs for series in run.scalars.values())
    size = file.stat().st_size
    amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    print(
        f"{file} ({amount}): {len(runs)} run{'s' * (len(runs) != 1)}, {values:,} values, "
        f"{time.monotonic() - began:.1f} s"
    )
    if args.open:
        import webbrowser

        if not webbrowser.open(file.resolve().as_uri()):
            print(f"{program_name()} report: no browser was found; open {file} yourself.", file=sys.stderr)


def _page_file(output: str | None, path: Path) -> Path:
    if output is None:
        return (path if path.is_dir() else path.parent) / _PAGE
    return Path(output) / _PAGE if Path(output).is_dir() else Path(output)


def _write_atomically(file: Path, text: str) -> None:
    """Write a temporary file and rename it, so that a browser never reads half a page."""
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".report-", suffix=".html")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # temporary files are private, a page is not
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise SystemExit(
            f"{program_name()} report: cannot write {file}: {reason}. Name another place with --output FILE."
        ) from None


def seconds(word: str) -> float:
    """Parse an update interval."""
    number = float(word)
    if not 0.05 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"{word} is not a number of seconds from 0.05 on")
    return number


def _points(word: str) -> int:
    points = int(word)
    if points < 8:
        raise argparse.ArgumentTypeError(f"{word} points are too few for a curve: use at least 8")
    return points


def main() -> None:
    """Run the verb as a program of its own."""
    report_command(report_command_parser().parse_args())
