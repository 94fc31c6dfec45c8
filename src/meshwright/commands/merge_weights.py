"""`meshwright merge-weights`: merge the models of a sharded checkpoint into plain model files."""

from __future__ import annotations

import argparse
from typing import Any

from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..program import program_name


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "merge-weights")
    parser.add_argument("checkpoint_directory", help="a checkpoint, or its pytorch_model_fsdp_0 folder")
    parser.add_argument("output_path", help="folder for model.safetensors")
    parser.add_argument(*spellings("unsafe_serialization"), action="store_true", help="write pytorch_model.bin instead")
    parser.add_argument(
        *spellings("remove_checkpoint_dir"), action="store_true", help="delete the checkpoint after merging"
    )
    parser.set_defaults(run=merge_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    merge_command_parser(verbs)


def merge_command(args: argparse.Namespace) -> None:
    """Merge, and print the output path."""
    from ..checkpoint.parts.fsdp_files import merge_fsdp_weights

    try:
        written = merge_fsdp_weights(
            args.checkpoint_directory,
            args.output_path,
            safe_serialization=not args.unsafe_serialization,
            remove_checkpoint_dir=args.remove_checkpoint_dir,
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"{program_name()} merge-weights: {error}") from error
    print(f"The weights of {args.checkpoint_directory} are in {args.output_path}: {', '.join(written)}.")


def main() -> None:
    """Run the verb as a program of its own."""
    merge_command(merge_command_parser().parse_args())
