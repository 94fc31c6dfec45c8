"""The statuses of all members as one text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from meshwright.errors import InvalidDataError
from meshwright.runtime.membership import statuses

STATUSES = ['{"reductions": 7}', '{"reductions": 8}', "null"]


@given(st.dictionaries(st.integers(0, 60), st.sampled_from(STATUSES), min_size=1))
def test_every_rank_gets_its_status_back(texts: dict[int, str]) -> None:
    found = statuses.split(statuses.join(texts), sorted(texts))
    assert found == {rank: json.loads(text) for rank, text in texts.items()}
    assert list(found) == sorted(found)


def test_the_text_does_not_grow_with_the_members() -> None:
    status = json.dumps({"reductions": 123_456, "stepped": True})
    few, many = ({rank: status for rank in range(number) if rank != 5} for number in (10, 10_000))
    assert len(statuses.join(many)) <= len(statuses.join(few)) + 3


@pytest.mark.parametrize(
    "text", ["", "[[]]", "[[1, [[0, 0]]]]", "[[1, [[0, 1e9]]]]", '[[1, [["0", 1]]]]', "[[NaN, [[0, 1]]]]", "[" * 9999]
)
def test_a_text_that_is_not_about_exactly_the_members_is_refused(text: str) -> None:
    with pytest.raises(InvalidDataError, match=r"^the statuses in the store of the run "):
        statuses.split(text, (0, 1))


def test_ranges_that_another_program_wrote_are_not_expanded() -> None:
    for text in ("[[1, [[-99999999999, 99999999999]]]]", json.dumps([[1, [[0, 999]] * 200_000]])):
        with pytest.raises(InvalidDataError, match="of the members"):
            statuses.split(text, range(1000))
