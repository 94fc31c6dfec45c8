"""`meshwright estimate-memory`: estimate the memory of a model without loading it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..config.launch.options import spellings
from ..config.launch.parser import verb_parser
from ..program import program_name

if TYPE_CHECKING:
    from torch import nn

    from ..inference.estimating.batches import ModelArguments
    from ..tools.estimate.estimate import MemoryEstimate, ProcessLayout

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
DEFAULT_DTYPES = ["float32", "float16", "int8", "int4"]


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the verb, standalone or as a subcommand of `meshwright`."""
    parser = verb_parser(
        subparsers,
        "estimate-memory",
        "Say how much memory a model takes for inference and for training with Adam. No weights are loaded.",
    )
    parser.add_argument(
        "model_name", nargs="?", help="a folder with a config.json, the file itself, or a name on the hub"
    )
    parser.add_argument(
        *spellings("model"), metavar="MODULE:CALLABLE", help="instead: a function that returns a torch.nn.Module"
    )
    parser.add_argument(
        *spellings("library_name"), choices=("timm", "transformers"), help="library that defines the model"
    )
    parser.add_argument(
        *spellings("dtypes"),
        nargs="+",
        choices=DTYPES,
        default=DEFAULT_DTYPES,
        metavar="DTYPE",
        help="number formats to show",
    )
    parser.add_argument(*spellings("trust_remote_code"), action="store_true", help="run the code of a model on the hub")
    batch = parser.add_argument_group("what it computes")
    batch.add_argument(*spellings("batch_size"), type=_positive, default=1, metavar="N", help="samples per process (1)")
    batch.add_argument(
        *spellings("sequence_length"), type=_positive, metavar="N", help="tokens per sample (512, or fewer)"
    )
    batch.add_argument(
        *spellings("inputs"),
        metavar="MODULE:CALLABLE",
        help="function that returns a batch (tensor, tuple or dict); may take batch_size and sequence_length",
    )
    batch.add_argument(*spellings("loss"), metavar="MODULE:CALLABLE", help="function of the outputs and the batch")
    batch.add_argument(
        *spellings("pure_precision"),
        action="store_true",
        help="train entirely in 16 bits; by default weights stay in fp32 (mixed precision)",
    )
    spread = parser.add_argument_group("where it computes")
    spread.add_argument(
        *spellings("num_processes"), type=_positive, default=1, metavar="N", help="number of processes (1)"
    )
    spread.add_argument(
        *spellings("fsdp"), action="store_true", help="shard the model; by default each process has a replica"
    )
    spread.add_argument(
        *spellings("no_reshard_after_forward"), action="store_true", help="keep gathered layers until the backward pass"
    )
    parser.add_argument(
        *spellings("levers"), action="store_true", help="show what saves memory in training, each traced; takes longer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.set_defaults(run=estimate_command)
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    estimate_command_parser(verbs)


def estimate_command(args: argparse.Namespace) -> None:
    """Estimate, and print tables or JSON."""
    from ..inference.estimating.definitions import DefinitionError
    from ..tools.estimate.program import NotTracedError

    try:
        model, estimates = _estimates(args)
    except (DefinitionError, NotTracedError) as error:
        raise SystemExit(f"{program_name()} estimate-memory: {error}") from error
    if args.json:
        print(json.dumps(_as_data(args, model, estimates), indent=2))
    else:
        print(_as_text(args, model, estimates))


def _estimates(args: argparse.Namespace) -> tuple[nn.Module, list[MemoryEstimate]]:
    from dataclasses import replace

    from ..inference.estimating.definitions import (
        DefinitionError,
        create_empty_model,
        load_function,
        model_from_function,
    )
    from ..tools.estimate.estimate import estimate

    if (args.model_name is None) == (args.model is None):
        raise DefinitionError("name one model: a folder or a name on the hub, or --model module:callable.")
    if args.loss is not None and args.inputs is None:
        raise DefinitionError("--loss is called with the batch of --inputs: give that too.")
    if args.model is not None:
        model = model_from_function(args.model)
    else:
        model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    batch, problem = _batch(args, model)
    function = None if args.loss is None else load_function(args.loss)
    loss = None if function is None else (lambda outputs, given: function(outputs, _as_given(given)))
    estimates = [
        estimate(
            model, dtype, batch=batch, loss=loss, spread=_spread(args), pure=args.pure_precision, levers=args.levers
        )
        for dtype in dict.fromkeys(args.dtypes)
    ]
    return model, [replace(found, left_out=problem or found.left_out) for found in estimates]


def _batch(args: argparse.Namespace, model: nn.Module) -> tuple[ModelArguments | None, str | None]:
    from ..inference.estimating.definitions import NoBatchError, batch_from_function, example_batch

    if args.inputs is not None:
        return batch_from_function(args.inputs, args.batch_size, args.sequence_length), None
    try:
        return example_batch(model, args.batch_size, args.sequence_length), None
    except NoBatchError as error:
        return None, str(error)


def _as_given(batch: ModelArguments) -> Any:
    """Return a batch in the form that the user's function returned."""
    if batch.kwargs:
        return dict(batch.kwargs)
    return batch.args[0] if len(batch.args) == 1 else batch.args


def _spread(args: argparse.Namespace) -> ProcessLayout:
    from ..tools.estimate.estimate import ProcessLayout

    return ProcessLayout(
        processes=args.num_processes, fsdp=args.fsdp, reshard_after_forward=not args.no_reshard_after_forward
    )


# --- output -----------------------------------------------------------------------------------------------------------


def _as_data(args: argparse.Namespace, model: nn.Module, estimates: list[MemoryEstimate]) -> dict[str, Any]:
    from dataclasses import asdict

    rows = []
    for found in estimates:
        row = asdict(found)
        row["inference"]["total"] = found.inference.total
        if found.training is not None:
            row["training"]["total"] = found.training.total
        for lever, data in zip(found.levers, row["levers"], strict=True):
            if lever.training is not None:
                data["training"]["total"] = lever.training.total
        rows.append(row)
    return {
        "model": args.model or args.model_name,
        "class": type(model).__name__,
        "parameters": sum(param.numel() for param in model.parameters()),
        "num_processes": args.num_processes,
        "fsdp": args.fsdp,
        "batch_size": args.batch_size,
        "estimates": rows,
    }


def _as_text(args: argparse.Namespace, model: nn.Module, estimates: list[MemoryEstimate]) -> str:
    parameters = sum(param.numel() for param in model.parameters())
    per = " per process" if args.num_processes > 1 else ""
    parts = [
        f"{args.model or args.model_name}: {type(model).__name__} with {parameters:,} parameters"
        + (f", on {args.num_processes} processes" if per else "")
        + (", sharded" if per and args.fsdp else ", a copy on each" if per else ""),
        _table(f"Inference{per}", *_inference_rows(args, estimates)),
    ]
    if any(found.training is not None for found in estimates):
        parts.append(_table(f"Training with Adam{per}", *_training_rows(args, estimates)))
    parts += [_levers(found) for found in estimates if found.levers]
    parts.append("\n".join(_notes(args, model, estimates)))
    return "\n\n".join(parts)


def _inference_rows(args: argparse.Namespace, estimates: list[MemoryEstimate]) -> tuple[list[str], list[list[str]]]:
    gathers = any(found.inference.gathered for found in estimates)
    headers = ["dtype", "largest layer", "weights", *(["gathered"] if gathers else []), "forward pass", "total"]
    rows = []
    for found in estimates:
        part = found.inference
        row = [found.dtype, _size(found.largest_layer), _size(part.weights)]
        row += [_size(part.gathered)] if gathers else []
        rows.append([*row, _size(part.forward), _size(part.total)])
    return headers, rows


def _training_rows(args: argparse.Namespace, estimates: list[MemoryEstimate]) -> tuple[list[str], list[list[str]]]:
    trained = [(found, found.training) for found in estimates if found.training is not None]
    copies = any(part.copies for _, part in trained)
    talks = args.num_processes > 1
    headers = ["dtype", "weights", "gradients", "optimizer", "activations"]
    headers += ["16-bit copies"] if copies else []
    headers += ["gathered" if args.fsdp else "DDP buckets"] if talks else []
    rows = []
    for found, part in trained:
        row = [found.dtype, *map(_size, (part.weights, part.gradients, part.optimizer, part.activations))]
        row += [_size(part.copies)] if copies else []
        row += [_size(part.communication)] if talks else []
        rows.append([*row, _size(part.temporaries), _size(part.total), part.peak_in])
    return [*headers, "temporaries", "total", "peak in"], rows


def _levers(found: MemoryEstimate) -> str:
    """Return a table of the levers that were traced, those that save most first, and why others are not possible."""
    rows = [
        [lever.line, _size(lever.training.total), _saved(lever.saves), lever.training.peak_in]
        for lever in sorted(found.levers, key=lambda lever: -lever.saves)
        if lever.training is not None
    ]
    title = f"The same in {found.dtype} with less memory, each line alone"
    table = _table(title, ["line", "total", "saves", "peak in"], rows)
    objections = [f"Not possible: {lever.line}\n  {lever.objection}" for lever in found.levers if lever.objection]
    return "\n".join([table, *objections])


def _saved(size: int) -> str:
    return _size(size) if size >= 0 else f"-{_size(-size)}"


def _notes(args: argparse.Namespace, model: nn.Module, estimates: list[MemoryEstimate]) -> list[str]:
    name = estimates[0].largest_layer_name or type(model).__name__
    return [
        *_activation_notes(args, estimates),
        *_guess_notes(estimates),
        *_mixed_precision_notes(estimates),
        *_quantization_notes(args, model, estimates),
        f"The largest layer is {name}. 1 GB is 10^9 bytes.",
    ]


def _activation_notes(args: argparse.Namespace, estimates: list[MemoryEstimate]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for found in estimates:
        if found.left_out is not None:
            reasons.setdefault(found.left_out, []).append(found.dtype)
    if not reasons:
        samples = f"{args.batch_size} sample{'s' * (args.batch_size > 1)}{' per process' * (args.num_processes > 1)}"
        kept = [(f.training.most_activations, f.dtype) for f in estimates if f.training is not None]
        most = " and ".join(f"{_size(size)} in {dtype}" for size, dtype in kept)
        return [
            f"The batch has {samples}.{f' Activations take at most {most}.' if kept else ''}",
            "The total is the peak, not a sum of upper bounds, and the parts are those at that moment.",
        ]
    notes = []
    for reason, dtypes in reasons.items():
        which = "The totals" if len(dtypes) == len(estimates) else f"The totals of {' and '.join(dtypes)}"
        notes.append(f"{which} are without activations: {reason}.")
    return notes


def _guess_notes(estimates: list[MemoryEstimate]) -> list[str]:
    guesses = dict.fromkeys(guess for found in estimates for guess in found.guesses)
    return [f"{guess}, and got one that stands for it." for guess in guesses]


def _mixed_precision_notes(estimates: list[MemoryEstimate]) -> list[str]:
    mixed = [f.dtype for f in estimates if f.training is not None and f.training.stored_in != f.training.computed_in]
    if not mixed:
        return []
    return [f"{' and '.join(mixed)}: mixed precision: in training weights, gradients and Adam's averages are float32."]


def _quantization_notes(args: argparse.Namespace, model: nn.Module, estimates: list[MemoryEstimate]) -> list[str]:
    from ..inference.quantized import layers_to_convert

    quantized = [found.dtype for found in estimates if found.training is None]
    if not quantized:
        return []
    if not layers_to_convert(model):
        return [f"{' and '.join(quantized)}: no linear layer can be quantised, so all is in float16."]
    return [
        f"{' and '.join(quantized)}: linear layers as bitsandbytes stores them, the rest in float16; for inference"
        f"{', and never sharded' if args.fsdp else ''}."
    ]


def _size(size: int | None) -> str:
    from ..inference.planning.device_map import readable

    return "not known" if size is None else readable(size)


def _table(title: str, headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    lines = [[headers[0].ljust(widths[0]), *map(str.rjust, headers[1:], widths[1:])]]
    lines += [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    rule = "  ".join("-" * width for width in widths)
    first, *others = ("  ".join(line) for line in lines)
    return "\n".join([title, first, rule, *others])


def main() -> None:
    """Run the verb as a program of its own."""
    estimate_command(estimate_command_parser().parse_args())
