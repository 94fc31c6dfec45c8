"""Checkpoints that accelerate 1.15 wrote load here, and it loads ours."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator
from meshwright.checkpoint.commit.engine import CheckpointError
from tests import warm
from tests.ranks import run_on_ranks
from tests.ranks.pool import free_port

from . import published

WRITTEN = Path(__file__).with_name("written_by_1_15")
REFERENCE = os.environ.get("MESHWRIGHT_REFERENCE_PYTHON")
NAMES = {1: "one_process", 2: "two_processes"}
on_one_and_two = pytest.mark.parametrize("world_size", [1, 2])


def report_of(world_size: int, rank: int) -> Any:
    return json.loads((WRITTEN / f"{NAMES[world_size]}-{rank}.json").read_text(encoding="utf-8"))


@on_one_and_two
def test_a_checkpoint_of_1_15_loads_in_every_part(world_size: int) -> None:
    reports = run_on_ranks(world_size, published.load, folder=str(WRITTEN / NAMES[world_size]))
    assert reports == [report_of(world_size, rank) for rank in range(world_size)]
    assert reports[0]["tied"]


def test_a_checkpoint_of_1_15_is_only_read(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "one_process", tmp_path / "ckpt")
    published.load(str(tmp_path / "ckpt"))
    assert list(tmp_path.iterdir()) == [tmp_path / "ckpt"]
    assert len(list((tmp_path / "ckpt").iterdir())) == 6


def load_report(folder: str, strict: bool = True) -> Any:
    run = published.Run(seed=2)
    report = run.accelerator.load_state(folder, strict=strict)
    return report.missing, report.changes


def test_a_checkpoint_of_1_15_loads_on_another_number_of_processes() -> None:
    """The weights and all that is common; generators of new ranks are derived, and the report says so."""
    for missing, changes in run_on_ranks(3, load_report, folder=str(WRITTEN / "two_processes")):
        assert missing == []
        assert "saved on 2 processes, loaded on 3" in changes[0]


def test_what_a_checkpoint_of_1_15_lacks_is_listed(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "one_process", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "scheduler.bin").unlink()
    with pytest.raises(CheckpointError, match=r"missing in .*: scheduler \(scheduler\.bin\)"):
        published.load(str(tmp_path / "ckpt"))
    missing, _ = load_report(str(tmp_path / "ckpt"), strict=False)
    assert missing == ["scheduler (scheduler.bin)"]


def test_what_a_checkpoint_of_1_15_has_beyond_what_is_prepared_is_listed() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(published.Tied())
    with pytest.raises(CheckpointError, match="optimizer") as error:
        accelerator.load_state(WRITTEN / "one_process")
    assert all(
        name in str(error.value) for name in ("optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0")
    )
    report = accelerator.load_state(WRITTEN / "one_process", strict=False)
    assert len(report.extra) == 4


def test_automatic_checkpoints_of_1_15_are_found_and_numbered_on(tmp_path: Path) -> None:
    from meshwright import ProjectConfiguration

    shutil.copytree(WRITTEN / "one_process", tmp_path / "checkpoints" / "checkpoint_7")
    (tmp_path / "checkpoints" / "checkpoint_8").mkdir()  # begun and not finished: nothing is in it
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    report = accelerator.load_state(strict=False)
    assert report.path.endswith("checkpoint_7")
    assert accelerator.save_state().endswith("checkpoint_9"), "an empty folder keeps its number"


needs_reference = pytest.mark.skipif(REFERENCE is None, reason="set MESHWRIGHT_REFERENCE_PYTHON to accelerate 1.15's")


def reference(action: str, folder: Path, world_size: int) -> list[Any]:
    """Let accelerate 1.15 save or load on real processes, and return their reports."""
    assert REFERENCE is not None
    world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    reports = [folder.with_name(f"report-{rank}.json") for rank in range(world_size)]
    processes = [
        warm.Popen(
            [REFERENCE, published.__file__, action, str(folder), str(reports[rank])],
            env={**os.environ, **(world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {})},
        )
        for rank in range(world_size)
    ]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
    return [json.loads(report.read_text(encoding="utf-8")) for report in reports]


@needs_reference
@on_one_and_two
def test_1_15_loads_a_checkpoint_of_ours(world_size: int, tmp_path: Path) -> None:
    saved = run_on_ranks(world_size, published.save, folder=str(tmp_path / "ckpt"))
    assert reference("load", tmp_path / "ckpt", world_size) == saved


@needs_reference
@on_one_and_two
def test_a_checkpoint_that_1_15_writes_now_loads_here(world_size: int, tmp_path: Path) -> None:
    saved = reference("save", tmp_path / "ckpt", world_size)
    assert run_on_ranks(world_size, published.load, folder=str(tmp_path / "ckpt")) == saved


def test_the_files_have_the_published_names(tmp_path: Path) -> None:
    published.save(str(tmp_path / "ckpt"))
    ours = {path.name for path in (tmp_path / "ckpt").iterdir()}
    theirs = {path.name for path in (WRITTEN / "one_process").iterdir()}
    assert ours - theirs == {"commit.json", "progress.bin"}
    assert theirs <= ours
    for file in sorted(theirs - {"model.safetensors"}):
        mine = torch.load(tmp_path / "ckpt" / file, weights_only=False)
        other = torch.load(WRITTEN / "one_process" / file, weights_only=False)
        assert mine.keys() - {"names"} == other.keys(), file  # of the parameters, for pipelines; torch does not mind
