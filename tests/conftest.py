from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from meshwright.config import environment
from tests.ranks import close_pools
from tests.ranks.worker import forget_everything
from tests.sizes import PROFILE

TESTS = Path(__file__).parent


def pytest_runtest_setup() -> None:
    """Forget the name by which a test before called the command."""
    os.environ.pop("MESHWRIGHT_PROGRAM", None)


LONGEST_FIRST = [
    TESTS / path
    for path in (
        "tracking/test_adapters.py",
        "examples/test_examples.py",
        "launch/notebook/test_launcher.py",
        "parallel/pipeline/test_strategy.py",
        "differential/test_differential.py",
        "ecosystem/test_transformers.py",
        "parallel/deepspeed/test_checkpoints.py",
        "parallel/deepspeed/test_strategy.py",
        "watch/hangs/test_faults.py",
        "tools/verify/test_meshes.py",
        "clusters/test_slurm.py",
        "parallel/mesh/tensor/test_plans.py",
        "parallel/test_compilation.py",
        "parallel/test_already_spread.py",
        "test_release.py",
        "launch/machines/test_machines.py",
        "checkpoint/commit/test_copies.py",
        "tracking/test_resuming.py",
        "launch/processes/test_verdict.py",
        "tools/verify/test_faults.py",
        "parallel/mesh/experts/test_spreading.py",
        "launch/processes/test_signals.py",
        "ecosystem/test_other_libraries.py",
        "ecosystem/test_diffusers.py",
        "seeds/test_seed_documents.py",
        "checkpoint/commit/test_supplements.py",
        "checkpoint/commit/test_kills.py",
        "checkpoint/commit/test_faults.py",
        "data/test_properties.py",
        "docs/test_commands.py",
        "tools/selftest/test_report.py",
        "clusters/test_mpi.py",
        "ecosystem/test_trl.py",
        "watch/hangs/test_late_faults.py",
        "parallel/deepspeed/test_trainer.py",
        "docs/test_site.py",
        "watch/stragglers/test_detection.py",
        "xla/test_training.py",
        "xla/test_launch.py",
    )
]
"""A file stays on one test process, which shares its worlds. Files of 30 s and more begin, so that none is left for the
end, when one process would run alone; `.ci/profile` prints what files take."""

OUT_OF_TIME = ["from pytest-timeout", "did not end within", "not finished after", "TimeoutExpired"]


def pytest_configure() -> None:
    """Keep the tests apart from the machine: from its user's config file, and from a shell that ignores Ctrl-C.

    The gate draws the same examples every time; new ones are for the night. Neither judges how fast they are.
    """
    for profile in ("gate", "nightly"):
        hypothesis.settings.register_profile(
            profile,
            derandomize=profile == "gate",
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile(PROFILE)
    dynamic_rendezvous.get_method_name = _name_of_caller
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _name_of_caller(depth: int = 2) -> str:
    """Return the name that torchelastic records, without reading the sources of all frames of pytest."""
    return sys._getframe(depth).f_code.co_name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for the night, begin with long files, and allow a test that runs out of time another try."""
    left_out = {item for item in items if PROFILE == "gate" and item.get_closest_marker("nightly")}
    config.hook.pytest_deselected(items=list(left_out))
    order = {path: number for number, path in enumerate(LONGEST_FIRST)}
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: order.get(item.path, len(order)))
    _allow_another_try(items)


def pytest_collection_finish() -> None:
    """Leave out of later garbage collections what collecting the tests has made: each would walk through all of it."""
    gc.collect()
    gc.freeze()


def _allow_another_try(items: list[pytest.Item]) -> None:
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
