"""Collectives over nested containers: right on every rank, whatever the container, the number format and the layout."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import PartialState
from meshwright.errors import DistributedOperationException
from meshwright.runtime.collectives.nested import leaves
from meshwright.runtime.collectives.operations import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    verify_operation,
)
from tests.ranks import ranks
from tests.runtime.collectives.test_nested import ModelOutput

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    inputs: Any
    labels: Any


def rank() -> int:
    return PartialState().process_index


def in_containers(make: Callable[[], torch.Tensor]) -> list[Any]:
    """Put a rank's tensor into one container of each kind."""
    return [
        make(),
        {"a": make(), "b": {"c": make()}},
        [make(), [make()]],
        (make(), make()),
        Pair(make(), [make()]),
        UserDict(a=make()),
        OrderedDict(a=make(), b=make()),
        defaultdict(list, a=make()),
        ModelOutput(loss=make(), logits=make()),
        ModelOutput(logits=make()),
        Batch(make(), {"x": make()}),
    ]


def assert_everywhere(result: Any, container: Any, expected: torch.Tensor) -> None:
    assert type(result) is type(container)
    assert len(leaves(result)) == len(leaves(container))
    for leaf in leaves(result):
        torch.testing.assert_close(leaf, expected)


# --- every container ----------------------------------------------------------------------------------------------


@ranks(2, 3)
def test_gather_joins_the_ranks_in_order_in_every_container(world_size: int) -> None:
    expected = torch.cat([torch.tensor([[10.0 * r, 10.0 * r + 1]]) for r in range(world_size)])
    for container in in_containers(lambda: torch.tensor([[10.0 * rank(), 10.0 * rank() + 1]])):
        assert_everywhere(gather(container), container, expected)


@ranks(2, 3)
def test_reduce_averages_by_default_and_leaves_the_inputs_alone(world_size: int) -> None:
    expected = torch.tensor([sum(range(world_size)) / world_size, 1.0])
    for container in in_containers(lambda: torch.tensor([float(rank()), 1.0])):
        assert_everywhere(reduce(container), container, expected)
        assert all(leaf.tolist() == [float(rank()), 1.0] for leaf in leaves(container))


@ranks(3)
def test_broadcast_overwrites_the_tensors_of_every_container() -> None:
    for source in (0, 2):
        for container in in_containers(lambda: torch.tensor([float(rank()), 5.0])):
            mine = leaves(container)
            result = broadcast(container, from_process=source)
            assert_everywhere(result, container, torch.tensor([float(source), 5.0]))
            assert all(new is old for new, old in zip(leaves(result), mine, strict=True))


@ranks(2)
def test_padding_reaches_every_container() -> None:
    expected = torch.tensor([1.0, 0.0] if rank() == 0 else [1.0, 1.0])
    for container in in_containers(lambda: torch.ones(1 + rank())):
        assert_everywhere(pad_across_processes(container), container, expected)


@ranks(2)
def test_what_is_no_tensor_is_refused_and_objects_have_a_call_of_their_own() -> None:
    for operation in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(
            TypeError, match=rf"{operation.__name__}\(\) takes tensors.*found a str: 'x'.*gather_object"
        ):
            operation({"a": "x"})
        with pytest.raises(TypeError, match="found a NoneType"):
            operation([None])


def test_a_single_process_gets_its_data_back() -> None:
    data = {"a": torch.tensor(1.0), "b": [torch.ones(2, 3)]}
    assert gather(data) is data
    assert broadcast(data) is data
    assert pad_across_processes(data) is data
    assert reduce(data)["b"][0].tolist() == data["b"][0].tolist()
    assert gather_object([1, "x"]) == [1, "x"]
    assert broadcast_object_list([1, "x"]) == [1, "x"]
    assert gather_tensor_shape(torch.ones(2, 3)) == [[2, 3]]


# --- number formats, shapes and layouts ---------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
UNKNOWN_TO_BACKENDS = (torch.int16, torch.uint16, torch.uint32)


@ranks(2)
def test_every_number_format_survives() -> None:
    for dtype in (*DTYPES, torch.bool, *UNKNOWN_TO_BACKENDS):
        mine = torch.tensor([1, rank()]).to(dtype)
        assert torch.equal(gather(mine), torch.tensor([1, 0, 1, 1]).to(dtype)), dtype
        assert gather(mine).dtype == dtype
        assert torch.equal(broadcast(mine.clone(), from_process=1), torch.tensor([1, 1]).to(dtype)), dtype
        padded = pad_across_processes(torch.ones(1 + rank(), dtype=dtype))
        assert padded.dtype == dtype
        assert padded.tolist() == ([1, 0] if rank() == 0 else [1, 1]), dtype


@ranks(2)
def test_what_backends_cannot_send_is_sent_as_bytes() -> None:
    labels = torch.tensor([[-300, 7], [rank(), 300]], dtype=torch.int16)
    assert gather(labels).tolist() == [[-300, 7], [0, 300], [-300, 7], [1, 300]]
    assert gather(labels[0, 0]).tolist() == [-300, -300], "a scalar"
    assert gather(torch.ones(0, 3, dtype=torch.int16)).shape == (0, 3)
    assert broadcast(torch.tensor(rank() - 300, dtype=torch.int16), from_process=1).item() == -299
    assert reduce(labels, "max")[1].tolist() == [1, 300]
    eighths = torch.tensor([0.125, rank()]).to(torch.float8_e4m3fn)
    assert gather(eighths).float().tolist() == [0.125, 0.0, 0.125, 1.0]


@ranks(2)
def test_sums_keep_integers_and_means_of_integers_are_fractions() -> None:
    for dtype in (*DTYPES, *UNKNOWN_TO_BACKENDS):
        total = reduce(torch.tensor([1, rank()]).to(dtype), "sum")
        assert (total.dtype, total.tolist()) == (dtype, [2, 1])
        mean = reduce(torch.tensor([1, rank()]).to(dtype), "mean")
        assert mean.tolist() == [1.0, 0.5], dtype
        assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)


@ranks(2)
def test_large_integers_are_summed_exactly() -> None:
    assert reduce(torch.tensor([2**53 + 1]), "sum").item() == 2**54 + 2


@ranks(2)
def test_reduction_and_scale_are_the_callers_choice() -> None:
    mine = torch.tensor([1.0 + rank()])
    assert reduce(mine, "sum").item() == 3.0
    assert reduce(mine, "mean").item() == 1.5
    assert reduce(mine, "none").item() == 1.0 + rank()
    assert reduce(mine, "sum", scale=2.0).item() == 6.0
    assert reduce(mine, "mean", 0.5).item() == 0.75
    assert reduce(torch.tensor([3]), "sum", scale=0.5).item() == 3.0
    assert reduce({"a": mine}, "max")["a"].item() == 2.0
    assert reduce(mine, "min").item() == 1.0
    with pytest.raises(ValueError, match="reduction='median': use one of mean, sum, max, min, none"):
        reduce(mine, "median")  # type: ignore[arg-type]


@ranks(2)
def test_numbers_without_dimension() -> None:
    assert gather(torch.tensor(rank())).tolist() == [0, 1]
    assert reduce(torch.tensor(float(rank()))).shape == ()
    assert broadcast(torch.tensor(rank()), from_process=1).item() == 1
    assert pad_across_processes(torch.tensor(rank())).item() == rank()


@ranks(2)
def test_tensors_that_do_not_lie_in_one_piece() -> None:
    grid = torch.arange(6.0).view(2, 3) + 10 * rank()
    for view in (grid.t(), grid[:, ::2], grid[:, 1:], grid[0].expand(2, 3)):
        others = [torch.empty_like(view.contiguous()) for _ in range(2)]
        dist.all_gather(others, view.contiguous())
        assert torch.equal(gather(view), torch.cat(others))
        assert torch.equal(reduce(view, "sum"), others[0] + others[1])
    for view in (grid.clone().t(), grid.clone()[:, ::2], grid.clone()[:, 1:]):
        received = broadcast(view)
        assert received is view, "written in place"
        assert received.max() < 10


@ranks(2)
def test_ranks_may_lay_out_equal_shapes_differently() -> None:
    plain = torch.arange(6.0).view(3, 2)
    mine = plain.t() if rank() == 0 else plain.t().contiguous()
    assert torch.equal(reduce(mine), plain.t())
    assert torch.equal(gather(mine), torch.cat([plain.t(), plain.t()]))
    channels = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    mine = channels.to(memory_format=torch.channels_last) if rank() else channels
    torch.testing.assert_close(reduce(mine), channels)


@ranks(2)
def test_tensors_without_elements() -> None:
    assert gather(torch.zeros(0, 3)).shape == (0, 3)
    assert gather(torch.zeros(2, 0)).shape == (4, 0)
    assert reduce(torch.zeros(0)).shape == (0,)
    assert broadcast(torch.zeros(0)).shape == (0,)
    assert gather({}) == {}
    assert reduce([]) == []
    mine = torch.ones(rank(), 2)
    assert pad_across_processes(mine).shape == (1, 2), "a rank that has nothing is padded too"


@ranks(2)
def test_results_are_cut_off_from_the_graph() -> None:
    mine = torch.ones(2, requires_grad=True)
    assert not gather(mine * 1).requires_grad
    assert not reduce(mine * 1).requires_grad
    parameter = torch.nn.Parameter(torch.tensor([float(rank())]))
    assert broadcast(parameter) is parameter
    assert (parameter.item(), parameter.requires_grad) == (0.0, True)


@ranks(2)
def test_gathering_warns_of_nothing() -> None:
    PartialState()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather(torch.ones(1))
        reduce(torch.ones(1))
        broadcast(torch.ones(1))
        pad_across_processes(torch.ones(1 + rank()))


# --- padding ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_padding_by_dimension_value_and_side() -> None:
    row = torch.arange(1, 3 + rank())
    assert pad_across_processes(row).tolist() == [[1, 2, 0], [1, 2, 3]][rank()]
    assert pad_across_processes(row, pad_index=-1, pad_first=True).tolist() == [[-1, 1, 2], [1, 2, 3]][rank()]
    grid = torch.ones(2, 1 + rank())
    for dim in (1, -1):
        assert pad_across_processes(grid, dim=dim, pad_index=9).tolist() == [[[1, 9]] * 2, [[1, 1]] * 2][rank()]


@ranks(2)
def test_a_dimension_that_is_not_there_is_not_padded() -> None:
    assert pad_across_processes(torch.ones(2), dim=1).tolist() == [1, 1]
    assert pad_across_processes(torch.ones(2), dim=-2).tolist() == [1, 1]
    mixed = {"scalar": torch.tensor(1.0), "row": torch.ones(1 + rank())}
    assert pad_across_processes(mixed)["row"].shape == (2,)


@ranks(2)
def test_padded_tensors_can_be_gathered() -> None:
    ragged = torch.full((1 + rank(), 2), float(rank()))
    assert gather(pad_across_processes(ragged, pad_index=-1)).tolist() == [[0, 0], [-1, -1], [1, 1], [1, 1]]


@ranks(1, 2)
def test_a_nested_tensor_is_left_as_it_is_with_a_warning() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning, match="Cannot pad nested tensors.*to_padded_tensor"):
        assert pad_across_processes([nested])[0] is nested


def test_a_batch_is_filled_up_until_it_divides() -> None:
    assert pad_input_tensors(torch.arange(5), 5, 4).tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert pad_input_tensors({"a": torch.arange(4)}, 4, 2)["a"].tolist() == [0, 1, 2, 3]
    assert pad_input_tensors(torch.arange(6).view(2, 3), 3, 2, dim=1).tolist() == [[0, 1, 2, 2], [3, 4, 5, 5]]
    assert pad_input_tensors([torch.arange(3), torch.arange(2)], 3, 2)[1].tolist() == [0, 1], "no batch of this size"


# --- objects ------------------------------------------------------------------------------------------------------


@ranks(3)
def test_objects_are_gathered_in_rank_order() -> None:
    assert gather_object([rank(), "x" * rank()]) == [0, "", 1, "x", 2, "xx"]
    assert gather_object([{"rank": rank(), "tensor": torch.ones(rank())}])[2]["tensor"].shape == (2,)
    assert gather_object([]) == []
    assert gather_object(["only"] * rank()) == ["only"] * 3


@ranks(3)
def test_objects_are_broadcast_in_place() -> None:
    mine = [rank(), {"name": f"rank {rank()}"}]
    assert broadcast_object_list(mine, from_process=1) is mine
    assert mine == [1, {"name": "rank 1"}]


@ranks(2)
def test_shapes_of_all_ranks_can_be_asked() -> None:
    assert gather_tensor_shape(torch.ones(1 + rank(), 3)) == [[1, 3], [2, 3]]


# --- debug mode ---------------------------------------------------------------------------------------------------


def refusal_of(operation: Callable[[Any], Any], data: Any) -> DistributedOperationException:
    with pytest.raises(DistributedOperationException) as refusal:
        operation(data)
    return refusal.value


@ranks(3)
def test_in_debug_mode_uneven_shapes_are_refused_on_every_rank_with_all_ranks_listed() -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    for operation in (gather, reduce, broadcast):
        refusal = refusal_of(operation, torch.ones(2 + (rank() == 2), 4))
        name = operation.__name__
        even, odd = f"{name}(float32[2, 4] on cpu)", f"{name}(float32[3, 4] on cpu)"
        assert refusal.per_rank == [even, even, odd]
        message = str(refusal)
        assert message.startswith(f"Rank {rank()}: ")
        assert f"  rank 0: {even}\n  rank 1: {even}\n  rank 2: {odd}\n" in message
        assert "pad_across_processes()" in message
    assert gather(torch.tensor([rank()])).tolist() == [0, 1, 2], "the ranks are still in step"


@ranks(2)
def test_in_debug_mode_other_kinds_of_disagreement_are_refused_too() -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    first = rank() == 0
    dtypes = refusal_of(gather, torch.ones(2, dtype=torch.float32 if first else torch.float64))
    assert dtypes.per_rank == ["gather(float32[2] on cpu)", "gather(float64[2] on cpu)"]
    kinds = refusal_of(gather, "text" if first else torch.ones(2))
    assert kinds.per_rank == ["gather(str)", "gather(float32[2] on cpu)"]
    counts = refusal_of(gather, [torch.ones(2)] * (1 if first else 2))
    assert counts.per_rank[1] == "gather([0]: float32[2] on cpu, [1]: float32[2] on cpu)"
    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    names = refusal_of(gather, {"ones": ones, "twos": twos} if first else {"twos": twos, "ones": ones})
    assert names.per_rank[0] == "gather(['ones']: float32[2] on cpu, ['twos']: float32[2] on cpu)"
    calls = refusal_of(gather if first else reduce, torch.ones(2))
    assert calls.per_rank == ["gather(float32[2] on cpu)", "reduce(float32[2] on cpu)"]
    shapes = refusal_of(pad_across_processes, {"x": torch.ones((1, 5) if first else (1, 1, 6))})
    assert shapes.per_rank == [f"pad_across_processes(['x']: float32 of {count} dimensions on cpu)" for count in (2, 3)]


@ranks(2)
def test_in_debug_mode_what_all_ranks_do_wrong_alike_is_still_an_error() -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    with pytest.raises(TypeError, match="found a str"):
        gather("text")


@ranks(2)
def test_in_debug_mode_what_agrees_passes() -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    assert gather({"a": torch.tensor([rank()])})["a"].tolist() == [0, 1]
    assert reduce(tensor=torch.tensor([1.0]), reduction="sum").item() == 2.0
    assert pad_across_processes(torch.ones(1 + rank())).shape == (2,)


@ranks(2)
def test_an_operation_of_the_users_own_can_be_verified() -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    assert verify_operation(biggest)(torch.tensor([rank()]), 1).item() == 2
    refusal = refusal_of(verify_operation(biggest), torch.ones(1 + rank()))
    assert refusal.per_rank[1] == "biggest(float32[2] on cpu)"


def biggest(tensor: torch.Tensor, more: int = 0) -> torch.Tensor:
    return gather(tensor).max() + more
