from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.tracking.values import StepCounter, flat, plain


class Colour(enum.Enum):
    RED = "red"


class Size(str, enum.Enum):
    SMALL = "small"


@dataclasses.dataclass
class Part:
    width: int
    path: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        (Colour.RED, "red"),
        (Size.SMALL, "small"),
        (Path("a/b"), "a/b"),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.zeros(9, 9), "Tensor of shape (9, 9), torch.float32"),
        (torch.float16, "torch.float16"),
        (torch.nn.Linear, "Linear"),
        (date(2026, 1, 2), "2026-01-02"),
        (Part(2, Path("x")), {"width": 2, "path": "x"}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        ({1: {Colour.RED: (1, {2})}}, {"1": {"red": [1, [2]]}}),
    ],
)
def test_any_value_becomes_plain_data(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    json.dumps(plain(value))


def test_a_config_that_holds_itself_ends() -> None:
    config: dict[str, Any] = {"lr": 1}
    config["self"] = config
    assert plain(config) == {"lr": 1, "self": "..."}


def test_one_object_in_two_places_is_written_twice() -> None:
    shared = [1]
    assert plain({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_flattening_names_every_value_by_its_way_down() -> None:
    config = {"model": {"depth": 2, "sizes": [1, 2], "extra": {}}, "name": None}
    assert flat(config) == {"model.depth": 2, "model.sizes": "[1, 2]", "model.extra": "{}", "name": None}
    assert flat(config, separator="/")["model/depth"] == 2
    assert flat({}) == {}


def test_steps_are_counted_on_from_the_last_one_that_was_given() -> None:
    number = StepCounter()
    assert [number(None), number(None), number(10), number(None), number(3)] == [0, 1, 10, 11, 3]
