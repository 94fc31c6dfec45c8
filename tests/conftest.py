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


def pytest_configure() -> None:
    """Keep the tests apart from the machine: from its user's config file, and from a shell that ignores Ctrl-C."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start a test of data loaders again, once, where it did not end.

    Data workers are forked from a process with threads; a lock of the C library that a thread held at that moment is
    held in the worker for ever. It was seen once in a gate, in a worker of torchdata that never answered.
    """
    for item in items:
        if item.path.parent.name == "data":
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=["from pytest-timeout"]))


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
