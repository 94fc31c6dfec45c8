"""`gather_for_metrics`: every sample once, in the same form in every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from meshwright import Accelerator
from tests.ranks import ranks


@dataclass
class Scores:
    ids: torch.Tensor
    names: list[str]


def texts(rows: torch.Tensor) -> list[str]:
    return [f"t{row}" for row in rows.tolist()]


RESULTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[range], Any]]] = {
    "mapping": (
        lambda rows: {"id": rows, "text": texts(rows), "more": {"tuple": tuple(texts(rows)), "array": rows.numpy()}},
        lambda rows: {
            "id": list(rows),
            "text": [f"t{row}" for row in rows],
            "more": {"tuple": [f"t{row}" for row in rows], "array": list(rows)},
        },
    ),
    "data class": (
        lambda rows: Scores(rows, texts(rows)),
        lambda rows: {"ids": list(rows), "names": [f"t{row}" for row in rows]},
    ),
    "three texts for each sample": (
        lambda rows: {"beams": [text for text in texts(rows) for _ in range(3)]},
        lambda rows: {"beams": [f"t{row}" for row in rows for _ in range(3)]},
    ),
    "list": (texts, lambda rows: [f"t{row}" for row in rows]),
    "list of lists": (lambda rows: [[row] * 3 for row in rows.tolist()], lambda rows: [[row] * 3 for row in rows]),
    "tuple": (lambda rows: tuple(texts(rows)), lambda rows: [f"t{row}" for row in rows]),
}


def plain(value: Any) -> Any:
    if isinstance(value, Scores):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def loader_of(accelerator: Accelerator, samples: int) -> Any:
    return accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2))


@pytest.mark.parametrize("as_objects", [False, True])
@ranks(1, 2, 3)
def test_results_that_are_no_tensors_have_one_form_in_all_rounds(as_objects: bool, world_size: int) -> None:
    accelerator = Accelerator(cpu=True)
    per_round = 2 * world_size
    for samples in (2 * per_round, per_round + 1, 2 * per_round - 1):
        loader = loader_of(accelerator, samples)
        for kind, (result, expected) in RESULTS.items():
            for step, rows in enumerate(loader):
                gathered = accelerator.gather_for_metrics(result(rows), use_gather_object=as_objects)
                first = step * per_round
                assert plain(gathered) == expected(range(first, min(first + per_round, samples))), (kind, step)


@ranks(2)
def test_results_that_are_not_per_sample_come_once_from_every_rank_with_a_sample() -> None:
    accelerator = Accelerator(cpu=True)
    for samples, last in ((5, [4]), (7, [4, 6])):  # in the last round the second rank has no sample, or one
        for rows in loader_of(accelerator, samples):
            result = {"first": int(rows[0]), "mean": rows.float().mean(), "none": None, "rows": [rows]}
            gathered = accelerator.gather_for_metrics(result)
            flat = accelerator.gather_for_metrics((rows, texts(rows)))
            batches = accelerator.gather_for_metrics([{"id": rows, "text": texts(rows)}])
        assert gathered["first"] == last
        assert gathered["mean"].shape == (len(last),)
        assert gathered["none"] == [None] * len(last)
        real = [[4], [6]] if samples == 7 else [[4]]
        real = [[4, 5], [6]] if samples == 7 else real
        assert plain(gathered["rows"]) == real
        assert plain(flat) == [part for ids in real for part in (ids, [f"t{i}" for i in ids])]
        assert plain(batches) == [{"id": ids, "text": [f"t{i}" for i in ids]} for ids in real]


def test_shapes_on_one_process_are_those_of_the_results() -> None:
    accelerator = Accelerator(cpu=True)
    shapes = []
    for rows in accelerator.prepare(DataLoader(torch.arange(5), batch_size=2)):
        results = {
            "mean": rows.float().mean(),
            "matrix": rows[:, None].repeat(1, 3),
            "beams": rows.repeat_interleave(4),
            "repeated": rows.float().mean().repeat(2),  # as long as a full batch
            "other": torch.zeros(3),
        }
        gathered = accelerator.gather_for_metrics(results)
        assert all(torch.equal(gathered[name], results[name]) for name in ("mean", "matrix", "beams"))
        shapes.append({name: tuple(tensor.shape) for name, tensor in gathered.items()})
    full = {"mean": (), "matrix": (2, 3), "beams": (8,), "repeated": (2,), "other": (3,)}
    assert shapes == [full, full, {"mean": (), "matrix": (1, 3), "beams": (4,), "repeated": (1,), "other": (3,)}]
    assert accelerator.gather_for_metrics("text") == "text"


def test_what_is_no_tensor_is_cut_to_the_samples_of_a_short_batch_on_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    for rows in accelerator.prepare(DataLoader(torch.arange(5), batch_size=4)):
        always_four = ["a", "b", "c", "d"]
        gathered = accelerator.gather_for_metrics({"labels": always_four, "rows": rows, "names": texts(rows)})
    assert plain(gathered) == {"labels": ["a"], "rows": [4], "names": ["t4"]}
