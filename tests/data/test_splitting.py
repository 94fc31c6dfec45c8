"""A list of inputs is split into contiguous parts, one for each process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.splitting import share_of


def shares(inputs: Any, processes: int, **options: Any) -> list[Any]:
    return [share_of(inputs, processes, rank, **options) for rank in range(processes)]


@pytest.mark.parametrize(
    ("length", "processes", "expected", "padded"),
    [
        (4, 2, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]], [[0, 1, 2], [3, 4, 4]]),
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]], [[0, 1, 2], [3, 4, 6], [5, 6, 6]]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7, 7]]),
        (1, 3, [[0], [], []], [[0], [0], [0]]),
        (0, 2, [[], []], [[], []]),
    ],
)
def test_the_first_processes_get_one_more_and_the_others_may_be_padded(
    length: int, processes: int, expected: list[Any], padded: list[Any]
) -> None:
    inputs = list(range(length))
    assert shares(inputs, processes) == expected
    assert shares(inputs, processes, apply_padding=True) == padded
    assert shares(tuple(inputs), processes) == [tuple(part) for part in expected]
    assert shares(tuple(inputs), processes, apply_padding=True) == [tuple(part) for part in padded]
    assert [part.tolist() for part in shares(torch.arange(length), processes)] == expected
    assert [part.tolist() for part in shares(torch.arange(length), processes, apply_padding=True)] == padded
    assert [part.tolist() for part in shares(np.arange(length), processes)] == expected
    by_name = [{"x": part, "y": part} for part in expected]
    assert shares({"x": inputs, "y": inputs}, processes) == by_name


def test_one_process_gets_the_inputs_themselves_and_a_text_is_one_input() -> None:
    inputs = [1, 2]
    assert share_of(inputs, 1, 0) is inputs
    assert shares("text", 2) == ["text", "text"]
    assert shares(b"bytes", 2) == [b"bytes", b"bytes"]


def test_values_of_several_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one length in a dict, and got \{'x': 1, 'y': 2\}"):
        share_of({"x": [1], "y": [1, 2]}, 2, 0)


def test_a_data_set_is_asked_to_select() -> None:
    class Rows(list[int]):
        def select(self, indices: list[int]) -> tuple[str, list[int]]:
            return "selected", indices

    assert shares(Rows(range(3)), 2, apply_padding=True) == [("selected", [0, 1]), ("selected", [2, 2])]
