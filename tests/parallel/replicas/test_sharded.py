"""`meshwright launch --survive` with HSDP: a replica that lost a process leaves whole, and comes back whole."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.replicas.sharded import refuse_settings
from tests.launching import run_accelerate
from tests.parallel.replicas.test_surviving import Run, assert_equal_to_one_process, assert_every_sample_once
from tests.sizes import sized

PROCESSES, SHARDS = 4, 2


def wait_for_all(run: Run) -> None:
    run.wait_until(lambda: len(run.members()) == PROCESSES or run.launcher.poll() is not None)


def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kills, seconds, steps = sized(gate=(2, 0.5, 100), nightly=(100, 15.0, 20_000))
    folder = tmp_path / "run"
    folder.mkdir()
    run, draw, made = Run(folder, steps, "zero_first", SHARDS), random.Random(1), 0
    while made < kills and run.launcher.poll() is None:
        if len(run.members()) == PROCESSES:
            victim = draw.randrange(PROCESSES)
            others = {rank: run.process(rank) for rank in range(PROCESSES) if rank // SHARDS != victim // SHARDS}
            run.kill(victim)
            made += 1
            time.sleep(seconds * (0.5 + draw.random()))
            assert {rank: run.process(rank) for rank in others} == others, "the other replica goes on in its processes"
        time.sleep(0.02)
    complaints = run.end()
    assert_equal_to_one_process(run, tmp_path / "one", steps, "zero_first")
    assert_every_sample_once(run, SHARDS * made)
    total = re.search(r"(\d+) replacements, ([\d.]+) s lost", complaints)
    assert total is not None
    assert made <= int(total[1]) <= made + 1, complaints
    assert made >= kills // 2, complaints
    print(f"{made} kills, {total[0]}")


def test_lost_shares_keep_exact_losses_and_accumulation(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 90
    folder.mkdir()
    run = Run(folder, steps, "items", SHARDS)
    run.kill(0)
    wait_for_all(run)
    run.kill(2, 3)  # both processes of a replica
    run.wait_until(lambda: run.process(3) is not None and not run.has_stepped(3))
    run.kill(3)  # a replacement that has not joined
    wait_for_all(run)
    complaints = run.end()
    assert "rank 0 was killed by SIGKILL; its replica (ranks 0, 1) leaves; 1 replica continues" in complaints
    assert "ranks 0, 1 have joined; 2 replicas train." in complaints
    assert "1 of 2 replicas go on" in complaints
    assert_equal_to_one_process(run, tmp_path / "one", steps, "items")
    assert_every_sample_once(run, 3 * SHARDS)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1, 4), "--survive with one replica"),
        ((4, 1), "--survive with FSDP and one process per replica"),
        ((2, 3), "--survive with dp_shard_size=3 and 4 processes per machine"),
    ],
)
def test_what_a_replica_cannot_do_is_refused_by_name(sizes: tuple[int, int], said: str) -> None:
    config = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    runtime: Any = SimpleNamespace(process=SimpleNamespace(local_world_size=4))
    with pytest.raises(UnsupportedSettingError, match=re.escape(said)):
        refuse_settings(runtime, config)


def test_a_checkpoint_of_shards_is_made_by_those_that_are_left(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sharded_saving.py")
    launched = run_accelerate(
        "launch", "--cpu", "--num_processes", 4, "--survive", script, tmp_path, directory=tmp_path
    )
    assert launched.code == 0, launched.complaints
    found = [json.loads(path.read_text()) for path in tmp_path.glob("found_*")]
    assert {end["processes"] for end in found} == {2, 4}, "the two checkpoints with a loss, and one without"
    assert all(end["is_equal"] for end in found)
