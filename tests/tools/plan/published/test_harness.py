"""Plans of published runs are near to what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sizes import at_night

from .harness import outcome_of, outcomes_of
from .outcomes import FULL, Outcome, quantile, summary, write_outcomes
from .rows import GIB, Case, read_cases

ONE_GPU, SHARDED, LOW_RANK = 35, 2, 343
"""Lines of the file: the whole model on one A100, FSDP2 on eight H100, LoRA on one A100."""


@pytest.mark.parametrize(
    ("line", "memory_within", "rate_within"),
    [(ONE_GPU, 0.02, 0.15), at_night(SHARDED, 0.05, 0.15), at_night(LOW_RANK, 0.1, 1)],
)
def test_a_published_run_is_planned(line: int, memory_within: float, rate_within: float, tmp_path: Path) -> None:
    (case,) = (case for case in read_cases() if case.line == line)
    outcome = outcome_of(case, tmp_path)
    assert not outcome.failure
    assert outcome.memory_error is not None
    assert abs(outcome.memory_error) < memory_within, outcome
    assert abs(outcome.rate_error or 0) < rate_within, outcome
    assert outcome.verdict != FULL


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_errors_over_all_published_rows_are_bounded(tmp_path: Path) -> None:
    outcomes = outcomes_of(read_cases(), tmp_path)
    memory = [
        abs(outcome.memory_error)
        for outcome in outcomes
        if outcome.memory_error is not None and outcome.case.options is not None
        if outcome.case.options.pp == outcome.case.options.cp == 1  # plan_accuracy.md tells of the others
    ]
    rates = [abs(o.rate_error) for o in outcomes if o.rate_error is not None and o.case.held_out]
    assert len(memory) >= 40
    assert quantile(memory, 0.5) < 0.06, summary(outcomes)
    assert quantile(memory, 0.9) < 0.15, summary(outcomes)
    assert quantile(rates, 0.5) < 0.15, summary(outcomes)
    ran = [outcome for outcome in outcomes if outcome.case.source == "llm-foundry" and not outcome.failure]
    assert sum(outcome.verdict == FULL for outcome in ran) < 0.05 * len(ran), summary(outcomes)


def test_outcomes_are_written_and_summed_up_by_source(tmp_path: Path) -> None:
    measured = [Case(number, "a", "run", None, memory=10 * GIB, held_out=number % 2 == 0) for number in range(4)]
    outcomes = [Outcome(case, memory=(10 + case.line) * GIB, verdict=FULL) for case in measured]
    outcomes.append(Outcome(Case(9, "b", "other", None), failure="nobody knows"))
    assert "| a | 4 | 15.0% | 27.0% | +15.0% |" in summary(outcomes)
    assert "| held out | 2 | 10.0% |" in summary(outcomes)
    assert "planned not to fit: 4" in summary(outcomes)
    write_outcomes(outcomes, tmp_path / "outcomes.tsv")
    lines = (tmp_path / "outcomes.tsv").read_text().splitlines()
    assert len(lines) == 6
    assert "+30.0" in lines[4]
    assert lines[5].endswith("nobody knows")
