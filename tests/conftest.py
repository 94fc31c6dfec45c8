from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from accelerate.config import environment
from tests.ranks import close_pools
from tests.ranks.worker import forget_everything

OUT_OF_TIME = ["from pytest-timeout", "did not end within", "not finished after", "TimeoutExpired"]


def pytest_configure() -> None:
    """Keep the tests apart from the machine: from its user's config file, and from a shell that ignores Ctrl-C."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start a test again, once, where it ran out of time; the closing lines name it.

    Time limits are many times what a test takes. On a machine that other guests take the processors from they still
    ran out (one test of 2,700 in a gate, for minutes of no time at all), and a data worker that was forked while a
    thread held a lock of the C library never answers.
    """
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=OUT_OF_TIME))


def pytest_sessionfinish() -> None:
    close_pools()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


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
