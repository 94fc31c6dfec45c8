"""The pretend accelerator itself: where it differs from a device, tests that use it would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.pretend_accelerator import on_a_pretend_accelerator, run_on_a_pretend_accelerator
from tests.ranks import RankFailure


def test_this_process_has_no_pretend_accelerator() -> None:
    assert not hasattr(torch, "gpu")


@on_a_pretend_accelerator
def test_torch_finds_the_pretend_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("gpu")
    assert torch.accelerator.device_count() == 2
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
        assert torch.zeros(1, device="gpu").device == torch.device("gpu", 1)
    assert torch.accelerator.current_device_index() == 0


@on_a_pretend_accelerator
def test_devices_do_not_mix_on_a_pretend_accelerator() -> None:
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


@on_a_pretend_accelerator
def test_views_share_memory_and_copies_do_not_on_a_pretend_accelerator() -> None:
    whole = torch.zeros(2, 3, device="gpu:1")
    whole.t()[1].fill_(7.0)
    copied = whole.to("gpu:0")
    whole[0, 0] = 1.0
    assert whole.tolist() == [[1.0, 7.0, 0.0], [0.0, 7.0, 0.0]]
    assert copied.tolist() == [[0.0, 7.0, 0.0], [0.0, 7.0, 0.0]]
    assert whole.data_ptr() == whole.view(-1).data_ptr() != copied.data_ptr()


@on_a_pretend_accelerator
def test_random_numbers_come_from_the_generator_of_their_device_on_a_pretend_accelerator() -> None:
    torch.manual_seed(3)
    host_state = torch.get_rng_state()
    drawn = torch.randn(4, device="gpu:0")
    nn.functional.dropout(drawn, 0.5)
    assert torch.equal(torch.get_rng_state(), host_state), "the CPU's generator stood still"

    torch.randn(100)
    torch.gpu.manual_seed_all(3)
    assert torch.equal(torch.randn(4, device="gpu:1").cpu(), drawn.cpu()), "devices have equal generators"
    assert not torch.equal(torch.randn(4, device="gpu:1").cpu(), torch.randn(4, device="gpu:0").cpu()), "but separate"
    state = torch.gpu.get_rng_state("gpu:1")
    again = torch.randn(4, device="gpu:1")
    torch.gpu.set_rng_state(state, "gpu:1")
    assert torch.equal(torch.randn(4, device="gpu:1"), again)
    with pytest.raises(RuntimeError, match="Expected a 'gpu' device type for generator but found 'cpu'"):
        torch.randn(4, device="gpu", generator=torch.Generator())


@on_a_pretend_accelerator
def test_memory_is_counted_and_runs_out_on_a_pretend_accelerator() -> None:
    before = torch.gpu.memory_allocated(1)
    kept = torch.zeros(1000, device="gpu:1")
    view = kept.view(10, 100)
    assert torch.gpu.memory_allocated(1) - before == 4000
    del kept
    assert torch.gpu.memory_allocated(1) - before == 4000, "the view keeps it"
    with torch.gpu.memory_limit(before + 6000, 1), pytest.raises(torch.OutOfMemoryError, match="gpu out of memory"):
        view * 2
    del view
    assert torch.gpu.memory_allocated(1) == before


@on_a_pretend_accelerator
def test_tensors_keep_their_device_in_files_on_a_pretend_accelerator(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to("gpu:1")
    torch.save({"tensor": tensor, "row": tensor[1]}, tmp_path / "tensor.pt")
    for location, device in ((None, "gpu:1"), ("gpu:0", "gpu:0"), ("cpu", "cpu")):
        loaded = torch.load(tmp_path / "tensor.pt", map_location=location)
        assert [str(value.device) for value in loaded.values()] == [device, device]
        assert torch.equal(loaded["tensor"].cpu(), tensor.cpu())
        assert loaded["row"].data_ptr() == loaded["tensor"][1].data_ptr(), "shared memory stays shared"


@on_a_pretend_accelerator
def test_autograd_is_right_on_a_pretend_accelerator() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 6, 6, dtype=torch.float64, device="gpu", requires_grad=True)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    assert torch.autograd.gradcheck(model.double().to("gpu"), inputs)


def fail() -> None:
    raise ValueError("the reason")


def test_a_failure_on_a_pretend_accelerator_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"in fail\n(.|\n)*ValueError: the reason"):
        run_on_a_pretend_accelerator(fail)
