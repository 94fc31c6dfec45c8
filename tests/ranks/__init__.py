"""A test bench for real process groups: warm gloo workers that are reused between tests.

    @ranks(2, 4)
    def test_gather_keeps_rank_order():      # the body runs on every rank of a world of 2, then of 4
        ...

    traces = run_on_ranks(2, train, steps=50)    # or from inside a plain test: one return value per rank

A failing rank's traceback is the test's failure; ranks that it leaves waiting are ended. A world that exceeds its
time limit is ended too, and the failure shows where every rank was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from .pool import RankFailure, WorkerPool, close_pools, new_pool, shared_pool

__all__ = ["RankFailure", "WorkerPool", "close_pools", "new_pool", "ranks", "run_on_ranks", "shared_pool"]


def run_on_ranks(
    world_size: int, function: Callable[..., Any], /, *, time_limit: float = 200.0, **kwargs: Any
) -> list[Any]:
    """Run a module-level function on every rank of a world and return what each rank returned."""
    return shared_pool().run(world_size, function, kwargs, time_limit=time_limit)


def ranks(*world_sizes: int, time_limit: float = 200.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body on every rank of each given world size.

    The body may ask for fixtures (their values must pickle) and for `world_size`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def on_every_rank(world_size: int, **fixtures: Any) -> None:
            if wants_size:
                fixtures["world_size"] = world_size
            shared_pool().run(world_size, on_every_rank, fixtures, time_limit=time_limit)

        parameters = [p for p in signature.parameters.values() if p.name != "world_size"]
        asked = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        on_every_rank.__signature__ = signature.replace(parameters=[*parameters, asked])  # type: ignore[attr-defined]
        on_every_rank.rank_body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(on_every_rank)

    return decorate
