"""Faults that training loops and libraries had in public: each is found, and the right module is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .verified import verify_all

SCRIPT = Path(__file__).with_name("faulty_script.py")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the script, and what is said of it."""

    mesh: str
    what: str
    module: str
    cause: str
    steps: int = 1
    changes_one_process: bool = False
    """The script is another one on one process, too, so that its runs there cannot be shared."""
    between: str = ""


FAULTS = {
    "missing_all_reduce": Fault(mesh="tp", steps=2, what="output", module="blocks.1.down", cause="not summed over the"),
    "divisor": Fault(mesh="ddp", what="gradient", module="", cause="the same wrong factor"),
    "mask": Fault(
        mesh="ddp",
        what="output",
        module="blocks.0",
        between="blocks.0.out",
        cause="code that depends on the rank",
        changes_one_process=True,
    ),
    "late_shift": Fault(mesh="cp", what="loss", module="", cause="labels that are shifted after the cut"),
    "bias_shard": Fault(mesh="tp", what="output", module="blocks.0.up", cause="bias is added or cut on every rank"),
    "untied": Fault(mesh="ddp", what="gradient", module="head", cause="are one parameter on one process, and two"),
    "dropout_seeds": Fault(mesh="tp", what="dropout", module="blocks.0.dropout", cause="draw different masks"),
    "clip_per_shard": Fault(
        mesh="fsdp", what="clipping", module="embed", cause="changed after the backward pass", changes_one_process=True
    ),
    "stale_buffer": Fault(
        mesh="fsdp",
        steps=2,
        what="output",
        module="temperature",
        cause="a buffer that differs between ranks",
        changes_one_process=True,
    ),
    "double_cut": Fault(mesh="ddp", what="input", module="", cause="The batch was cut twice"),
    "accumulation": Fault(mesh="ddp", what="loss", module="", cause="scaled by hand", changes_one_process=True),
    "router_loss": Fault(mesh="cp", what="loss", module="", cause="a router loss", changes_one_process=True),
    "norm": Fault(mesh="fsdp", what="norm", module="", cause="that of one rank's shards", changes_one_process=True),
    "rope_positions": Fault(mesh="cp", what="input", module="", cause="other samples"),
    # In public: accelerate#4177, trl#6843, Megatron-LM#1464 and transformers#48687.
    "window": Fault(
        mesh="cp",
        what="output",
        module="blocks.0",
        between="blocks.0.out",
        cause="a window that did not reach it",
        changes_one_process=True,
    ),
    "packed": Fault(
        mesh="cp",
        what="output",
        module="blocks.0",
        between="blocks.0.out",
        cause="documents or a window that did not reach it",
        changes_one_process=True,
    ),
    "attention_gradient": Fault(
        mesh="cp", what="input gradient", module="blocks.0", cause="although its output does not"
    ),
    "input_gradient": Fault(mesh="tp", what="input gradient", module="blocks.0.key", cause="not summed over the ranks"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Verify the script with every fault."""
    jobs = []
    for name, fault in FAULTS.items():
        shares = f"{name if fault.changes_one_process else 'right'} {fault.mesh in ('tp', 'cp')} {fault.steps}"
        jobs.append((shares, ["--num_processes", "2", "--steps", str(fault.steps), str(SCRIPT), name, fault.mesh]))
    return dict(zip(FAULTS, verify_all(jobs), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_module_is_named(name: str, results: dict[str, dict[str, Any]]) -> None:
    fault, result = FAULTS[name], results[name]
    assert not result.get("equal", True), result.get("error", result)
    first = result["first"]
    assert (first["what"], first["module"], first["between"]) == (fault.what, fault.module, fault.between)
    assert fault.cause in first["cause"]
    assert first["step"] == fault.steps
    if fault.what != "dropout":
        assert first["difference"] > 10 * first["rounding"] > 0


def test_masks_that_are_equal_on_data_ranks_are_noted_and_no_fault(results: dict[str, dict[str, Any]]) -> None:
    notes = results["divisor"]["notes"]
    assert [note["module"] for note in notes] == ["blocks.0.dropout"]
    assert "Ranks with different samples draw the same masks" in notes[0]["cause"]
