from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerate.config import environment
from tests.ranks import close_pools
from tests.ranks.worker import forget_everything


def pytest_sessionfinish() -> None:
    close_pools()


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin as a process that nobody launched and that knows nothing."""
    for launcher in environment.LAUNCHERS:
        for name in (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size):
            if name is not None:
                monkeypatch.delenv(name, raising=False)
    for name, _ in environment.SETTING_VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    forget_everything()
    yield
    forget_everything()
