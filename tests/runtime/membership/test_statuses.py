"""The statuses of all members as one text."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from accelerate.runtime.membership import statuses


@given(st.dictionaries(st.integers(0, 60), st.sampled_from(['{"reductions": 7}', '{"reductions": 8}', "null"])))
def test_every_rank_gets_its_status_back(texts: dict[int, str]) -> None:
    found = statuses.split(statuses.join(texts))
    assert found == {rank: json.loads(text) for rank, text in texts.items()}
    assert list(found) == sorted(found)


def test_the_text_does_not_grow_with_the_members() -> None:
    status = json.dumps({"reductions": 123_456, "stepped": True})
    few, many = ({rank: status for rank in range(number) if rank != 5} for number in (10, 10_000))
    assert len(statuses.join(many)) <= len(statuses.join(few)) + 3
