"""The simulated accelerator itself: where it differs from a device, tests that use it would prove nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks import RankFailure
from tests.simulated_accelerator import on_a_simulated_accelerator, run_on_a_simulated_accelerator
from tests.simulated_accelerator.build import extension
from tests.simulated_accelerator.faults import (
    delays,
    kernels_when_called,
    synchronization_removed,
    with_an_allocator_of_its_own_kind,
    without_float64,
)

LONG = {"copy_latency": 0.03, "kernel_time": 0.03}
"""Delays that no reader is late enough to miss."""


def is_poison(tensor: Tensor) -> bool:
    return bool(tensor.isnan().any())


def test_this_process_has_no_simulated_accelerator() -> None:
    assert not hasattr(torch, "gpu")


# --- Devices ----------------------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_torch_finds_the_simulated_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("gpu")
    assert torch.accelerator.device_count() == 2
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
        assert torch.zeros(1, device="gpu").device == torch.device("gpu", 1)
        assert torch.zeros(1).to("gpu").device == torch.device("gpu", 1)
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.gpu.set_device(2)


@on_a_simulated_accelerator
def test_devices_do_not_mix_on_a_simulated_accelerator() -> None:
    host, first, second = torch.ones(2, 2), torch.ones(2, 2, device="gpu:0"), torch.ones(2, 2, device="gpu:1")
    for other in (host, second):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first @ other
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.Embedding(4, 2).to("gpu")(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.Linear(2, 2)(first)
    with pytest.raises(TypeError, match=r"can't convert gpu:0 device type tensor to numpy"):
        first.numpy()
    assert torch.equal((first + first.new_tensor(2.0)).cpu(), host + 2)
    assert torch.equal(second.to("gpu:0") * torch.tensor(3.0), first * 3), "a number may come from the CPU"
    assert torch.equal(first[torch.tensor([0])], first[:1]), "and so may the indices of a selection"


@on_a_simulated_accelerator
def test_views_share_memory_and_copies_do_not_on_a_simulated_accelerator() -> None:
    whole = torch.zeros(2, 3, device="gpu:1")
    whole.t()[1].fill_(7.0)
    copied = whole.to("gpu:0")
    whole[0, 0] = 1.0
    assert whole.tolist() == [[1.0, 7.0, 0.0], [0.0, 7.0, 0.0]]
    assert copied.tolist() == [[0.0, 7.0, 0.0], [0.0, 7.0, 0.0]]
    assert whole.data_ptr() == whole.view(-1).data_ptr() != copied.data_ptr()


def contexts_of_a_process(device: int) -> list[list[int]]:
    found = [torch.gpu.contexts()]
    torch.accelerator.set_device_index(device)
    torch.accelerator.current_stream()
    found.append(torch.gpu.contexts())
    torch.zeros(1, device="gpu")
    return [*found, torch.gpu.contexts()]


def test_a_context_is_opened_by_use_alone_on_a_simulated_accelerator() -> None:
    found = run_on_a_simulated_accelerator(contexts_of_a_process, device=1, in_new_processes=True)
    assert found == [[[], [], [1]]]


@on_a_simulated_accelerator
def test_a_forked_child_must_not_use_the_device_on_a_simulated_accelerator() -> None:
    kept = torch.ones(3, device="gpu")
    child = os.fork()
    if child == 0:
        try:
            kept + 1
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- Time -------------------------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_copies_from_pinned_memory_are_late_on_a_simulated_accelerator() -> None:
    source = torch.arange(5.0).pin_memory()
    assert source.is_pinned()
    assert not torch.arange(5.0).is_pinned()
    with delays(**LONG):
        target = source.to("gpu", non_blocking=True)
        source.fill_(9.0)  # too early: the copy may not have read it
        assert target.cpu().tolist() == [9.0] * 5
        target = source.to("gpu", non_blocking=True)
        torch.gpu.synchronize()
        source.fill_(3.0)
        assert target.cpu().tolist() == [9.0] * 5


@on_a_simulated_accelerator
def test_copies_from_pageable_memory_are_staged_on_a_simulated_accelerator() -> None:
    source = torch.arange(5.0)
    with delays(**LONG):
        target = source.to("gpu", non_blocking=True)
        source.fill_(9.0)
        assert target.cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@on_a_simulated_accelerator
def test_copies_to_pinned_memory_are_late_and_others_are_not_on_a_simulated_accelerator() -> None:
    source = torch.arange(5.0, device="gpu")
    torch.gpu.synchronize()
    with delays(**LONG):
        pinned = torch.zeros(5, pin_memory=True).copy_(source, non_blocking=True)
        assert is_poison(pinned)
        torch.gpu.synchronize()
        assert pinned.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert torch.zeros(5).copy_(source, non_blocking=True).tolist() == pinned.tolist()
        assert source.cpu().tolist() == pinned.tolist()


def results_on_a_side_stream(wait: bool) -> list[float]:
    side = torch.gpu.Stream()
    with delays(**LONG):
        with torch.gpu.stream(side):
            value = torch.ones(3, device="gpu") * 2
        if wait:
            torch.gpu.current_stream().wait_stream(side)
        return (value + 1).tolist()


@on_a_simulated_accelerator
def test_a_stream_that_does_not_wait_reads_poison_on_a_simulated_accelerator() -> None:
    for mode in (kernels_when_called, lambda: delays(**LONG)):
        with mode():
            assert results_on_a_side_stream(wait=True) == [3.0] * 3
            assert is_poison(torch.tensor(results_on_a_side_stream(wait=False)))
            with synchronization_removed():
                assert is_poison(torch.tensor(results_on_a_side_stream(wait=True)))


@on_a_simulated_accelerator
def test_the_host_runs_ahead_on_a_simulated_accelerator() -> None:
    value = torch.zeros(3, device="gpu")
    with delays(kernel_time=0.02):
        started = time.perf_counter()
        for _ in range(20):
            value += 1
        launched = time.perf_counter() - started
        assert not torch.gpu.current_stream().query()
        torch.gpu.synchronize()
        finished = time.perf_counter() - started
    assert value.tolist() == [20.0] * 3
    assert launched < finished / 3


@on_a_simulated_accelerator
def test_events_order_and_measure_on_a_simulated_accelerator() -> None:
    start, end = (torch.Event("gpu", enable_timing=True) for _ in range(2))
    side = torch.Stream("gpu")
    with delays(**LONG):
        start.record()
        value = torch.zeros(3, device="gpu")
        for _ in range(5):
            value += 1
        end.record()
        assert not end.query()
        side.wait_event(end)
        with side:
            doubled = value * 2
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) > 1
        side.synchronize()
        assert doubled.tolist() == [10.0] * 3


@on_a_simulated_accelerator
def test_threads_have_their_own_current_device_and_stream_on_a_simulated_accelerator() -> None:
    import threading

    found = []

    def look() -> None:
        found.append((torch.gpu.current_device(), torch.gpu.current_stream(0) == torch.gpu.default_stream(0)))

    with torch.gpu.device(1), torch.gpu.stream(torch.gpu.Stream(0)):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.gpu.current_stream(0) != torch.gpu.default_stream(0)
    assert found == [(0, True)]


@on_a_simulated_accelerator
def test_streams_that_wait_use_no_processor_on_a_simulated_accelerator() -> None:
    value = torch.zeros(3, device="gpu")
    torch.gpu.synchronize()
    with delays(kernel_time=0.1):
        before = time.process_time()
        for _ in range(5):
            value += 1
        torch.gpu.synchronize()
        assert time.process_time() - before < 0.05


@on_a_simulated_accelerator
def test_errors_of_late_kernels_reach_whoever_waits_on_a_simulated_accelerator() -> None:
    table, target = torch.zeros(3, 2, device="gpu"), torch.empty(1, 2, device="gpu")
    torch.index_select(table, 0, torch.tensor([7], device="gpu"), out=target)
    with pytest.raises(RuntimeError, match=r"an earlier operation failed on device 0: .*out of range"):
        torch.gpu.synchronize()
    torch.gpu.synchronize()


# --- Memory -----------------------------------------------------------------------------------------------------------


def value_after_reuse(recorded: bool) -> float:
    side = torch.gpu.Stream()
    used = torch.full((1000,), 7.0, device="gpu")
    copied = torch.zeros(1000, device="gpu")
    torch.gpu.synchronize()
    with delays(**LONG):
        with torch.gpu.stream(side):
            copied.copy_(used)
        if recorded:
            used.record_stream(side)
        del used
        torch.full((1000,), 3.0, device="gpu")
        torch.gpu.synchronize()
    return copied[0].item()


@on_a_simulated_accelerator
def test_memory_of_a_stream_that_was_not_recorded_is_reused_on_a_simulated_accelerator() -> None:
    assert value_after_reuse(recorded=True) == 7.0
    assert value_after_reuse(recorded=False) != 7.0


@on_a_simulated_accelerator
def test_memory_is_counted_and_runs_out_on_a_simulated_accelerator() -> None:
    torch.gpu.empty_cache()
    before = torch.gpu.memory_allocated(1)
    kept = torch.zeros(1000, device="gpu:1")
    view = kept.view(10, 100)
    assert torch.gpu.memory_allocated(1) - before == 4000
    assert torch.accelerator.memory_allocated(1) - before == 4000
    del kept
    assert torch.gpu.memory_allocated(1) - before == 4000, "the view keeps it"
    with torch.gpu.memory_limit(before + 6000, 1), pytest.raises(torch.OutOfMemoryError, match="gpu out of memory"):
        view * 2
    torch.accelerator.reset_peak_memory_stats(1)
    (view * 2, view * 3)
    assert torch.gpu.max_memory_allocated(1) - before >= 12_000
    del view
    assert torch.gpu.memory_allocated(1) == before
    reserved = torch.gpu.memory_reserved(1)
    assert reserved >= 4000
    free, total = torch.gpu.mem_get_info(1)
    assert total - free == reserved
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(1) < reserved


@on_a_simulated_accelerator
def test_an_allocator_of_another_kind_has_no_statistics_on_a_simulated_accelerator() -> None:
    with with_an_allocator_of_its_own_kind():
        with pytest.raises(RuntimeError, match="is not a DeviceAllocator"):
            torch.accelerator.empty_cache()
        torch.gpu.empty_cache()
        assert torch.ones(2, device="gpu").sum().item() == 2
    torch.accelerator.empty_cache()


@on_a_simulated_accelerator
def test_storages_can_be_resized_on_a_simulated_accelerator() -> None:
    value = torch.arange(4.0, device="gpu")
    before = torch.gpu.memory_allocated()
    value.untyped_storage().resize_(0)
    assert torch.gpu.memory_allocated() == before - 16
    value.untyped_storage().resize_(16)
    value.copy_(torch.arange(4.0) + 1)
    value.untyped_storage().resize_(32)
    assert value.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert value.resize_(6).tolist()[:4] == [1.0, 2.0, 3.0, 4.0]


@on_a_simulated_accelerator
def test_tensors_keep_their_device_in_files_on_a_simulated_accelerator(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to("gpu:1")
    torch.save({"tensor": tensor, "row": tensor[1]}, tmp_path / "tensor.pt")
    for location, device in ((None, "gpu:1"), ("gpu:0", "gpu:0"), ("cpu", "cpu")):
        loaded = torch.load(tmp_path / "tensor.pt", map_location=location)
        assert [str(value.device) for value in loaded.values()] == [device, device]
        assert torch.equal(loaded["tensor"].cpu(), tensor.cpu())
        assert loaded["row"].data_ptr() == loaded["tensor"][1].data_ptr(), "shared memory stays shared"


@on_a_simulated_accelerator
def test_loaders_pin_their_batches_on_a_simulated_accelerator() -> None:
    loader = DataLoader(torch.arange(10.0), batch_size=5, pin_memory=True, num_workers=1)  # type: ignore[arg-type]
    batches = list(loader)
    assert all(batch.is_pinned() for batch in batches)
    assert [batch.to("gpu", non_blocking=True).sum().item() for batch in batches] == [10.0, 35.0]


# --- Numbers ----------------------------------------------------------------------------------------------------------


@on_a_simulated_accelerator
def test_random_numbers_come_from_the_generator_of_their_device_on_a_simulated_accelerator() -> None:
    torch.manual_seed(3)
    host_state = torch.get_rng_state()
    drawn = torch.randn(4, device="gpu:0")
    F.dropout(drawn, 0.5)
    assert torch.equal(torch.get_rng_state(), host_state), "the CPU's generator stood still"
    assert torch.equal(drawn.cpu(), torch.randn(4)), "a seed means the same on the CPU"

    torch.randn(100)
    torch.gpu.manual_seed_all(3)
    assert torch.equal(torch.randn(4, device="gpu:1").cpu(), drawn.cpu()), "devices have equal generators"
    assert not torch.equal(torch.randn(4, device="gpu:1").cpu(), torch.randn(4, device="gpu:0").cpu()), "but separate"
    state = torch.gpu.get_rng_state("gpu:1")
    again = torch.randn(4, device="gpu:1")
    torch.gpu.set_rng_state(state, "gpu:1")
    assert torch.equal(torch.randn(4, device="gpu:1"), again)
    own = torch.Generator("gpu:1").manual_seed(5)
    assert torch.equal(torch.rand(3, device="gpu:1", generator=own).cpu(), torch.rand(3, generator=seeded(5)))
    with pytest.raises(RuntimeError, match="Expected a 'gpu' device type for generator but found 'cpu'"):
        torch.randn(4, device="gpu", generator=torch.Generator())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@on_a_simulated_accelerator
def test_float64_can_be_refused_on_a_simulated_accelerator() -> None:
    assert torch.zeros(1, dtype=torch.float64, device="gpu").item() == 0
    with without_float64():
        with pytest.raises(TypeError, match="does not support it"):
            torch.zeros(1, dtype=torch.float64, device="gpu")
        with pytest.raises(TypeError, match="does not support it"):
            torch.zeros(1, dtype=torch.float64).to("gpu")
        assert torch.zeros(1, device="gpu").item() == 0


@on_a_simulated_accelerator
def test_autograd_is_right_on_every_device_on_a_simulated_accelerator() -> None:
    for device in ("gpu:0", "gpu:1"):
        torch.manual_seed(0)
        inputs = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device, requires_grad=True)
        model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
        with delays(kernel_time=0, copy_latency=0):
            assert torch.autograd.gradcheck(model.double().to(device), inputs)


def embedding_gradient(device: str) -> Tensor:
    table = torch.arange(8.0).reshape(4, 2).to(device).requires_grad_()
    F.embedding(torch.tensor([1, 2, 2], device=device), table).square().sum().backward()
    assert table.grad is not None
    return table.grad


def attention(device: str) -> Tensor:
    heads = torch.randn(2, 2, 5, 8, generator=seeded(0)).to(device).requires_grad_()
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().sum().backward()
    assert heads.grad is not None
    return heads.grad


def masked_attention(device: str) -> Tensor:
    heads = torch.randn(2, 2, 5, 8, generator=seeded(0)).to(device)
    mask = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def fused_step(device: str) -> Tensor:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    layer.to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    return layer.weight.detach()


def written_by_index(device: str) -> Tensor:
    table = torch.zeros(4, 3, device=device)
    table[torch.tensor([0, 2], device=device)] = torch.tensor(3.0, device=device)
    table.index_add_(0, torch.tensor([1, 1], device=device), torch.ones(2, 3, device=device))
    table.masked_fill_(table > 2.5, -1.0)
    return table.scatter_(1, torch.zeros(4, 1, dtype=torch.long, device=device), 5.0)


OPERATIONS = {
    "embedding": embedding_gradient,
    "attention": attention,
    "masked attention": masked_attention,
    "fused optimizer": fused_step,
    "indices": written_by_index,
    "complex": lambda device: torch.view_as_real(torch.fft.fft(torch.arange(8.0, device=device)).conj() * 2j),
    "foreach": lambda device: torch.stack(
        torch._foreach_norm([torch.arange(i + 2.0, device=device) for i in range(3)])
    ),
    "data-dependent": lambda device: torch.arange(-3.0, 3, device=device).abs().unique(),
    "an empty out": lambda device: torch.add(torch.ones(3, device=device), 1, out=torch.empty(0, device=device)),
    "number": lambda device: torch.tensor(torch.arange(4.0, device=device).sum().item()),
    "sorted": lambda device: torch.tensor([3.0, 1.0, 2.0], device=device).sort().indices,
}


@pytest.mark.parametrize("name", OPERATIONS)
@on_a_simulated_accelerator
def test_operations_give_what_the_cpu_gives_on_a_simulated_accelerator(name: str) -> None:
    torch.testing.assert_close(OPERATIONS[name]("gpu:1").cpu(), OPERATIONS[name]("cpu"))


# --- Failures ---------------------------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("the reason")


def test_a_failure_on_a_simulated_accelerator_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"in fail\n(.|\n)*ValueError: the reason"):
        run_on_a_simulated_accelerator(fail)


@on_a_simulated_accelerator
def test_it_is_compiled_once_for_a_simulated_accelerator() -> None:
    assert extension() is extension()
