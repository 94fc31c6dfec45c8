"""Published rows are read as runs of the shape that their sources give."""

from __future__ import annotations

import csv
from collections import Counter

import torch

from . import rows
from .rows import Case, read_cases
from .shapes import import_script


def parameters(case: Case) -> int:
    """Count the parameters of a case's model."""
    decoder, options = import_script()
    assert case.options is not None
    with torch.device("meta"):
        model = decoder.Decoder(options.read_options(case.options.to_json()))
    return sum(param.numel() for param in model.parameters())


def test_every_row_is_a_case_that_says_what_it_leaves_out() -> None:
    cases = read_cases()
    assert len(cases) == 380
    assert all(case.reason for case in cases if case.options is None)
    assert sum(case.options is not None and case.memory is not None for case in cases) >= 40
    assert Counter(case.source for case in cases)["llm-foundry"] == 216


def test_about_half_of_the_rows_of_every_source_are_held_out() -> None:
    expressed = [case for case in read_cases() if case.options is not None]
    for source in {case.source for case in expressed}:
        held_out = [case.held_out for case in expressed if case.source == source]
        assert 0.25 < sum(held_out) / len(held_out) < 0.75, source


def test_models_have_as_many_parameters_as_their_sources_say() -> None:
    published = [row["params"] for row in csv.DictReader(rows.FILE.read_text().splitlines(), delimiter="\t")]
    counted: dict[object, Case] = {}
    for case in read_cases():
        if case.options is not None and published[case.line - 2]:
            counted.setdefault((case.source, published[case.line - 2]), case)
    exact = [case for case in counted.values() if "e9" not in published[case.line - 2]]
    assert len(exact) >= 30
    for case in exact[:: max(1, len(exact) // 12)]:
        assert parameters(case) == int(published[case.line - 2]), case.label
    for case in counted.values():
        if case.source == "nanotron" and case.options is not None and case.options.pp == 1:
            assert abs(parameters(case) / float(published[case.line - 2]) - 1) < 0.01, case.label
