"""Nested batches: every container comes back as its own type, every leaf is found once."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.runtime.collectives.nested import (
    ConvertOutputsToFp32,
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    leaves,
    listify,
    named_leaves,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A mapping with attributes, as libraries of models return: fields that are None are no items."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, dict):
            given, self.loss = self.loss, None
            for name, value in given.items():
                self[name] = value
        else:
            for name in ("loss", "logits"):
                if getattr(self, name) is not None:
                    self[name] = getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Batch:
    inputs: Any
    labels: Any
    length: int = field(init=False, default=7)


def tensor() -> torch.Tensor:
    return torch.arange(6.0).reshape(3, 2)


CONTAINERS: list[Any] = [
    [tensor()],
    (tensor(), tensor()),
    Point(tensor(), [tensor()]),
    Typed(tensor(), tensor()),
    {"a": tensor(), "b": {"c": tensor()}},
    OrderedDict(a=tensor()),
    defaultdict(list, a=tensor()),
    UserDict(a=tensor()),
    ModelOutput(logits=tensor()),
    Batch(tensor(), {"x": tensor()}),
]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: type(container).__name__)
def test_containers_come_back_as_their_own_type(container: Any) -> None:
    doubled = recursively_apply(lambda leaf: leaf * 2, container)
    assert type(doubled) is type(container)
    assert doubled is not container
    before, after = leaves(container), leaves(doubled)
    assert len(before) == len(after) >= 1
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old * 2)
        assert torch.equal(old, tensor()), "the original is untouched"


def test_a_model_output_keeps_its_attributes() -> None:
    output = ModelOutput(loss=torch.tensor(1.0), logits=tensor())
    moved = recursively_apply(lambda leaf: leaf + 1, output)
    assert (list(moved), moved.loss.item()) == (["loss", "logits"], 2.0)
    assert moved.logits is moved["logits"]
    assert recursively_apply(lambda leaf: leaf, ModelOutput(logits=tensor())).loss is None


def test_a_defaultdict_keeps_its_factory() -> None:
    mapped = recursively_apply(lambda leaf: leaf, defaultdict(list, a=tensor()))
    assert mapped["absent"] == []


def test_leaves_that_are_not_tested_for_are_left_or_refused() -> None:
    data = {"a": tensor(), "b": ["text", 3, None], "c": torch.float32}
    mapped = recursively_apply(lambda leaf: leaf * 0, data)
    assert (mapped["b"], mapped["c"]) == (["text", 3, None], torch.float32)
    with pytest.raises(TypeError, match=r"double\(\) takes tensors.*found a str: 'text'. Use gather_object"):
        recursively_apply(double, data, error_on_other_type=True)


def double(leaf: torch.Tensor) -> torch.Tensor:
    return leaf * 2


def test_the_test_and_further_arguments_are_the_callers_choice() -> None:
    def add(number: int, other: int, *, times: int) -> int:
        return (number + other) * times

    data = [1, "x", {"a": 2}]
    assert recursively_apply(add, data, 10, test_type=lambda leaf: isinstance(leaf, int), times=2) == [
        22,
        "x",
        {"a": 24},
    ]


def test_leaves_are_named_by_their_path() -> None:
    data = {"a": [1, Point(2, 3)], "b": Batch(4, 5)}
    assert named_leaves(data) == [
        ("['a'][0]", 1),
        ("['a'][1][0]", 2),
        ("['a'][1][1]", 3),
        ("['b']['inputs']", 4),
        ("['b']['labels']", 5),
    ]
    assert leaves([]) == []
    assert leaves(3) == [3]


def test_kinds_are_told_apart() -> None:
    assert is_namedtuple(Point(1, 2))
    assert is_namedtuple(Typed(1))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple(Point)
    assert is_torch_tensor(torch.nn.Parameter(tensor()))
    assert not is_torch_tensor([1.0])
    assert is_tensor_information(TensorInformation(torch.Size([1]), torch.int8))
    assert honor_type(Point(1, 2), iter([3, 4])) == Point(3, 4)
    assert honor_type([1], (value for value in (3, 4))) == [3, 4]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: type(container).__name__)
def test_every_tensor_moves(container: Any) -> None:
    moved = send_to_device(container, "meta")
    assert type(moved) is type(container)
    assert {leaf.device.type for leaf in leaves(moved)} == {"meta"}


def test_skipped_keys_stay_at_every_depth() -> None:
    data = defaultdict(list, keep=tensor(), inner={"keep": [tensor()], "go": tensor()})
    for skip_keys in ("keep", ["keep"]):
        moved = send_to_device(data, "meta", skip_keys=skip_keys)
        assert type(moved) is defaultdict
        assert moved["keep"] is data["keep"]
        assert moved["inner"]["keep"] is data["inner"]["keep"]
        assert moved["inner"]["go"].device.type == "meta"


def test_objects_that_can_move_themselves_are_asked_to() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        def to(self, device: Any) -> Encoding:  # takes no non_blocking
            self.place = device
            return self

    encoding = Encoding(a=tensor())
    moved = send_to_device([encoding, "text", None, 3, torch.Tensor], "meta", non_blocking=True)
    assert moved[0] is encoding
    assert encoding.place == "meta"
    assert moved[1:] == ["text", None, 3, torch.Tensor]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(3, 2), 3),
        ([torch.tensor(1.0), torch.ones(4)], 4),
        ({"text": "x", "ids": torch.ones(5, 1)}, 5),
        (Batch("x", torch.ones(2)), 2),
        (torch.tensor(1.0), None),
        (["x"], None),
        ([], None),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor_with_one(data: Any, size: int | None) -> None:
    assert find_batch_size(data) == size


def test_the_device_is_that_of_the_first_tensor() -> None:
    assert find_device({"a": 1, "b": [torch.ones(1, device="meta")]}) == torch.device("meta")
    assert find_device(["x"]) is None


def test_tensors_become_plain_numbers() -> None:
    data = {"a": torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), "b": (torch.tensor(True), "x")}
    assert listify(data) == {"a": [1.5], "b": (True, "x")}


def test_a_structure_describes_tensors_so_that_their_like_can_be_made() -> None:
    data = {"a": torch.ones(2, 3, dtype=torch.int8), "b": [torch.tensor(1.0), "x"], "c": torch.ones(0, 4)}
    assert get_shape(data) == {"a": [2, 3], "b": [[], "x"], "c": [0, 4]}
    structure = get_data_structure(data)
    assert structure["a"] == TensorInformation(shape=torch.Size([2, 3]), dtype=torch.int8)
    made = initialize_tensors(structure)
    assert get_data_structure(made) == structure
    assert made["b"][1] == "x"


def test_every_tensor_is_sliced_alike() -> None:
    sliced = slice_tensors({"a": torch.arange(4), "b": Point(torch.arange(8).view(4, 2), "x")}, slice(1, 3))
    assert sliced["a"].tolist() == [1, 2]
    assert sliced["b"].x.tolist() == [[2, 3], [4, 5]]
    assert sliced["b"].y == "x"


def test_batches_are_joined_tensor_by_tensor() -> None:
    batches = [{"a": torch.full((1, 2), number), "b": Point(torch.tensor([number]), ())} for number in (1, 2)]
    joined = concatenate(batches)
    assert joined["a"].tolist() == [[1, 1], [2, 2]]
    assert type(joined["b"]) is Point
    assert joined["b"].x.tolist() == [1, 2]
    assert concatenate([torch.ones(2, 1), torch.zeros(2, 2)], dim=1).shape == (2, 3)
    assert type(concatenate([defaultdict(list, a=tensor())] * 2)) is defaultdict
    assert concatenate(["text"]) == "text", "one is there already"
    with pytest.raises(TypeError, match="Can only concatenate tensors but got <class 'str'>"):
        concatenate(["a", "b"])


def test_only_low_precision_becomes_fp32() -> None:
    data = {dtype: torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32)}
    converted = convert_to_fp32(data)
    assert [leaf.dtype for leaf in converted.values()] == [torch.float32, torch.float32, torch.float64, torch.int32]
    assert convert_to_fp32(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_wrapped_forward_returns_fp32_and_keeps_its_name() -> None:
    def forward(inputs: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Compute."""
        return {"out": (inputs * scale).half()}

    wrapped = convert_outputs_to_fp32(forward)
    assert isinstance(wrapped, ConvertOutputsToFp32)
    result = wrapped(torch.ones(2), scale=3.0)["out"]
    assert (result.dtype, result.tolist()) == (torch.float32, [3.0, 3.0])
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Compute.")


def test_what_the_function_refers_to_is_freed_without_a_garbage_collection() -> None:
    class Large:
        pass

    large = Large()
    reference = weakref.ref(large)
    gc.disable()
    try:
        recursively_apply(lambda leaf, kept=large: leaf, [torch.ones(1), {"a": torch.ones(1)}])
        del large
        assert reference() is None
    finally:
        gc.enable()
