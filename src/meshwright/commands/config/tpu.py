"""`meshwright tpu-config`: run commands on every host of a TPU pod, by Google's `gcloud`."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from ...config.launch.files import find_config
from ...config.launch.options import spellings
from ...config.launch.parser import verb_parser
from ...program import program_name
from ...untrusted import printable, read_text

_FOLDER = "/usr/share"
_DEVELOPMENT = "git+https://github.com/huggingface/accelerate.git"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "tpu-config")
    add = parser.add_argument
    add(*spellings("config_file"), metavar="FILE", help="read what is left out from this file")
    add(*spellings("tpu_name"), metavar="NAME", help="name of the TPU")
    add(*spellings("tpu_zone"), metavar="ZONE", help="zone of the TPU")
    add(*spellings("use_alpha"), action="store_true", help="use `gcloud alpha`")
    add(*spellings("command_file"), metavar="FILE", help="file with commands, one in each line")
    add(
        "--command",
        action="append",
        nargs="+",
        metavar="COMMAND",
        help="commands, each one word for the shell: quote them",
    )
    add(*spellings("install_accelerate"), action="store_true", help="install accelerate on the hosts first")
    add(*spellings("accelerate_version"), default="latest", metavar="VERSION", help='a version, "latest" or "dev"')
    add("--debug", action="store_true", help="print the command instead of running it")
    parser.set_defaults(run=tpu_command_launcher)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    tpu_command_parser(verbs)


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands on every host, or print how that is done."""
    try:
        words = gcloud_command(args)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{program_name()} tpu-config: {error}") from error
    if args.debug:
        print(f"Running {printable(' '.join(words), 1 << 20)}")
        return
    try:
        subprocess.run(words, check=True)
    except FileNotFoundError as error:
        raise SystemExit(
            f"{program_name()} tpu-config: gcloud is not installed here: install Google's Cloud CLI."
        ) from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from error
    print("The commands ran on every host.")


def gcloud_command(args: argparse.Namespace) -> list[str]:
    """Return the command line that runs the commands on every host."""
    file = find_config(args.config_file)
    contents = {} if file is None else file.contents
    name, zone = (_named(option, args, contents) for option in ("tpu_name", "tpu_zone"))
    commands = _commands(args, contents)
    if not commands:
        raise ValueError("give a command to run on the hosts, --command, or a file with commands, --command_file.")
    if args.install_accelerate:
        commands = [_installing(args.accelerate_version), *commands]
    return [
        *("gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", name),
        *("--zone", zone, "--command", "; ".join([f"cd {_FOLDER}", *commands]), "--worker", "all"),
    ]


def _named(option: str, args: argparse.Namespace, contents: Any) -> str:
    value = getattr(args, option) or contents.get(option)
    if not value:
        raise ValueError(f"give --{option}, or write `{option}: ...` into the configuration file.")
    if not re.fullmatch(r"[\w.:/][\w.:/-]*", str(value)):  # gcloud would read `-…` as an option of its own
        raise ValueError(f"{option} is no name: {printable(str(value))!r}.")
    return str(value)


def _commands(args: argparse.Namespace, contents: Any) -> list[str]:
    """Return the commands: of a file, else of the command line, else of the configuration."""
    path = args.command_file or (None if args.command else contents.get("command_file"))
    if path:
        return [line for line in read_text(Path(path).expanduser(), "the command file").splitlines() if line]
    given = [command for commands in args.command or () for command in commands]
    return given or [str(command) for command in contents.get("commands") or ()]


def _installing(version: str) -> str:
    if version == "latest":
        return "pip install accelerate -U"
    return f"pip install {_DEVELOPMENT if version == 'dev' else shlex.quote(f'accelerate=={version}')}"
