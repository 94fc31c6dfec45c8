"""Checkpoints behind a URL: a real S3 server on loopback, one and two processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright import Accelerator, ProjectConfiguration
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.storage.remote import RemoteStore
from tests.ranks import run_on_ranks
from tests.ranks.pool import free_port

moto = pytest.importorskip("moto.server", reason="pip install moto[server] s3fs")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket; its server is found through the environment, as a real one is."""
    import boto3

    port = free_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs"
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def prepared(project_dir: str, total_limit: int | None = None) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    project = ProjectConfiguration(project_dir=project_dir, automatic_checkpoint_naming=True, total_limit=total_limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return accelerator, model, optimizer


def test_automatic_checkpoints_are_kept_found_and_loaded(bucket: str) -> None:
    accelerator, model, _ = prepared(f"{bucket}/automatic", total_limit=2)
    for _ in range(3):
        path = accelerator.save_state()
    assert path == f"{bucket}/automatic/checkpoints/checkpoint_2"
    store = RemoteStore(f"{bucket}/automatic/checkpoints")
    assert [found.name for found in store.found()] == ["checkpoint_1", "checkpoint_2"]
    weight = model.weight.detach().clone()
    other, other_model, _ = prepared(f"{bucket}/automatic")
    report = other.resume()
    assert report is not None
    assert report.path == path
    assert torch.equal(other_model.weight, weight)


def test_hooks_get_local_folders_with_the_name_of_the_checkpoint(bucket: str) -> None:
    seen: list[str] = []
    accelerator, _, _ = prepared(f"{bucket}/hooks")
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    accelerator.load_state(accelerator.save_state())
    assert [os.path.basename(folder) for folder in seen] == ["checkpoint_0"] * 2
    assert not any(os.path.exists(os.path.dirname(folder)) for folder in seen)


def test_replacing_one_is_a_change_of_its_record(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ProjectConfiguration()
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(2, 2))
    target = f"{bucket}/replaced/ckpt"
    accelerator.save_state(target)
    first = model.weight.detach().clone()

    def cut_off(self: RemoteStore, *_: object) -> None:
        raise OSError(5, "the line went dead")

    with torch.no_grad():
        model.weight.zero_()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "commit", cut_off)
        with pytest.raises(CheckpointError, match="the line went dead"):
            accelerator.save_state(target)
    accelerator.load_state(target)
    assert torch.equal(model.weight, first), "the old one counts until the record changes"
    with torch.no_grad():
        model.weight.fill_(7)
    accelerator.save_state(target)
    store = RemoteStore(f"{bucket}/replaced")
    assert len(store._entries(f"{store.root}/ckpt")) == 1, "what no record counts is gone"
    accelerator.load_state(target, verify="hash")
    assert model.weight.detach().eq(7).all()


def test_what_was_never_committed_is_not_loaded(bucket: str) -> None:
    store = RemoteStore(f"{bucket}/unfinished/checkpoints")
    store.fs.pipe_file(f"{store.root}/checkpoint_0/data-00000000/model.safetensors", b"half")
    accelerator, _, _ = prepared(f"{bucket}/unfinished")
    assert accelerator.resume() is None
    with pytest.raises((CheckpointError, FileNotFoundError)):
        accelerator.load_state(f"{bucket}/unfinished/checkpoints/checkpoint_0")


@pytest.mark.parametrize("content", [b"{", b'{"format": 2}', b"\xff", b"[" * 200_000])
def test_the_files_of_a_record_that_cannot_be_read_are_kept(bucket: str, content: bytes) -> None:
    accelerator, _, _ = prepared(f"{bucket}/poisoned", total_limit=9)
    store = RemoteStore(f"{bucket}/poisoned/checkpoints")
    good, damaged = accelerator.save_state(), accelerator.save_state().rsplit("/", 1)[-1]
    before = store._entries(f"{store.root}/{damaged}")
    store.fs.pipe_file(f"{store.root}/{damaged}/commit.json", content)
    report = accelerator.resume()
    assert report is not None
    assert report.path == good
    accelerator.save_state()
    assert store._entries(f"{store.root}/{damaged}") == before != []


def test_a_save_in_the_background_reaches_the_server(bucket: str) -> None:
    accelerator, model, _ = prepared(f"{bucket}/background")
    weight = model.weight.detach().clone()
    accelerator.save_state(wait=False)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.checkpointer.wait()
    accelerator.load_state()
    assert torch.equal(model.weight, weight)


def save_and_load_on_two(url: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    accelerator, model, _ = prepared(url)
    weight = accelerator.unwrap_model(model).weight.detach().clone()
    accelerator.save_state()
    with torch.no_grad():
        accelerator.unwrap_model(model).weight.zero_()
    report = accelerator.load_state(verify="hash")
    assert not report.differences
    assert torch.equal(accelerator.unwrap_model(model).weight, weight)


def test_two_processes_upload_their_parts(bucket: str, tmp_path: Path) -> None:
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_") or name.lower() == "no_proxy"}
    run_on_ranks(2, save_and_load_on_two, url=f"{bucket}/two", variables=variables)
    store = RemoteStore(f"{bucket}/two/checkpoints")
    record = store.found()[0].record
    assert record is not None
    assert {"random_states_0.pkl", "model.safetensors"} <= set(record.files)
    files = {Path(path).name for path in store.fs.ls(f"{store.root}/checkpoint_0/{record.folder}", detail=False)}
    assert {"random_states_1.pkl", "commit_1.json"} <= files
