"""`meshwright to-fsdp2`: convert a configuration file from FSDP1 to FSDP2."""

from __future__ import annotations

import argparse
from enum import Enum
from pathlib import Path
from typing import Any

from ..config.launch.files import load_mapping, write_config
from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..program import program_name

_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_NUMBERS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_LEFT_OUT = {
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_forward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_sync_module_states": "FSDP2 has no such step: fsdp_cpu_ram_efficient_loading says who loads",
    "fsdp_use_orig_params": "FSDP2 always keeps them",
}


class ConversionStatus(Enum):
    """Whether a file can be converted."""

    NOT_YET_FSDP2 = 0
    ALREADY_FSDP2 = 1
    NOT_FSDP = -1


def load_config(config_file: str) -> dict[str, Any]:
    """Return the contents of a file."""
    return load_mapping(Path(config_file))


def status_of(config: dict[str, Any]) -> ConversionStatus:
    """Return whether there is anything to convert. A file that does not say how it distributes may have a section."""
    if config.get("distributed_type", "FSDP" if config.get("fsdp_config") else None) != "FSDP":
        return ConversionStatus.NOT_FSDP
    is_2 = str(config.get("fsdp_config", {}).get("fsdp_version", 1)) == "2"
    return ConversionStatus.ALREADY_FSDP2 if is_2 else ConversionStatus.NOT_YET_FSDP2


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a file for FSDP2, and print the keys that were left out."""
    if status_of(config) is not ConversionStatus.NOT_YET_FSDP2:
        return config
    old = dict(config.get("fsdp_config") or {})
    new: dict[str, Any] = {"fsdp_version": 2}
    strategy = _sharding_strategy(old)
    for key, value in old.items():
        if key in _LEFT_OUT:
            print(f"{key}: left out, {_LEFT_OUT[key]}.")
        elif key != "fsdp_version":
            new[key] = value
    if strategy is not None:
        new["fsdp_reshard_after_forward"] = _RESHARDS[strategy]
    converted = {**config, "fsdp_config": new}
    if strategy is not None and strategy.startswith("HYBRID"):
        converted |= _replica_per_machine(config)
    return converted


def _sharding_strategy(section: dict[str, Any]) -> str | None:
    """Remove FSDP1's sharding strategy, which files have under either of two keys, and return its name."""
    found = section.pop("fsdp_sharding_strategy", None)
    reshard = str(section.get("fsdp_reshard_after_forward", "")).upper()
    if reshard in _NUMBERS.values():
        found = found or section.pop("fsdp_reshard_after_forward")
    if found is None:
        return None
    name = _NUMBERS.get(str(found).upper(), str(found).upper())
    if name == "NO_SHARD":
        raise ValueError("fsdp_sharding_strategy NO_SHARD shards nothing, which is DDP: write a file without FSDP.")
    if name not in _RESHARDS:
        raise ValueError(f"fsdp_sharding_strategy {found!r} is unknown: choose one of {', '.join(_RESHARDS)}.")
    return name


def _replica_per_machine(config: dict[str, Any]) -> dict[str, Any]:
    """Return the mesh of hybrid sharding: one replica per machine, sharded inside each."""
    machines, processes = int(config.get("num_machines") or 1), int(config.get("num_processes") or 0)
    if machines == 1:
        return {}
    if processes % machines or not processes:
        raise ValueError(
            f"HYBRID_SHARD keeps a copy per machine, and num_processes: {processes} cannot be divided by "
            f"num_machines: {machines}. Correct one of them."
        )
    sizes = {"dp_replicate_size": machines, "dp_shard_size": processes // machines}
    print(f"HYBRID_SHARD: became the section parallelism_config, with {machines} copies of the model.")
    return {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(subparsers, "to-fsdp2")
    parser.add_argument(*spellings("config_file"), required=True, metavar="FILE", help="the file to convert")
    parser.add_argument(*spellings("output_file"), metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="overwrite the file, or an existing output file")
    parser.set_defaults(run=to_fsdp2_command)
    return parser


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    to_fsdp2_command_parser(verbs)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a file, and print the path of the result."""
    try:
        target = _target(args)
        config = load_config(args.config_file)
        status = status_of(config)
        if status is ConversionStatus.NOT_YET_FSDP2:
            write_config(target, convert_config_to_fsdp2(config))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{program_name()} to-fsdp2: {error}") from error
    if status is ConversionStatus.NOT_YET_FSDP2:
        print(f"{target} uses FSDP2.")
    else:
        reason = "uses FSDP2 already" if status is ConversionStatus.ALREADY_FSDP2 else "does not use FSDP"
        print(f"{args.config_file} {reason}: nothing was written.")


def _target(args: argparse.Namespace) -> Path:
    if not Path(args.config_file).is_file():
        raise FileNotFoundError(f"There is no file {args.config_file}.")
    if args.output_file is None and not args.overwrite:
        raise ValueError("give --output_file, or --overwrite to write over the file itself.")
    target = Path(args.output_file or args.config_file)
    if args.output_file is not None and target.exists() and not args.overwrite:
        raise FileExistsError(f"{target} exists: give --overwrite to write over it.")
    return target


def main() -> None:
    """Run the verb as a program of its own."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args())
