"""Published path of `accelerate estimate-memory` and of its parts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..inference.definitions import add_timm_hub_prefix, check_has_model, create_empty_model, verify_on_hub
from .estimate_memory import _estimates, estimate_command, estimate_command_parser, main

_UNKNOWN = -1


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row per dtype: its name, the bytes of the largest layer, of all weights, and the parts of training."""
    complete = estimate_command_parser().parse_args([args.model_name], argparse.Namespace(**vars(args)))
    return [
        [
            found.dtype,
            found.largest_layer,
            found.inference.weights,
            estimate_training_usage(found.training.weights, found.dtype)
            if found.training is not None
            else estimate_training_usage(0, found.dtype),
        ]
        for found in _estimates(complete)[1]
    ]


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return what training with Adam takes, from the bytes of the weights in fp32; -1 where nobody trains.

    Mixed precision keeps weights, gradients and both averages in fp32.
    """
    if mixed_precision not in ("float32", "float16", "bfloat16"):
        return dict.fromkeys(("model", "optimizer", "gradients", "step"), _UNKNOWN)
    return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Draw a table with a frame and a title."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    inner = sum(widths) + len(widths) - 1
    widths[-1] += max(0, len(title) - inner)
    inner = max(inner, len(title))

    def rule(left: str, joint: str, right: str) -> str:
        return left + joint.join("─" * width for width in widths) + right

    def line(row: Sequence[str]) -> str:
        return "│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│"

    head, *body = map(line, cells)
    return "\n".join(
        [
            rule("┌", "─", "┐"),
            f"│{title.center(inner)}│",
            rule("├", "┬", "┤"),
            head,
            rule("├", "┼", "┤"),
            *body,
            rule("└", "┴", "┘"),
        ]
    )


__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
]
