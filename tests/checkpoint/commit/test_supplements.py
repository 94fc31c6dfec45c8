"""Saves on the main process only, and what the other ranks add: see [Note: who commits] in supplements.py."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    PartialState,
    ProjectConfiguration,
    set_seed,
)
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.layout import COMMIT_FILE
from tests.ranks import run_on_ranks
from tests.sizes import cases
from tests.timing import limit

from ..runs import StampedRun
from .test_faults import flip_a_bit, truncate


def derived(report: Any) -> list[str]:
    return [change for change in report.changes if "generators there were derived" in change]


def save_on_main(folder: Path, target: str | None, wait: bool = True) -> tuple[int, list[str], list[str]]:
    run = StampedRun(None if target else folder)
    run.stamp(1)
    if run.accelerator.is_main_process:
        run.accelerator.save_state(target and folder / target, wait=wait)
    run.stamp(2)
    run.accelerator.wait_for_everyone()
    run.accelerator.checkpointer.wait()
    report = run.accelerator.load_state(target and folder / target, verify="hash")
    others = [] if run.accelerator.is_main_process else ["generator"]
    return run.stamp_of_all(but=others), derived(report), sorted(path.name for path in Path(report.path).iterdir())


@pytest.mark.parametrize(
    ("wait", "target"),
    cases(gate=[(True, "checkpoint-1"), (False, None)], nightly=product((True, False), (None, "checkpoint-1"))),
)
def test_the_main_process_saves_alone_and_all_load(wait: bool, target: str | None, tmp_path: Path) -> None:
    for stamp, changes, files in run_on_ranks(2, save_on_main, folder=tmp_path, target=target, wait=wait):
        assert stamp == 1
        assert len(changes) == 1
        assert "on rank 1:" in changes[0]
        assert "random_states_0.pkl" in files
        assert "random_states_1.pkl" not in files


def save_on_all(folder: Path, wait: bool, late: int) -> tuple[int, list[str], str]:
    run = StampedRun(folder)
    if run.accelerator.process_index == late == 1:
        while not any(folder.rglob(COMMIT_FILE)):  # rank 0 has committed without the other
            time.sleep(0.05)
    elif run.accelerator.process_index == late:
        time.sleep(2.5)
    run.stamp(1)
    path = run.accelerator.save_state(wait=wait)
    run.stamp(2)
    run.accelerator.checkpointer.wait()
    report = run.accelerator.load_state(verify="hash")
    assert report.path == path
    return run.stamp_of_all(), derived(report), path


@pytest.mark.parametrize(("wait", "late"), cases(gate=[(True, 0), (False, 1)], nightly=product((True, False), (0, 1))))
def test_ranks_that_join_add_their_own_files_to_the_same_checkpoint(wait: bool, late: int, tmp_path: Path) -> None:
    results = run_on_ranks(2, save_on_all, folder=tmp_path, wait=wait, late=late)
    assert {result[0] for result in results} == {1}
    assert [result[1] for result in results] == [[], []]
    folder = Path(results[0][2])
    record = json.loads((folder / COMMIT_FILE).read_text())
    assert ("random_states_1.pkl" in record["files"]) == (late == 0), "who comes in time is part of the commit"
    if late == 1:
        added = json.loads((folder / "commit_1.json").read_text())
        assert added["token"] == record["token"]
        assert list(added["files"]) == ["random_states_1.pkl"]


def mix(folder: Path) -> list[tuple[int, bool]]:
    """Save a best model on the main process and the last state on all, several times, under the same two names."""
    run = StampedRun(None)
    seen = []
    for number, _ in zip((1, 2, 3), run.loader, strict=False):
        run.accelerator.step = number
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder / "best")
        torch.manual_seed(100 * number + run.accelerator.process_index)
        run.accelerator.save_state(folder / "last")
        run.accelerator.wait_for_everyone()
        torch.manual_seed(0)
        report = run.accelerator.load_state(folder / "last")
        expected = torch.Generator().manual_seed(100 * number + run.accelerator.process_index).get_state()
        seen.append((run.accelerator.step, torch.equal(torch.get_rng_state(), expected) and not report.changes))
        run.accelerator.wait_for_everyone()
    return seen


def test_saves_of_one_rank_and_of_all_may_be_mixed(tmp_path: Path) -> None:
    assert run_on_ranks(2, mix, folder=tmp_path) == [[(1, True), (2, True), (3, True)]] * 2


def save_after_uneven_epochs(folder: Path) -> list[str]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.zeros(6, 1), batch_size=2))
    batches = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).mean())
            batches += 1
    assert batches == (2 if accelerator.is_main_process else 1)
    accelerator.save_state(folder / "ckpt")
    return derived(accelerator.load_state(folder / "ckpt"))


def test_ranks_find_their_save_although_they_had_different_numbers_of_batches(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_after_uneven_epochs, folder=tmp_path) == [[], []]


def save_into_own_folders(folder: Path, wait: bool, shards: bool, named: bool) -> tuple[str, list[str]]:
    """Save and load where every rank names its own folder, or has its own project."""
    own = folder / f"rank-{PartialState(cpu=True).process_index}"
    project = None if named else ProjectConfiguration(project_dir=str(own), automatic_checkpoint_naming=True)
    plugin = FullyShardedDataParallelPlugin() if shards else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    model = nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    target = own if named else None
    for seed in (1, 2):
        torch.manual_seed(seed + accelerator.process_index)
        path = accelerator.save_state(target, wait=wait)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    accelerator.wait_for_everyone()
    report = accelerator.load_state(target)
    assert report.path == path
    assert torch.equal(torch.get_rng_state(), expected)
    return path, report.changes


@pytest.mark.parametrize(
    ("wait", "shards", "named"),
    cases(
        gate=[(True, False, True), (True, True, True), (False, False, False)], nightly=product((True, False), repeat=3)
    ),
)
def test_ranks_that_name_different_folders_use_that_of_rank_0(
    wait: bool, shards: bool, named: bool, tmp_path: Path
) -> None:
    if shards and not named:
        pytest.skip("rank 0 finds the name, and every rank its project")
    name = "rank-0" if named else "rank-0/checkpoints/checkpoint_1"
    results = run_on_ranks(2, save_into_own_folders, folder=tmp_path, wait=wait, shards=shards, named=named)
    assert results == [(str(tmp_path / name), [])] * 2
    assert not (tmp_path / "rank-1").exists()


def save_on_main_where_names_differ(folder: Path) -> list[str]:
    """Save "best" on the main process and "last" on all, by the same function and at the same step."""
    run = StampedRun(None)
    state = run.accelerator

    def save(name: str) -> str:
        return state.save_state(folder / f"{name}-{state.process_index}")

    paths = [save("best")] if state.is_main_process else []
    paths.append(save("last"))
    state.wait_for_everyone()
    return paths


def test_a_save_on_the_main_process_is_not_taken_for_that_of_all(tmp_path: Path) -> None:
    last = str(tmp_path / "last-0")
    saved = run_on_ranks(2, save_on_main_where_names_differ, folder=tmp_path)
    assert saved == [[str(tmp_path / "best-0"), last], [last]]


def fail_on_main(folder: Path) -> str:
    run = StampedRun(None)
    rank = run.accelerator.process_index
    (folder / "file-0").touch()
    with pytest.raises(CheckpointError, match="file-0 is a file") as caught:
        run.accelerator.save_state(folder / f"file-{rank}")
    return str(caught.value)


def test_a_save_that_fails_on_rank_0_fails_where_the_folder_has_another_name(tmp_path: Path) -> None:
    assert len({text.partition(": ")[0] for text in run_on_ranks(2, fail_on_main, folder=tmp_path)}) == 1


@pytest.mark.parametrize(
    ("damage", "message"), [(truncate, "commit_1.json is damaged"), (Path.unlink, None)], ids=["truncated", "deleted"]
)
def test_a_damaged_record_of_a_rank_is_named_and_a_missing_one_reported(
    damage: Any, message: str | None, tmp_path: Path
) -> None:
    path = Path(run_on_ranks(2, save_on_all, folder=tmp_path, wait=True, late=1)[0][2])
    damage(path / "commit_1.json")
    for output in run_on_ranks(2, load_and_report, folder=path):
        assert (message or "not called, or not finished, on rank 1") in output


def test_a_damaged_file_of_a_rank_is_named(tmp_path: Path) -> None:
    path = Path(run_on_ranks(2, save_on_all, folder=tmp_path, wait=True, late=1)[0][2])
    flip_a_bit(path / "random_states_1.pkl")
    assert all("random_states_1.pkl is damaged" in output for output in run_on_ranks(2, load_and_report, folder=path))


def load_and_report(folder: Path) -> str:
    run = StampedRun(None)
    try:
        return str(run.accelerator.load_state(folder, verify="hash"))
    except CheckpointError as error:
        return str(error)


def what_a_hook_wrote(folder: Path) -> list[str]:
    run = StampedRun(None)
    rank = run.accelerator.process_index

    def write(models: Any, weights: Any, output_dir: str) -> None:
        Path(output_dir, f"own_{rank}.txt").write_text(f"rank {rank}")
        Path(output_dir, "same.txt").write_text(f"rank {rank}")
        assert Path(output_dir).name == "checkpoint-7"
        run.accelerator.wait_for_everyone()

    run.accelerator.register_save_state_pre_hook(write)
    folder = folder / "checkpoint-7"
    run.accelerator.save_state(folder)
    run.accelerator.load_state(folder, verify="hash")
    return [(folder / name).read_text() for name in ("own_0.txt", "own_1.txt", "same.txt")]


def test_hooks_run_on_every_rank_that_joins_and_their_files_are_kept(tmp_path: Path) -> None:
    assert run_on_ranks(2, what_a_hook_wrote, folder=tmp_path) == [["rank 0", "rank 1", "rank 0"]] * 2


def join_after_rank_0_exited(folder: Path) -> str:
    """Save on rank 0, which exits with the store before rank 1 joins."""
    run = StampedRun(None)
    run.stamp(4)
    if run.accelerator.is_main_process:
        return run.accelerator.save_state(folder / "ckpt")
    time.sleep(3)
    return run.accelerator.save_state(folder / "ckpt")


def test_a_rank_finds_the_commit_of_a_coordinator_that_has_left(tmp_path: Path) -> None:
    assert run_on_ranks(2, join_after_rank_0_exited, folder=tmp_path) == [str(tmp_path / "ckpt")] * 2
    assert (tmp_path / "ckpt" / "commit_1.json").is_file()


def save_shards_on_main(folder: Path) -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = ""
    if accelerator.is_main_process:
        try:
            accelerator.save_state(folder / "ckpt")
        except CheckpointError as error:
            output = str(error)
    accelerator.wait_for_everyone()
    return output


def test_shards_under_a_condition_on_the_rank_are_refused_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    output, _ = run_on_ranks(2, save_shards_on_main, folder=tmp_path)
    assert "save_state() was called on rank 0 only: the call is inside `if accelerator.is_main_process:`" in output
    assert "of test_supplements.py" in output
    assert "Move the call out of the condition" in output
    assert time.monotonic() - begun < limit(5), "no timeout was waited for"


# --- what scripts do after a load -------------------------------------------------------------------------------------


def train(folder: Path, idiom: str, save_at: int | None, stateful: bool = False) -> list[tuple[int, list[int]]]:
    """Train 2 epochs of 6 steps and return (epoch, samples); with no `save_at`, resume from step 4 by an idiom."""
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, split_batches=True),
        project_config=ProjectConfiguration(project_dir=str(folder)),
    )
    set_seed(7)
    model = nn.Linear(1, 1)
    loader = DataLoader(torch.arange(24.0).view(24, 1), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    first, skip, seen = 0, 0, []
    if save_at is None:
        set_seed(99)
        if idiom == "resume":
            accelerator.resume(folder / "checkpoint-4")
            first = loader.iteration
        else:
            accelerator.load_state(folder / "checkpoint-4")
            first, skip = divmod(4, len(loader)) if idiom != "begin the epoch again" else (0, 0)
    for epoch in range(first, 2):
        batches = loader
        if idiom == "skip_first_batches" and epoch == first and skip:
            batches = accelerator.skip_first_batches(loader, skip)
        for step, batch in enumerate(batches):
            if idiom == "continue" and epoch == first and step < skip:
                continue
            seen.append((epoch, accelerator.gather(batch).flatten().int().tolist()))
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if epoch * 6 + step + 1 == save_at and accelerator.is_main_process:
                accelerator.save_state(folder / "checkpoint-4")
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "idiom", ["continue", "skip_first_batches", "begin the epoch again", "resume", "stateful loader"]
)
def test_every_idiom_of_resuming_sees_the_samples_it_means_to_see(idiom: str, world_size: int, tmp_path: Path) -> None:
    stateful = idiom == "stateful loader"
    if stateful:
        pytest.importorskip("torchdata")
    whole = run_on_ranks(world_size, train, folder=tmp_path, idiom=idiom, save_at=4, stateful=stateful)[0]
    resumed = run_on_ranks(world_size, train, folder=tmp_path, idiom=idiom, save_at=None, stateful=stateful)[0]
    assert resumed == (whole if idiom == "begin the epoch again" else whole[4:])
