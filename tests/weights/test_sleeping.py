"""What sleeps leaves the device, wakes bit by bit as the same objects, and trains on as if it had never slept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    OffloadConfig,
    step_in_backward,
)
from meshwright.config.combinations import Feature, refused_pairs
from meshwright.errors import UnsupportedSettingError
from meshwright.runtime.collectives.nested import tensors_of
from tests.parallel.small_transformer import loader, model
from tests.parallel.ways import GLOBAL_BATCH, WAYS, passes
from tests.ranks import run_on_ranks
from tests.simulated_accelerator import on_a_simulated_accelerator, run_on_a_simulated_accelerator
from tests.sizes import at_night

GATED = ("one", "ddp2", "fsdp2", "tp2")


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def tensors_in(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return parameters, gradients, buffers and optimizer state, in order."""
    params = list(net.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    return [*params, *grads, *net.buffers(), *tensors_of(list(optimizer.state.values()))]


def bits(tensors: list[Tensor]) -> list[str]:
    """Return a digest of each tensor, and those of the random numbers to come."""
    states = [torch.get_rng_state(), torch.accelerator.is_available() and torch.gpu.get_rng_state()]  # type: ignore[attr-defined]
    found = [own(tensor).cpu().clone().contiguous().reshape(-1) for tensor in tensors] + [
        each for each in states if each is not False
    ]
    return [hashlib.sha256(each.view(torch.uint8).numpy().tobytes()).hexdigest() for each in found]


def bytes_of(tensors: list[Tensor]) -> int:
    return sum({own(t).untyped_storage()._cdata: own(t).untyped_storage().nbytes() for t in tensors}.values())


class Buffered(nn.Module):
    """The small transformer with tied weights, a buffer that is a view of another one, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model(tied=True)
        self.net.positions.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("part", self.scale[2:4], persistent=False)

    def forward(self, *args: Any) -> Any:
        return self.net(*args) * self.scale[0]


def train(
    way: str,
    *,
    sleeps: bool,
    to: str = "host",
    cpu: bool = True,
    evaluate: bool = False,
    tied: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train three steps; between the passes and the step of the second one, sleep, or do not."""
    if "cp" in way:
        from tests.parallel.mesh.context import cpu_attention

        cpu_attention.register()
    accelerator = Accelerator(cpu=cpu, **{**WAYS[way][1](), **options})
    net: Any = Buffered() if tied else model()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, batches = accelerator.prepare(
        net, optimizer, loader(GLOBAL_BATCH // accelerator.strategy.num_data_ranks)
    )
    losses = []
    for step, (inputs, targets) in zip(range(3), batches, strict=False):
        losses.append(passes(accelerator, way, net, inputs, targets).detach())
        if step == 1 and sleeps:
            if evaluate:
                with torch.no_grad():
                    net(inputs)
            before = tensors_in(net, optimizer)
            digests, num_bytes = bits(before), bytes_of(before)
            with accelerator.asleep(net, optimizer, to=to) as sleeping:
                assert bytes_of(before) <= 0.05 * num_bytes
                assert 0.95 * num_bytes <= sleeping.num_bytes <= num_bytes  # counters of steps are on the host
            after = tensors_in(net, optimizer)
            assert [id(tensor) for tensor in after] == [id(tensor) for tensor in before]
            assert bits(after) == digests
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": [loss.item() for loss in losses], "end": bits(tensors_in(net, optimizer))}


@pytest.mark.parametrize("way", [*GATED, *(at_night(way) for way in WAYS if way not in GATED)])
def test_training_after_waking_is_that_of_a_run_that_never_slept(way: str) -> None:
    slept = run_on_ranks(WAYS[way][0], train, way=way, sleeps=True)
    assert slept == run_on_ranks(WAYS[way][0], train, way=way, sleeps=False)


@pytest.mark.parametrize("way", ["one", "fsdp2"])
def test_sleeping_on_disk_gives_the_same(way: str) -> None:
    slept = run_on_ranks(WAYS[way][0], train, way=way, sleeps=True, to="disk")
    assert slept == run_on_ranks(WAYS[way][0], train, way=way, sleeps=False)


@pytest.mark.parametrize("way", ["one", "ddp2", at_night("fsdp2")])
def test_ties_views_and_frozen_weights_are_moved_once_and_stay_shared(way: str) -> None:
    slept = run_on_ranks(WAYS[way][0], train, way=way, sleeps=True, tied=True)
    assert slept == run_on_ranks(WAYS[way][0], train, way=way, sleeps=False, tied=True)


def test_weights_that_an_evaluation_left_gathered_are_freed() -> None:
    slept = run_on_ranks(2, train, way="fsdp2", sleeps=True, evaluate=True)
    assert slept == run_on_ranks(2, train, way="fsdp2", sleeps=False)


# --- memory -----------------------------------------------------------------------------------------------------------


def freed_on_the_device(way: str, to: str, **options: Any) -> float:
    """Return the share of the allocated memory that is free while a trained model sleeps."""
    accelerator = Accelerator(**{**WAYS[way][1](), **options})
    device: Any = torch.gpu  # type: ignore[attr-defined]
    start = device.memory_allocated()
    net: Any = model(layers=4)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, batches = accelerator.prepare(
        net, optimizer, loader(GLOBAL_BATCH // accelerator.strategy.num_data_ranks)
    )
    for _, (inputs, targets) in zip(range(2), batches, strict=False):
        optimizer.zero_grad()
        loss = passes(accelerator, way, net, inputs, targets)
        optimizer.step()
    del loss, inputs, targets
    tensors = tensors_in(net, optimizer)
    digests = bits(tensors)
    awake = device.memory_allocated() - start
    with accelerator.asleep(net, optimizer, to=to):
        asleep = device.memory_allocated() - start
    assert bits(tensors_in(net, optimizer)) == digests
    assert [id(tensor) for tensor in tensors_in(net, optimizer)] == [id(tensor) for tensor in tensors]
    return 1 - asleep / awake


@pytest.mark.parametrize(
    ("way", "to"), [("one", "host"), ("one", "disk"), ("ddp2", "host"), ("fsdp2", "host"), ("tp2", "host")]
)
def test_95_percent_of_the_allocated_memory_are_freed_on_a_simulated_accelerator(way: str, to: str) -> None:
    options = (
        {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]} if way == "ddp2" else {}
    )
    found = run_on_a_simulated_accelerator(freed_on_the_device, world_size=WAYS[way][0], way=way, to=to, **options)
    assert min(found) >= 0.95, found


@pytest.mark.parametrize("way", GATED)
def test_training_after_waking_is_that_of_a_run_that_never_slept_on_a_simulated_accelerator(way: str) -> None:
    size = WAYS[way][0]
    slept = run_on_a_simulated_accelerator(train, world_size=size, way=way, sleeps=True, cpu=False)
    assert slept == run_on_a_simulated_accelerator(train, world_size=size, way=way, sleeps=False, cpu=False)


@on_a_simulated_accelerator
def test_a_device_without_room_keeps_everything_asleep_until_there_is_room_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(1024, 1024))
    before = net.weight.detach().cpu()
    device: Any = torch.gpu  # type: ignore[attr-defined]
    sleeping = accelerator.asleep(net)
    with device.memory_limit(1 << 20):
        with pytest.raises(RuntimeError, match=r"^Rank 0 cannot wake: .*nothing is lost"), sleeping:
            pass
        with pytest.raises(RuntimeError, match="is asleep"):
            net(torch.ones(1, 1024))
    sleeping.wake()
    assert torch.equal(net.weight.detach().cpu(), before)
    net(torch.ones(1, 1024, device="gpu"))


# --- calls ------------------------------------------------------------------------------------------------------------


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **options)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    return accelerator, net, optimizer


def calls_while_asleep(way: str) -> None:
    accelerator = Accelerator(cpu=True, **WAYS[way][1]())
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    inner = accelerator.unwrap_model(net)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with accelerator.asleep(net, optimizer):
        for call in (
            lambda: net(tokens),
            lambda: inner(tokens),
            lambda: inner.tokens(tokens),
            lambda: net.state_dict(),
            lambda: net.load_state_dict({}),
            lambda: list(accelerator.weights(net)),
            lambda: optimizer.step(),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: optimizer.state_dict(),
            lambda: accelerator.save_state("unused"),
        ):
            with pytest.raises(RuntimeError, match=r"is asleep: its tensors are away"):
                call()
        with pytest.raises(RuntimeError, match="is asleep already"), accelerator.asleep(net):
            pass
    loss = net(tokens).float().mean()
    accelerator.backward(loss)
    optimizer.step()


@pytest.mark.parametrize("way", GATED)
def test_calls_of_what_sleeps_are_refused_by_name_and_work_after_the_block(way: str) -> None:
    run_on_ranks(WAYS[way][0], calls_while_asleep, way=way)


def test_an_exception_wakes_and_waking_twice_does_nothing() -> None:
    accelerator, net, optimizer = prepared()
    before = bits(tensors_in(net, optimizer))
    with pytest.raises(KeyError), accelerator.asleep(net, optimizer) as sleeping:
        raise KeyError
    sleeping.wake()
    assert bits(tensors_in(net, optimizer)) == before
    net(torch.ones(1, 4))


def test_a_graph_from_before_the_block_is_differentiated_after_it() -> None:
    accelerator, net, optimizer = prepared()
    loss = net(torch.ones(1, 4)).sum()
    with accelerator.asleep(net, optimizer):
        pass
    accelerator.backward(loss)
    found = net[0].weight.grad.clone()  # type: ignore[index, union-attr]
    optimizer.zero_grad()
    accelerator.backward(net(torch.ones(1, 4)).sum())
    assert torch.equal(found, net[0].weight.grad)  # type: ignore[index, arg-type]


def test_a_full_disk_or_a_missing_folder_changes_nothing(tmp_path: Path) -> None:
    accelerator, net, optimizer = prepared()
    with pytest.raises(FileNotFoundError), accelerator.asleep(net, optimizer, to="disk", folder=tmp_path / "absent"):
        pass
    net(torch.ones(1, 4))
    with accelerator.asleep(net, optimizer, to="disk", folder=tmp_path):
        assert not list(tmp_path.iterdir()), "files have no name, so that nothing is left of them"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [other for one, other, _ in refused_pairs() if one is Feature.ASLEEP])
def test_features_that_were_not_tried_are_refused_before_anything_moves(
    other: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, net, optimizer = prepared()
    monkeypatch.setattr(Accelerator, "features", {other: other.value})
    before = bits(tensors_in(net, optimizer))
    with pytest.raises(UnsupportedSettingError, match="asleep"), accelerator.asleep(net, optimizer):
        pass
    assert bits(tensors_in(net, optimizer)) == before


def refused_in_a_run(name: str) -> None:
    if name == "offload":
        accelerator = Accelerator(cpu=True, offload=OffloadConfig())
        net = model()
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    elif name == "compiled":
        accelerator, net, optimizer = prepared()
        net = torch.compile(net, backend="eager")  # type: ignore[assignment]
    elif name == "early":
        accelerator = Accelerator(cpu=True)
        net = nn.Linear(4, 2)
        net, optimizer = accelerator.prepare(net, step_in_backward(torch.optim.SGD(net.parameters(), lr=0.1)))
    else:
        accelerator, net, optimizer = prepared(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True))
    with pytest.raises(UnsupportedSettingError, match=r"asleep\(\) with"), accelerator.asleep(net, optimizer):
        pass


@pytest.mark.parametrize("name", ["offload", "compiled", "early", "cpu_offload"])
def test_a_run_that_uses_them_is_refused(name: str) -> None:
    run_on_ranks(1, refused_in_a_run, name=name)


@pytest.mark.parametrize("kind", ["meta", "numpy", "shared", "sparse"])
def test_tensors_whose_memory_cannot_be_freed_are_refused_by_name(kind: str) -> None:
    accelerator, net, _ = prepared()
    buffer = {
        "meta": lambda: torch.empty(3, device="meta"),
        "numpy": lambda: torch.from_numpy(torch.ones(3).numpy().copy()),
        "shared": lambda: torch.ones(3).share_memory_(),
        "sparse": lambda: torch.ones(3).to_sparse(),
    }[kind]()
    net.register_buffer("odd", buffer)
    with pytest.raises(UnsupportedSettingError, match=r"asleep\(\) with odd cannot"), accelerator.asleep(net):
        pass
    net(torch.ones(1, 4))


def test_arguments_are_checked() -> None:
    accelerator, net, _ = prepared()
    with pytest.raises(ValueError, match="choose one of host, disk"):
        accelerator.asleep(net, to="cloud")
    with pytest.raises(ValueError, match="is for to='disk'"):
        accelerator.asleep(net, folder="/tmp")
    with pytest.raises(TypeError, match="not a dict"):
        accelerator.asleep({})  # type: ignore[arg-type]
