"""`ray_launcher` on a real Ray cluster of two nodes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import ray_launcher
from meshwright.errors import LaunchError
from meshwright.launch.notebook.failures import WorkerFailedError
from tests.tools.clusters.ray.cluster import HEAD, SECOND, TwoNodes, two_nodes
from tests.training import loss_of, make_data, make_model

STEPS, KILLED_AFTER = 8, 5
ONE_CPU = {"CPU": 1.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes(gpus=2) as both:
        yield both


def train(folder: str, kill_rank: int | None = None) -> tuple[list[torch.Tensor], list[int], dict[str, Any]]:
    """Train with a checkpoint after every second step; in the first attempt a rank is killed after some steps."""
    from torch.utils.data import DataLoader

    from meshwright import Accelerator, ProjectConfiguration, set_seed

    accelerator = Accelerator(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    set_seed(3)
    model = make_model(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch_size = 16 // accelerator.num_processes
    loader = DataLoader(make_data(256), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    report = accelerator.resume()
    done = 0 if report is None else 2 * (1 + max(int(path.name.split("_")[-1]) for path in checkpoints(folder)))
    steps = []
    for step, batch in enumerate(loader, start=done):
        if step == STEPS:
            break
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and step == KILLED_AFTER and accelerator.process_index == kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
        if step % 2 == 1:
            accelerator.save_state()
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    place = {name: os.environ[name] for name in names} | {"address": os.environ["MASTER_ADDR"]}
    return [param.detach().clone() for param in model.parameters()], steps, place


def checkpoints(folder: str) -> list[Path]:
    return list(Path(folder, "checkpoints").glob("checkpoint_*"))


def test_a_run_on_two_nodes_goes_on_from_its_checkpoint_after_a_kill(
    nodes: TwoNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spread: dict[str, Any] = {"num_workers": 2, "placement_strategy": "STRICT_SPREAD", "resources_per_worker": ONE_CPU}
    weights, steps, place = ray_launcher(train, (str(tmp_path / "killed"), 1), max_restarts=1, **spread)
    said = capfd.readouterr().err
    undisturbed, all_steps, _ = ray_launcher(train, (str(tmp_path / "undisturbed"),), **spread)
    assert place.pop("address") in (HEAD, SECOND)
    assert place == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    assert all_steps == list(range(STEPS))
    assert steps == list(range(4, STEPS))  # the checkpoint after step 3 is the newest one that is whole
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, undisturbed, strict=True))
    assert "rank 1 on node" in said
    assert "its process is gone; restarting (0 more after this)." in said


def fail(how: str) -> None:
    from meshwright import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1 and how == "exception":
        raise ValueError("the loss is nan")
    if accelerator.process_index == 1 and how == "crash":
        ctypes.string_at(0)
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    ("how", "sentences"),
    [
        ("exception", ["Rank 1 failed with ValueError: the loss is nan", 'raise ValueError("the loss is nan")']),
        ("crash", ["Rank 1 failed with killed by SIGSEGV", "ctypes"]),
    ],
)
def test_the_driver_gets_the_failure_of_the_rank_that_failed_first(
    nodes: TwoNodes, how: str, sentences: list[str]
) -> None:
    with pytest.raises(WorkerFailedError) as failed:
        ray_launcher(fail, (how,), num_workers=2, resources_per_worker=ONE_CPU)
    assert failed.value.rank == 1
    assert [sentence for sentence in sentences if sentence not in str(failed.value)] == []
    assert re.search(r"Rank 1( on node \S+)? failed first", str(failed.value))  # Ray may choose one node or two
    assert "\n\nRank 0 " in str(failed.value)


def size_and_devices() -> tuple[int, list[str | None]]:
    from meshwright import Accelerator, gather_object

    names = (os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], os.environ.get("ACCELERATE_USE_CPU"))
    return Accelerator().num_processes, gather_object([" ".join(map(str, names))])


def test_each_start_takes_as_many_workers_as_there_is_room_for(nodes: TwoNodes) -> None:
    elastic: dict[str, Any] = {"resources_per_worker": ONE_CPU, "elastic_timeout": 1}
    assert ray_launcher(size_and_devices, num_workers=(2, 5), **elastic)[0] == 4
    with pytest.raises(LaunchError, match=r"no room for 5 worker\(s\) with 1 CPU each .* It has 4 CPU"):
        ray_launcher(size_and_devices, num_workers=5, start_timeout=2, **elastic)


def test_local_rank_r_finds_its_gpu_at_place_r(nodes: TwoNodes) -> None:
    found = ray_launcher(size_and_devices, num_workers=2, resources_per_worker={"CPU": 1, "GPU": 1})
    assert found == (2, ["0,1 0 None", "0,1 1 None"])


SCRIPT = """
import os, sys, torch
from meshwright import Accelerator

accelerator = Accelerator()
accelerator.wait_for_everyone()
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and accelerator.process_index == 1:
    os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(3)
print("sum", accelerator.reduce(torch.ones(1)).item(), accelerator.mixed_precision, flush=True)
"""


def launch(nodes: TwoNodes, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "meshwright", "launch", "--ray", "--ray_address"]
    command += [nodes.address, "--num_processes", "2", "--ray_resources", "CPU=1", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_script_is_started_again_after_a_kill(nodes: TwoNodes, tmp_path: Path) -> None:
    ran = launch(nodes, tmp_path, "--max_restarts", "1", "--mixed_precision", "bf16", "train.py", "kill")
    assert ran.returncode == 0, ran.stderr
    assert "rank 1 failed first: killed by SIGKILL; restarting (0 more after this)." in ran.stderr
    assert ran.stdout.count("sum 2.0 bf16") == 2


def test_a_script_that_fails_gives_the_verdict_and_its_exit_code(nodes: TwoNodes, tmp_path: Path) -> None:
    ran = launch(nodes, tmp_path, "train.py", "exit")
    assert ran.returncode == 3, ran.stderr
    assert "rank 1 failed first: called sys.exit with code 3" in ran.stderr
    assert "collateral rank 0" in ran.stderr


def save_when_asked(folder: str) -> int:
    """Train until somebody takes the node away; then save, leave, and report the restart that follows."""
    from meshwright import Accelerator

    accelerator = Accelerator(project_dir=folder)
    accelerator.wait_for_everyone()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return len(list(Path(folder).glob("saved*")))
    Path(folder, "running").touch()
    while True:
        time.sleep(0.05)
        accelerator.save_if_preempted(f"{folder}/saved")


def test_a_node_that_is_drained_is_left_after_a_save(
    nodes: TwoNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def drain() -> None:
        while not (tmp_path / "running").exists():
            time.sleep(0.1)
        nodes.drain_second_node()

    thread = threading.Thread(target=drain)
    thread.start()
    spread: dict[str, Any] = {"placement_strategy": "SPREAD", "resources_per_worker": ONE_CPU}
    saved = ray_launcher(save_when_asked, (str(tmp_path),), num_workers=2, max_restarts=1, **spread)
    thread.join()
    said = capfd.readouterr().err
    assert saved == 1
    assert f"node {SECOND} is to be taken away: its workers get SIGTERM." in said
    assert "the workers saved and left, because a node is to be taken away; restarting" in said
