"""Checkpoints of DeepSpeed engines: saved, committed, and loaded on other world sizes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, DeepSpeedPlugin
from tests.ranks import RankFailure, ranks, run_on_ranks
from tests.sizes import at_night, cases

from ..small_transformer import loader, loss_of, model
from .engines import GLOBAL_BATCH, config, needs_fp16, run

pytest.importorskip("deepspeed", reason="pip install deepspeed: see .ci/install_deepspeed")


@pytest.mark.parametrize("stage", [at_night(0), at_night(1), at_night(2), 3])
def test_a_resumed_run_goes_on(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": stage, "accumulation": 2, "scheduled": True}
    whole = run_on_ranks(2, run, steps=12, save_to=str(tmp_path / "saved"), save_at=6, **options)[0]
    resumed = run_on_ranks(2, run, steps=6, load_from=str(tmp_path / "saved"), **options)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][6:], abs=1e-5)
    assert resumed["rates"] == whole["rates"]


@pytest.mark.parametrize(("stage", "there"), cases(gate=[(2, 1), (3, 2)], nightly=product((1, 2, 3), (1, 2))))
def test_a_run_goes_on_on_another_number_of_ranks(stage: int, there: int, tmp_path: Path) -> None:
    here = 3 - there
    whole = run_on_ranks(there, run, stage=stage, steps=12, save_to=str(tmp_path / "saved"), save_at=6)[0]
    resumed = run_on_ranks(here, run, stage=stage, steps=6, load_from=str(tmp_path / "saved"))[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][6:], abs=1e-5)


def test_another_stage_is_refused(tmp_path: Path) -> None:
    run_on_ranks(2, run, stage=2, steps=2, save_to=str(tmp_path / "saved"))
    with pytest.raises(RankFailure, match="model: ZeRO-3 here and ZeRO-2 in the checkpoint"):
        run_on_ranks(2, run, stage=3, steps=2, load_from=str(tmp_path / "saved"))
    with pytest.raises(RankFailure, match=r"missing in .*model \(model.safetensors\)"):
        run_on_ranks(2, run, stage=None, steps=2, load_from=str(tmp_path / "saved"))


@needs_fp16
def test_the_number_format_of_the_weights_is_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": 2, "mixed_precision": "fp16", "sections": {"fp16": {"enabled": True}}}
    whole = run_on_ranks(2, run, steps=8, save_to=str(tmp_path / "saved"), save_at=4, **options)[0]
    resumed = run_on_ranks(2, run, steps=4, load_from=str(tmp_path / "saved"), **options)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], abs=1e-5)


@pytest.mark.nightly
@ranks(2)
def test_a_save_in_the_background_is_of_its_moment(tmp_path: Path) -> None:
    for stage in (2, 3):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        net = model()
        net, optimizer, batches = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(4))
        inputs, targets = next(iter(batches))
        losses = []
        for number in range(4):
            if number == 2:
                accelerator.save_state(tmp_path / str(stage), wait=False)
            loss = loss_of(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        accelerator.load_state(tmp_path / str(stage))
        assert loss_of(net(inputs), targets).item() == losses[2]


@ranks(2)
def test_deepspeeds_own_tool_reads_the_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(3)))
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(tmp_path / "saved")
    if accelerator.is_main_process:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"), tag="pytorch_model")
        assert all(torch.equal(whole[name], value) for name, value in before.items())
        assert (tmp_path / "saved" / "zero_to_fp32.py").is_file()


def _save_until_killed(folder: str, stage: int, victim: int) -> None:
    """Save after every step; one rank is killed while files are being written over a committed checkpoint."""
    if os.environ["RANK"] == str(victim):
        threading.Thread(target=_kill_this_process_in_a_save, args=(Path(folder),), daemon=True).start()
    run(stage, steps=64, save_to=f"{folder}/saved", save_always=True)


def _kill_this_process_in_a_save(folder: Path) -> None:
    while not (folder / "saved" / "commit.json").exists():
        time.sleep(0.001)  # a thread that never waits would slow down the training
    while not any(folder.glob("saved.partial-*/saved/pytorch_model/*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL")
@pytest.mark.parametrize(("stage", "victim"), [at_night(2, 0), at_night(3, 1)])
def test_a_kill_in_the_middle_of_a_save_leaves_a_committed_checkpoint(stage: int, victim: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        run_on_ranks(2, _save_until_killed, folder=str(tmp_path), stage=stage, victim=victim)
    done = json.loads((tmp_path / "saved" / "commit.json").read_text())["step"]
    unbroken = run_on_ranks(2, run, stage=None, steps=done + 4)[0]
    resumed = run_on_ranks(2, run, stage=stage, steps=4, load_from=str(tmp_path / "saved"))[0]
    assert resumed["losses"] == pytest.approx(unbroken["losses"][done:], abs=1e-5)


LIES: dict[str, Any] = {
    "holds no facts": lambda state: [state],
    "no file of DeepSpeed's model states": lambda state: {"x": 1},
    "no configuration": lambda state: state | {"ds_config": {"zero_optimization": ["stage"]}},
    "is of many ranks": lambda state: state | {"dp_world_size": "many"},
    "no shapes of parameters": lambda state: state | {"param_shapes": [{"weight": "4"}]},
    "parameters differ": lambda state: state | {"param_shapes": [{"weight": torch.Size([1 << 40])}]},
    "more than data": lambda state: state | {"ds_config": sys.exit},
}


def load_lies(folder: str) -> list[str]:
    """Return what is said of a checkpoint whose model states hold each of the lies; the weights stay as they are."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
    net = model()
    net, _, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader(GLOBAL_BATCH))
    before = [param.detach().clone() for param in net.parameters()]
    (file,) = Path(folder).rglob("*model_states.pt")
    good = torch.load(file, weights_only=False)
    said = []
    for lie in LIES.values():
        torch.save(lie(good), file)
        for record in Path(folder).rglob("commit.json"):
            record.unlink()
        for record in Path(folder).rglob("progress.bin"):
            record.unlink()
        try:
            accelerator.load_state(folder)
            said.append("it was loaded")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert all(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    return said


def test_hostile_files_of_deepspeed_are_refused_before_its_own_reader_gets_them(tmp_path: Path) -> None:
    run_on_ranks(1, run, stage=2, steps=2, save_to=str(tmp_path / "saved"))
    said = run_on_ranks(1, load_lies, folder=str(tmp_path / "saved"))[0]
    assert [reason in text for reason, text in zip(LIES, said, strict=True)] == [True] * len(LIES), said
    assert not any("it was loaded" in text for text in said)
