"""What a batch counts as: samples, tokens and work, in every form that loaders yield."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.data.metrics import PartialRound
from meshwright.tools.meter.counting import BatchCounter

IDS = torch.ones(4, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0]] * 4)


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        (torch.ones(4, 3), (4, 0, 12)),
        ((torch.ones(4, 3), torch.ones(4)), (4, 0, 12)),
        ([["text"], torch.ones(2, 5)], (2, 0, 10)),
        ({"labels": torch.ones(4), "pixel_values": torch.ones(4, 3, 2, 2)}, (4, 0, 48)),
        ({"input_ids": IDS}, (4, 24, 24)),
        ({"labels": torch.ones(4, 9), "input_ids": IDS, "attention_mask": MASK}, (4, 16, 24)),
        ({"text": ["a", "b"]}, (1, 0, 1)),
        (torch.tensor(3.0), (1, 0, 1)),
    ],
)
def test_samples_tokens_and_elements_are_those_of_the_leading_tensor(batch: Any, counted: tuple[int, ...]) -> None:
    counter = BatchCounter(None)
    assert counter(batch, None) == counted
    assert counter(batch, None) == counted  # by the path that was found


def test_a_batch_of_another_form_is_looked_at_anew() -> None:
    counter = BatchCounter(None)
    assert counter((torch.ones(4, 3),), None)[0] == 4
    assert counter(torch.ones(7, 3), None)[0] == 7
    assert counter({"x": torch.ones(5, 3)}, None)[0] == 5
    assert counter(torch.ones(6, 3), None)[0] == 6


def test_tokens_are_counted_by_the_given_function() -> None:
    counter = BatchCounter(lambda batch: int((batch[0] != 0).sum()))
    assert counter((torch.tensor([[5, 6, 0], [7, 0, 0]]),), None) == (2, 3, 6)


def test_samples_that_fill_up_a_round_are_left_out() -> None:
    """Two ranks of 4 have 6 real samples; the sum over ranks is what counts."""
    partial = PartialRound(counts=[4, 2], full=4, rows=4)
    samples, tokens, work = BatchCounter(None)({"input_ids": IDS}, partial)
    assert (2 * samples, 2 * tokens, work) == (6, 36, 24)


def test_batches_that_the_data_set_makes_count_their_rows() -> None:
    partial = PartialRound(counts=[1, 1], full=1, rows=1, uneven=True)
    assert BatchCounter(None)(torch.ones(4, 3), partial)[0] == 4
