"""A checkpoint of any way of spreading a model loads in any other."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.formats.dcp import SafeReader
from tests.parallel.small_transformer import TP_PLAN, model
from tests.parallel.ways import WAYS, train
from tests.ranks import ranks
from tests.sizes import sized

STEPS_BEFORE = STEPS_AFTER = sized(gate=3, nightly=5)
LOADED = sized(
    gate=["one", "fsdp2", "fsdp2 whole", "tp2", "hsdp2x2", "fsdp2xtp2", "fsdp2xcp2", "pp2xfsdp2"], nightly=list(WAYS)
)


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    [losses] = train("one", steps=STEPS_BEFORE + STEPS_AFTER)
    return losses[STEPS_BEFORE:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save one checkpoint for every way."""
    folder = tmp_path_factory.mktemp("ways")
    for way in LOADED:
        train(way, steps=STEPS_BEFORE, save_to=str(folder / way))
    return {way: str(folder / way) for way in LOADED}


def sources_of(here: str) -> list[str]:
    """Return the ways whose checkpoints are loaded here: one that changes with `here`, at night all."""
    at = LOADED.index(here)
    return [LOADED[(at + shift) % len(LOADED)] for shift in sized(gate=[3], nightly=list(range(len(LOADED))))]


@pytest.mark.parametrize("here", LOADED)
def test_a_checkpoint_of_another_way_goes_on_here_as_if_nothing_had_happened(
    here: str, checkpoints: dict[str, str], uninterrupted: list[float]
) -> None:
    for there in sources_of(here):
        path = checkpoints[there]
        per_rank = train(here, steps=STEPS_AFTER, load_from=path)
        for losses in per_rank:
            assert losses == pytest.approx(uninterrupted, abs=1e-5), f"from {there} to {here}"


@pytest.mark.parametrize(("there", "here"), [("fsdp2", "one"), ("tp2", "fsdp2 whole"), ("fsdp2 whole", "fsdp4")])
def test_tied_weights_stay_tied_on_the_way(there: str, here: str, tmp_path: Path) -> None:
    [alone] = train("one", steps=STEPS_BEFORE + STEPS_AFTER, tied=True)
    train(there, steps=STEPS_BEFORE, tied=True, save_to=str(tmp_path / "saved"))
    per_rank = train(here, steps=STEPS_AFTER, tied=True, load_from=str(tmp_path / "saved"))
    for losses in per_rank:
        assert losses == pytest.approx(alone[STEPS_BEFORE:], abs=1e-5)


def test_the_files_are_the_published_ones(checkpoints: dict[str, str]) -> None:
    sharded = {path.name for path in Path(checkpoints["fsdp2"]).iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "commit.json"} <= sharded
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= set(
        os.listdir(f"{checkpoints['fsdp2']}/pytorch_model_fsdp_0")
    )
    whole = {path.name for path in Path(checkpoints["fsdp2 whole"]).iterdir()}
    assert {"model.safetensors", "optimizer.bin"} <= whole
    record = (Path(checkpoints["fsdp2"]) / "commit.json").read_text()
    assert "pytorch_model_fsdp_0/__1_0.distcp" in record


def prepared(**options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return accelerator, net, optimizer


@ranks(2)
def test_a_background_save_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    accelerator, net, _ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    before = {name: param.full_tensor().clone() for name, param in net.named_parameters()}
    accelerator.save_state(str(tmp_path / "saved"), wait=False)
    for param in net.parameters():
        param.data.mul_(0)
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(torch.equal(param.full_tensor(), before[name]) for name, param in net.named_parameters())


@ranks(2)
def test_two_models_and_their_optimizers_are_kept_apart(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    nets = [model(), model(layers=3)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1 * (i + 1)) for i, net in enumerate(nets)]
    *both, first, second = accelerator.prepare(*nets, *optimizers)
    for net, optimizer in zip(both, (first, second), strict=True):
        net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
    moments = [opt.state[opt.param_groups[0]["params"][0]]["exp_avg"].full_tensor().clone() for opt in (first, second)]
    accelerator.save_state(str(tmp_path / "saved"))
    for optimizer in (first, second):
        optimizer.param_groups[0]["lr"] = 7.0
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0)
    accelerator.load_state(str(tmp_path / "saved"))
    assert [opt.param_groups[0]["lr"] for opt in (first, second)] == [0.1, 0.2]
    for optimizer, moment in zip((first, second), moments, strict=True):
        assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].full_tensor(), moment)


@ranks(2)
def test_a_model_of_another_shape_is_refused_by_name_and_nothing_is_restored(tmp_path: Path) -> None:
    accelerator, *_ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_state(str(tmp_path / "saved"))
    other = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net = model(layers=3)
    net.head = torch.nn.Linear(16, 48, bias=False)
    net, _ = other.prepare(net, torch.optim.AdamW(net.parameters()))
    before = net.head.weight.full_tensor().clone()
    with pytest.raises(
        CheckpointError,
        match=r"lacks blocks\.2.*head\.weight has shape \(48, 16\) here and \(32, 16\) in the checkpoint",
    ):
        other.load_state(str(tmp_path / "saved"))
    assert torch.equal(net.head.weight.full_tensor(), before)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@ranks(2)
def test_a_table_of_contents_with_code_in_it_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.wait_for_everyone()
    contents = tmp_path / "saved" / "pytorch_model_fsdp_0" / ".metadata"
    if accelerator.is_main_process:
        size = contents.stat().st_size
        contents.write_bytes(pickle.dumps(Bomb()).ljust(size, b"."))
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="more than data"):
        accelerator.load_state(str(tmp_path / "saved"))
    assert not Path("exploded").exists()


@ranks(2)
def test_a_whole_state_is_gathered_on_the_main_process_and_saved_for_other_tools(tmp_path: Path) -> None:
    for options in (
        {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        {"parallelism_config": ParallelismConfig(tp_size=2, tp_plan=TP_PLAN)},
    ):
        accelerator, net, _ = prepared(**options)
        state = accelerator.get_state_dict(net)
        expected = model().state_dict()
        if accelerator.is_main_process:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
        else:
            assert state == {}
        accelerator.save_model(net, tmp_path / "model")
        accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        saved = load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in expected.items())


@ranks(2)
def test_hooks_may_take_a_sharded_model_over(tmp_path: Path) -> None:
    accelerator, *_ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    seen: list[Any] = []

    def hook(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
        seen.append(len(weights))
        weights.clear()

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(str(tmp_path / "saved"))
    assert seen == [1]
    assert not (tmp_path / "saved" / "pytorch_model_fsdp_0").exists()


@ranks(2)
def test_shards_on_separate_disks_are_refused(tmp_path: Path) -> None:
    from meshwright import ProjectConfiguration

    accelerator, *_ = prepared(
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        project_config=ProjectConfiguration(save_on_each_node=True),
    )
    with pytest.raises(ValueError, match="no host has all shards"):
        accelerator.save_state(str(tmp_path / "saved"))


@ranks(2)
def test_a_rank_that_cannot_write_its_shards_fails_the_save_on_every_rank(tmp_path: Path) -> None:
    from meshwright.checkpoint.parts import shards

    accelerator, *_ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_state(str(tmp_path / "saved"))
    works = shards.FileSystemWriter.write_data

    def fails(self: Any, plan: Any, planner: Any) -> Any:
        raise OSError(28, "No space left on device")

    try:
        if accelerator.process_index == 1:
            shards.FileSystemWriter.write_data = fails  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="No space left on device"):
            accelerator.save_state(str(tmp_path / "saved"))
    finally:
        shards.FileSystemWriter.write_data = works  # type: ignore[method-assign]
    accelerator.load_state(str(tmp_path / "saved"), verify="hash")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@ranks(2)
def test_a_flipped_bit_in_a_shard_is_found_before_anything_is_restored(tmp_path: Path) -> None:
    accelerator, net, _ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shard = tmp_path / "saved" / "pytorch_model_fsdp_0" / "__1_0.distcp"
        contents = bytearray(shard.read_bytes())
        contents[len(contents) // 2] ^= 1
        shard.write_bytes(contents)
    accelerator.wait_for_everyone()
    for param in net.parameters():
        param.data.fill_(3)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged"):
        accelerator.load_state(str(tmp_path / "saved"), verify="hash")
    assert all((param == 3).all() for param in net.parameters())


def test_a_table_of_contents_that_python_3_13_wrote_is_read_by_every_version(tmp_path: Path) -> None:
    contents = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta(checkpoint_id=tmp_path))
    written = pickle.dumps(contents, protocol=2)  # in which the names of modules are plain lines
    module = type(tmp_path).__module__
    (tmp_path / ".metadata").write_bytes(written.replace(f"c{module}\n".encode(), b"cpathlib._local\n"))
    assert b"pathlib._local" in (tmp_path / ".metadata").read_bytes()
    assert SafeReader(tmp_path).tensors == {}
