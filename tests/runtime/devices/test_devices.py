"""The library on an accelerator, with a simulated one: everything is where it belongs and computes as on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshwright import (
    Accelerator,
    PartialState,
    find_executable_batch_size,
    release_memory,
    set_seed,
    synchronize_rng_states,
)
from meshwright.errors import RuntimeConflictError
from meshwright.runtime.collectives.nested import leaves
from meshwright.runtime.devices import device as devices
from tests.ranks.worker import forget_everything
from tests.simulated_accelerator import on_a_simulated_accelerator, run_on_a_simulated_accelerator
from tests.simulated_accelerator.faults import with_an_allocator_of_its_own_kind
from tests.training import CLASSES, FEATURES, make_data, make_model, parameters_of


class Network(nn.Module):
    """Linear layers, and normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(features))
        return logits


def make_network() -> Network:
    torch.manual_seed(0)
    return Network()


def nested(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Collate samples into a batch with containers in containers."""
    features, labels = (torch.stack(part) for part in zip(*samples, strict=True))
    return {"features": features, "targets": (labels, [torch.ones(len(samples)), "words"])}


def make_loader(num_samples: int = 22, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(make_data(num_samples), batch_size=batch_size, collate_fn=nested, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def all_on_first_device(tensors: Any) -> bool:
    return {str(leaf.device) for leaf in leaves(tensors) if isinstance(leaf, Tensor)} == {"gpu:0"}


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the state that torch keeps beside the parameters: not the step counter, which some keep on the CPU."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and value is not None
    ]


# --- Placement --------------------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_the_device_is_the_one_torch_finds_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator()
    assert accelerator.device == torch.device("gpu"), "without an index, as published for one process"
    assert PartialState().default_device == torch.device("gpu")
    assert str(PartialState().distributed_type) == "DistributedType.NO"


@on_a_simulated_accelerator
def test_all_that_is_prepared_is_on_the_device_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator()
    model = make_network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    assert all_on_first_device(list(model.parameters()))
    assert all_on_first_device(list(model.buffers()))
    for batch in loader:
        assert all_on_first_device(batch)
        assert batch["targets"][1][1] == "words"
        accelerator.backward(model(batch["features"]).sum())
        optimizer.step()
    assert all_on_first_device([parameter.grad for parameter in model.parameters()])
    assert len(moments_of(optimizer)) == 2 * len(list(model.parameters()))
    assert all_on_first_device(moments_of(optimizer))
    assert all_on_first_device(accelerator.gather_for_metrics(batch))


@on_a_simulated_accelerator
def test_pinned_batches_and_workers_reach_the_device_on_a_simulated_accelerator() -> None:
    loader = Accelerator().prepare(make_loader(pin_memory=True, num_workers=1))
    batches = list(loader)
    assert all_on_first_device(batches)
    features = torch.cat([batch["features"] for batch in batches])
    assert torch.equal(features.cpu(), make_data(22).tensors[0])


@on_a_simulated_accelerator
def test_without_device_placement_everything_stays_on_a_simulated_accelerator() -> None:
    def devices_of(model: nn.Module, loader: DataLoader[Any]) -> tuple[str, str]:
        return str(next(model.parameters()).device), str(next(iter(loader))["features"].device)

    accelerator = Accelerator(device_placement=False)
    assert devices_of(*accelerator.prepare(make_network(), make_loader())) == ("cpu", "cpu")
    accelerator = Accelerator()
    prepared = accelerator.prepare(make_network(), make_loader(), device_placement=[False, None])
    assert devices_of(*prepared) == ("cpu", "gpu:0"), "one object's placement can be chosen alone"
    prepared = accelerator.prepare(make_network(), make_loader(), device_placement=[True, False])
    assert devices_of(*prepared) == ("gpu:0", "cpu")


@on_a_simulated_accelerator
def test_an_optimizer_that_stays_behind_is_not_moved_on_a_simulated_accelerator() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["SGD with momentum"](model.parameters())
    model(torch.randn(2, FEATURES)).sum().backward()
    optimizer.step()
    model, optimizer = Accelerator(device_placement=False).prepare(model, optimizer)
    assert {moment.device.type for moment in moments_of(optimizer)} == {"cpu"}
    optimizer.step()


@on_a_simulated_accelerator
def test_cpu_is_kept_to_when_asked_for_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cpu")
    model, loader = accelerator.prepare(make_network(), make_loader())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert next(iter(loader))["features"].device.type == "cpu"
    Accelerator()  # later ones join the running one, wherever it is
    assert PartialState().device == torch.device("cpu")


@on_a_simulated_accelerator
def test_cpu_after_the_device_is_a_conflict_that_says_why_on_a_simulated_accelerator() -> None:
    Accelerator()
    with pytest.raises(RuntimeConflictError, match=r"Rank 0 already runs on gpu; cpu=True came later(.|\n)*first"):
        Accelerator(cpu=True)
    PartialState._reset_state()
    assert Accelerator(cpu=True).device == torch.device("cpu")


@on_a_simulated_accelerator
def test_each_local_rank_has_its_device_on_a_simulated_accelerator() -> None:
    def chosen(local_rank: int, world_size: int = 2, cpu: bool = False, requested: str | None = None) -> torch.device:
        return devices.device_for(local_rank=local_rank, world_size=world_size, cpu=cpu, requested=requested)

    assert chosen(0) == torch.device("gpu", 0)
    assert chosen(1) == torch.device("gpu", 1)
    assert chosen(1, world_size=16) == torch.device("gpu", 1), "another host of the same run"
    assert chosen(0, world_size=1) == torch.device("gpu")
    assert chosen(5, world_size=8, cpu=True) == torch.device("cpu")
    assert chosen(0, requested="gpu:1") == torch.device("gpu", 1)
    with pytest.raises(RuntimeError, match=r"Local rank 2 on host \S+ has no device: 2 gpu device\(s\) are visible"):
        chosen(2, world_size=3)
    with pytest.raises(RuntimeError, match="Start at most 2 processes on this host, or pass cpu=True"):
        chosen(2, world_size=3)


# --- Training ---------------------------------------------------------------------------------------------------------


def train(optimizer_name: str, precision: str, *, cpu: bool, directory: Path, per_item: bool = False) -> dict[str, Any]:
    """Train with all that a loop can ask for; return what can be compared, on the CPU."""
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, gradient_accumulation_steps=3)
    model = make_network()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    set_seed(11)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, make_loader(shuffle=True), scheduler)
    losses, norms = [], []

    def step(batch: dict[str, Any]) -> None:
        labels, (weights, _) = batch["targets"]
        loss = nn.functional.cross_entropy(model(batch["features"]), labels, reduction="none")
        if per_item:
            accelerator.backward((loss * weights).sum(), num_items=len(labels))
        else:
            accelerator.backward((loss * weights).mean())
        if accelerator.sync_gradients:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                step(batch)

    model.eval()
    with torch.no_grad():
        predictions = [accelerator.gather_for_metrics(model(batch["features"])) for batch in loader]
    state = accelerator.get_state_dict(model)
    accelerator.save(state, directory / "state.pt")
    accelerator.save(state, directory / "state.safetensors", safe_serialization=True)
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else None
    results = {
        "losses": torch.cat(losses).cpu(),
        "norms": torch.stack(norms).cpu(),
        "predictions": torch.cat(predictions).cpu(),
        "moments": [moment.cpu() for moment in moments_of(optimizer)],
        "state": {name: value.cpu() for name, value in state.items()},
        "loaded": torch.load(directory / "state.pt", map_location="cpu"),
        "safely loaded": load_file(directory / "state.safetensors"),
        "learning rate": torch.tensor(scheduler.get_last_lr()),
        "scale": torch.tensor(0.0 if scale is None else scale),
        "skipped": torch.tensor(accelerator.optimizer_step_was_skipped),
    }
    forget_everything()
    return results


def assert_as_on_the_cpu(directory: Path, optimizer: str, precision: str, per_item: bool = False) -> None:
    (directory / "gpu").mkdir()
    (directory / "cpu").mkdir()
    here = train(optimizer, precision, cpu=False, directory=directory / "gpu", per_item=per_item)
    there = train(optimizer, precision, cpu=True, directory=directory / "cpu", per_item=per_item)
    assert here["losses"][-22:].mean() < here["losses"][:22].mean(), "it learns"
    tolerance = {"rtol": 0.0, "atol": 0.0} if precision == "no" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(here, there, equal_nan=True, **tolerance)
    assert torch.equal(here["safely loaded"]["head.weight"], here["state"]["head.weight"])


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_a_simulated_accelerator
def test_training_gives_what_the_cpu_gives_on_a_simulated_accelerator(
    tmp_path: Path, optimizer: str, precision: str
) -> None:
    assert_as_on_the_cpu(tmp_path, optimizer, precision)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@on_a_simulated_accelerator
def test_losses_per_item_give_what_the_cpu_gives_on_a_simulated_accelerator(tmp_path: Path, precision: str) -> None:
    assert_as_on_the_cpu(tmp_path, "AdamW", precision, per_item=True)


@on_a_simulated_accelerator
def test_a_count_of_items_may_be_on_the_device_on_a_simulated_accelerator() -> None:
    def gradients(count: Callable[[int, torch.device], Any]) -> list[Tensor]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(make_model())
        for size in (3, 5):
            with accelerator.accumulate(model):
                loss = model(torch.ones(size, FEATURES, device=accelerator.device)).square().sum()
                accelerator.backward(loss, num_items=count(size, accelerator.device))
        return [parameter.grad for parameter in model.parameters()]

    as_numbers = gradients(lambda size, device: size)
    as_tensors = gradients(lambda size, device: torch.tensor(size, device=device))
    assert all(torch.equal(one, other) for one, other in zip(as_numbers, as_tensors, strict=True))


@on_a_simulated_accelerator
def test_the_device_draws_the_random_numbers_of_training_on_a_simulated_accelerator() -> None:
    def dropped() -> Tensor:
        set_seed(5)
        model = Accelerator().prepare(make_model(dropout=0.5, seed=5))
        host_state = torch.get_rng_state()
        output: Tensor = model(torch.ones(3, FEATURES, device="gpu"))
        assert torch.equal(torch.get_rng_state(), host_state)
        return output

    assert torch.equal(dropped(), dropped())


@on_a_simulated_accelerator
def test_fp16_overflow_skips_the_step_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    before = parameters_of(model)
    accelerator.backward(model(torch.full((2, FEATURES), 60000.0, device="gpu")).square().sum())
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 32768.0
    assert all(torch.equal(now, then) for now, then in zip(parameters_of(model), before, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_a_simulated_accelerator
def test_autocast_casts_on_a_simulated_accelerator(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    accelerator = Accelerator(mixed_precision=precision)
    matrix = torch.ones(2, 2, device=accelerator.device)
    with accelerator.autocast():
        assert (matrix @ matrix).dtype == dtype
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32, "the CPU is not what computes here"
    assert (matrix @ matrix).dtype == torch.float32
    prepared = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    inside: list[torch.dtype] = []
    prepared[0].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    assert prepared(matrix).dtype == torch.float32
    assert inside == [dtype]
    assert prepared[0].weight.dtype == torch.float32


# --- Optimizers and the parameters they were made for -----------------------------------------------------------------


@pytest.mark.parametrize("conversion", ["replaces", "swaps"])
@pytest.mark.parametrize("order", ["one call", "model first", "optimizer first", "after a step on the cpu"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_a_simulated_accelerator
def test_an_optimizer_made_before_prepare_trains_the_model_on_a_simulated_accelerator(
    kind: str, order: str, conversion: str
) -> None:
    """Module.to puts new parameters in the place of the old ones, and the optimizer holds the old ones."""
    batch = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    expected_model = make_model()
    expected_optimizer = OPTIMIZERS[kind](expected_model.parameters())
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    if order == "after a step on the cpu":
        step(expected_model, expected_optimizer, batch)
        step(model, optimizer, batch)
    made_before = list(model.parameters())

    accelerator = Accelerator()
    torch.__future__.set_swap_module_params_on_conversion(conversion == "swaps")
    try:
        if order == "model first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    is_same = [old is new for old, new in zip(made_before, model.parameters(), strict=True)]
    assert is_same == [conversion == "swaps"] * len(made_before)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]

    for _ in range(3):
        step(expected_model, expected_optimizer, batch)
        step(model, optimizer, batch.to("gpu"))
    assert all_on_first_device(moments_of(optimizer))
    for parameter, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), expected)


@on_a_simulated_accelerator
def test_parameters_listed_before_prepare_are_clipped_on_a_simulated_accelerator() -> None:
    accelerator = Accelerator()
    model = make_model()
    listed = list(model.parameters())
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, FEATURES, device="gpu")).sum())
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    torch.testing.assert_close(accelerator.clip_grad_norm_(listed, 1e-3), norm)
    assert torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])) < 1.1e-3
    accelerator.clip_grad_value_(listed, 2.0**-20)
    accelerator.clip_grad_value_(listed[0], 2.0**-24)
    assert [gradient.abs().max().item() for gradient in gradients] == [2.0**-24, *[2.0**-20] * (len(listed) - 1)]


@on_a_simulated_accelerator
def test_parameter_groups_and_tied_weights_survive_the_move_on_a_simulated_accelerator() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    extra = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters(), "lr": 0.1}, {"params": extra.parameters(), "lr": 0.2}], lr=1.0
    )
    prepared_model, prepared_extra, optimizer = Accelerator().prepare(model, extra, optimizer)
    assert prepared_model[0].weight is prepared_model[1].weight
    first, second = optimizer.param_groups
    assert first["params"] == [prepared_model[0].weight]
    assert [id(p) for p in second["params"]] == [id(p) for p in prepared_extra.parameters()]
    assert (first["lr"], second["lr"]) == (0.1, 0.2)


@on_a_simulated_accelerator
def test_an_optimizer_state_from_the_cpu_loads_onto_a_simulated_accelerator() -> None:
    source = make_model()
    saved = OPTIMIZERS["AdamW"](source.parameters())
    source(torch.ones(1, FEATURES)).sum().backward()
    saved.step()
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model, optimizer = Accelerator().prepare(model, optimizer)
    optimizer.load_state_dict(saved.state_dict())
    assert all_on_first_device(moments_of(optimizer))
    model(torch.ones(1, FEATURES, device="gpu")).sum().backward()
    optimizer.step()


# --- Random numbers ---------------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_set_seed_seeds_every_device_on_a_simulated_accelerator() -> None:
    set_seed(21)
    drawn = [torch.randn(3, device=f"gpu:{index}") for index in range(2)]
    torch.randn(3)
    set_seed(21)
    assert all(torch.equal(torch.randn(3, device=before.device), before) for before in drawn)
    set_seed(22)
    assert not torch.equal(torch.randn(3, device="gpu:0"), drawn[0])


@on_a_simulated_accelerator
def test_generator_state_of_a_device_can_be_kept_on_a_simulated_accelerator() -> None:
    device = Accelerator().device
    state = devices.get_device_rng_state(device)
    other = devices.get_device_rng_state(torch.device("gpu", 1))
    drawn = torch.randn(3, device=device)
    devices.set_device_rng_state(state, device)
    assert torch.equal(torch.randn(3, device=device), drawn)
    assert torch.equal(devices.get_device_rng_state(torch.device("gpu", 1)), other)


def test_a_device_with_one_generator_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mps has no manual_seed_all."""
    seeds: list[int] = []
    monkeypatch.setattr(devices, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    devices.seed_all(3)
    assert seeds == [3]


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_comes_back_to(num_bytes: int) -> bool:
    """Wait for the device's autograd thread, which lets go of a graph some moments after `backward` has returned."""
    deadline = time.monotonic() + 5.0
    while torch.gpu.memory_allocated() > num_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    return torch.gpu.memory_allocated() <= num_bytes


@on_a_simulated_accelerator
def test_freed_memory_is_given_back_on_a_simulated_accelerator() -> None:
    with with_an_allocator_of_its_own_kind():  # as on MPS and NPUs: `torch.accelerator.empty_cache` raises
        free_memory_and_count()


def free_memory_and_count() -> None:
    gc.collect()
    before = torch.gpu.memory_allocated()
    accelerator = Accelerator()
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    for batch in loader:
        accelerator.backward(model(batch["features"]).sum())
        optimizer.step()
    assert torch.gpu.memory_allocated() > before
    del batch
    assert torch.gpu.calls["empty_cache"] == 0
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert (model, optimizer, loader) == (None, None, None)
    assert torch.gpu.calls["empty_cache"] == 1
    assert memory_comes_back_to(before)
    release_memory()
    devices.clear_device_cache()
    assert torch.gpu.calls["empty_cache"] == 3


@on_a_simulated_accelerator
def test_a_batch_size_that_fits_is_found_on_a_simulated_accelerator() -> None:
    gc.collect()
    before = torch.gpu.memory_allocated()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def train_with(batch_size: int) -> int:
        tried.append(batch_size)
        assert memory_comes_back_to(before), "what the last try left behind is gone"
        model, loader = Accelerator().prepare(make_model(), make_loader(64, batch_size))
        for batch in loader:
            model(batch["features"]).sum().backward()
        return batch_size

    with torch.gpu.memory_limit(before + 24_000):
        fitting = train_with()
    assert 0 < fitting < 64
    assert tried == sorted(set(tried), reverse=True)
    assert torch.gpu.calls["empty_cache"] == len(tried), "once before each try"


# --- Several processes ------------------------------------------------------------------------------------------------


def places_of_a_rank() -> dict[str, Any]:
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    if rank == 1:
        accelerator.set_trigger()
    metrics = [
        accelerator.gather_for_metrics(batch["features"].sum(dim=1))
        for batch in accelerator.prepare(make_loader(7, batch_size=2))
    ]
    torch.gpu.manual_seed(rank)
    synchronize_rng_states(["torch", "gpu"])
    return {
        "device": str(device),
        "current": torch.accelerator.current_device_index(),
        "distributed type": str(accelerator.distributed_type),
        "gathered": accelerator.gather(torch.full((2,), rank, device=device)).tolist(),
        "reduced": accelerator.reduce({"sum": torch.ones(1, device=device)}, "sum")["sum"].tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(1 + rank, device=device)).tolist(),
        "objects": accelerator.gather_for_metrics([f"from rank {rank}"], use_gather_object=True),
        "triggered": accelerator.check_trigger(),
        "devices of metrics": {str(metric.device) for metric in metrics},
        "metrics": torch.cat(metrics).cpu(),
        "drawn": torch.randn(2, device=device).tolist(),
    }


def test_ranks_work_together_on_simulated_accelerators() -> None:
    zero, one = run_on_a_simulated_accelerator(places_of_a_rank, world_size=2)
    assert [rank["device"] for rank in (zero, one)] == ["gpu:0", "gpu:1"]
    assert [rank["current"] for rank in (zero, one)] == [0, 1]
    assert [rank["padded"] for rank in (zero, one)] == [[1.0, 0.0], [1.0, 1.0]]
    assert [rank["devices of metrics"] for rank in (zero, one)] == [{"gpu:0"}, {"gpu:1"}]
    for rank in (zero, one):
        assert rank["distributed type"] == "DistributedType.MULTI_GPU"
        assert rank["gathered"] == [0, 0, 1, 1]
        assert rank["reduced"] == [2.0]
        assert rank["objects"] == ["from rank 0", "from rank 1"]
        assert rank["triggered"] is True
        assert torch.equal(rank["metrics"], make_data(7).tensors[0].sum(dim=1)), "every sample once"
    assert zero["drawn"] == one["drawn"], "rank 0's generator for all"


def parameters_after_training(cpu: bool, precision: str) -> list[Tensor]:
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    set_seed(4)
    loader = make_loader(21, batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["features"]), batch["targets"][0], reduction="sum")
            accelerator.backward(loss, num_items=len(batch["features"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    parameters = parameters_of(model)
    assert {str(parameter.device) for parameter in parameters} == {
        "cpu" if cpu else f"gpu:{accelerator.local_process_index}"
    }
    return [parameter.cpu() for parameter in parameters]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_data_parallel_training_gives_what_the_cpu_gives_on_simulated_accelerators(precision: str) -> None:
    zero, one = run_on_a_simulated_accelerator(parameters_after_training, world_size=2, cpu=False, precision=precision)
    expected, _ = run_on_a_simulated_accelerator(parameters_after_training, world_size=2, cpu=True, precision=precision)
    for parameter, of_other_rank, on_cpu in zip(zero, one, expected, strict=True):
        assert torch.equal(parameter, of_other_rank)
        torch.testing.assert_close(parameter, on_cpu, rtol=0.0, atol=0.0 if precision == "no" else 1e-6)
