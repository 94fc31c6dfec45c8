import pytest

from meshwright.tools.plan.timing.depth import combined, extrapolated
from meshwright.tools.plan.timing.step import Timing


def test_every_number_grows_with_the_blocks() -> None:
    two = Timing(1.0, phases={"forward": 0.5}, calls={"all_gather dp_shard": 4})
    four = Timing(1.5, phases={"forward": 0.75}, calls={"all_gather dp_shard": 6, "all_reduce tp": 2})
    eight = extrapolated(two, four, 3)
    assert eight.seconds == pytest.approx(2.5)
    assert eight.phases == pytest.approx({"forward": 1.25})
    assert eight.calls == pytest.approx({"all_gather dp_shard": 10, "all_reduce tp": 6})


def test_nothing_becomes_negative() -> None:
    assert extrapolated(Timing(1.0, exposed={"a": 1.0}), Timing(1.1, exposed={"a": 0.5}), 4).exposed == {"a": 0.0}


def test_the_mean_of_ranks_has_the_numbers_of_all() -> None:
    mean = combined([(0.5, Timing(1.0, kinds={"matmul": 1.0})), (0.5, Timing(3.0, kinds={"attention": 2.0}))])
    assert (mean.seconds, mean.kinds) == (2.0, {"matmul": 0.5, "attention": 1.0})
