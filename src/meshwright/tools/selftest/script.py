"""`meshwright test`: check processes, collectives, data and training on this machine.

    meshwright launch -m meshwright.tools.selftest.script [--outcomes FILE]

Every process runs the checks of `checks.py` one after the other; rank 0 prints the outcomes. A rank that fails a check
leaves the process group, which releases ranks that wait for it, and all ranks open a new group for the next check.
Outcomes are exchanged through a separate store, so that they arrive even if the group is broken. With `--outcomes`
there are more checks and measurements, and rank 0 writes what was found to the file: see `report.py`.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import platform
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ... import __version__
from ...config.environment import patch_environment, read
from ...runtime.process import ProcessInfo
from ...untrusted import read_message
from .checks import CHECKS, Check, UnexpectedResult
from .speed import MEASUREMENTS

if TYPE_CHECKING:
    from torch import Tensor

    from ...accelerator import Accelerator

TIME_LIMIT = timedelta(seconds=60)
_STORE_TIMEOUT = 1.5 * TIME_LIMIT
_MAX_SHOWN_FAILURES = 4


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """The outcome of one check on one rank."""

    rank: int
    passed: bool
    text: str
    """The evidence, or the reason."""
    seconds: float
    ended: float
    """Time of the end, by the rank's clock: the first failure explains the others."""


class Bench:
    """The processes under test, as one of them sees them."""

    def __init__(self) -> None:
        from ...accelerator import Accelerator
        from ...config.plugins.handlers import InitProcessGroupKwargs

        self.accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIME_LIMIT)])
        self.rank = self.accelerator.process_index
        self.device = self.accelerator.device
        self.world_size = self.accelerator.num_processes
        self.ranks = range(self.world_size)
        self.store = self._open_store()
        self.num_groups = 1

    def _open_store(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from ...runtime.collectives.operations import broadcast_object_list
        from ...runtime.group.network import loopback
        from ...runtime.group.stores import host_store

        address = self.accelerator.state._runtime.process.rendezvous_address()
        host = (urlsplit(address).hostname if address is not None else read("MASTER_ADDR")) or loopback()
        server = host_store(host, 0, _STORE_TIMEOUT) if self.rank == 0 else None
        (port,) = broadcast_object_list([server.port if server is not None else None])
        return server or TCPStore(host, port, timeout=_STORE_TIMEOUT, wait_for_workers=False)

    def tensor(self, values: list[Any]) -> Tensor:
        """Return a tensor on this process's device."""
        import torch

        return torch.tensor(values, device=self.device)

    def new_accelerator(self, accumulation: int = 1, **data: Any) -> Accelerator:
        """Return another Accelerator, in full precision, for a check that needs its own settings."""
        from ...accelerator import Accelerator
        from ...config.plugins.handlers import DataLoaderConfiguration

        return Accelerator(
            mixed_precision="no",
            gradient_accumulation_steps=accumulation,
            dataloader_config=DataLoaderConfiguration(**data),
        )

    def key(self, name: str) -> str:
        """Return a key of the store that belongs to the current process group."""
        return f"group {self.num_groups}/{name}"

    def leave_group(self) -> None:
        """Leave the process group, so that no rank waits for this one."""
        import torch.distributed as dist

        from ...runtime.group.runtime import Runtime

        # Before the group: DDP's reducer would free it with Python's lock, for which a thread of the group waits.
        with suppress(Exception):  # of a save in the background, after a check that failed
            self.accelerator.free_memory()
        Runtime.reset()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # models of the failed check may still hold the group open

    def reopen_group(self, **settings: Any) -> None:
        """Open a new process group, with an Accelerator of these settings."""
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from ...accelerator import Accelerator
        from ...runtime.devices.device import collective_backend

        self.leave_group()
        self.num_groups += 1
        if self.world_size > 1:
            dist.init_process_group(
                collective_backend(self.device, None),
                store=PrefixStore(self.key("rendezvous"), self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=TIME_LIMIT,
            )
        self.accelerator = Accelerator(**settings)

    def run(self, name: str, check: Check) -> list[CheckOutcome]:
        """Run a check and return the outcomes of all ranks."""
        start = time.perf_counter()
        try:
            text, passed = check(self), True
        except Exception as error:
            text, passed = _reason(error), False
        seconds = time.perf_counter() - start
        mine = CheckOutcome(rank=self.rank, passed=passed, text=text, seconds=seconds, ended=time.time())
        if not passed:
            self.leave_group()
        outcomes = self.exchange(name, mine)
        if not all(outcome.passed for outcome in outcomes) and not _is_hanging(outcomes):
            self.reopen_group()
        return outcomes

    def exchange(self, name: str, mine: CheckOutcome) -> list[CheckOutcome]:
        """Exchange the outcomes of a check between all ranks."""
        self.store.set(f"{name}/{self.rank}", json.dumps(asdict(mine)))
        outcomes = []
        for rank in self.ranks:
            try:
                outcomes.append(read_message(self.store, f"{name}/{rank}", CheckOutcome))
            except RuntimeError:
                seconds = _STORE_TIMEOUT.total_seconds()
                silent = CheckOutcome(rank=rank, passed=False, text="no answer", seconds=seconds, ended=time.time())
                outcomes.append(silent)
                self.store.set_timeout(timedelta(seconds=1))  # the next ranks had the same time to answer
        return outcomes

    def shut_down(self) -> None:
        """Leave the group; rank 0 keeps the store until the others are done."""
        self.leave_group()
        with suppress(RuntimeError):
            self.store.set(f"done/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"done/{rank}" for rank in self.ranks], timedelta(seconds=5))


def _is_hanging(outcomes: list[CheckOutcome]) -> bool:
    return max(outcome.seconds for outcome in outcomes) >= TIME_LIMIT.total_seconds()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    message = lines[0][:160] if lines else ""
    if isinstance(error, UnexpectedResult):
        return message
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message} ({Path(where.filename).name}, line {where.lineno})"


def _facts(bench: Bench) -> dict[str, Any]:
    import torch

    here = bench.accelerator
    return {
        "processes": bench.world_size,
        "device": here.device.type + (f" with {here.state.backend}" if here.state.backend is not None else ""),
        "settings": f"mixed_precision={here.mixed_precision}, {torch.get_num_threads()} CPU thread(s) per process",
    }


def _header(bench: Bench, hosts: list[str]) -> str:
    import torch

    facts = {
        "versions": f"meshwright {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}",
        "hosts": ", ".join(f"{host} ({count} of {len(hosts)} processes)" for host, count in Counter(hosts).items()),
        **_facts(bench),
    }
    del facts["processes"]
    return "\n".join(f"{name:<10}{fact}" for name, fact in facts.items())


def _row(name: str, outcomes: list[CheckOutcome], mark: str = "✓") -> str:
    seconds = max(outcome.seconds for outcome in outcomes)
    failures = sorted((outcome for outcome in outcomes if not outcome.passed), key=lambda outcome: outcome.ended)
    text = outcomes[0].text
    if failures:
        mark = "✗"
        text = "failed on rank " + ", ".join(str(failure.rank) for failure in failures)
    rows = [f"{mark} {name:<20}{seconds * 1e3:>7.0f} ms  {text}"]
    rows += [f"    rank {failure.rank}: {failure.text}" for failure in failures[:_MAX_SHOWN_FAILURES]]
    if len(failures) > _MAX_SHOWN_FAILURES:
        rows.append(f"    and {len(failures) - _MAX_SHOWN_FAILURES} ranks more")
    return "\n".join(rows)


@dataclass(frozen=True)
class Results:
    """What all checks and measurements of a run found, by name."""

    checks: dict[str, list[CheckOutcome]]
    measurements: dict[str, list[CheckOutcome]]
    num_not_run: int
    """Checks after one that hangs."""
    hosts: list[str]
    """By rank."""
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The names of the failed checks."""
        return [name for name, found in self.checks.items() if not all(outcome.passed for outcome in found)]


def run(bench: Bench, *, in_full: bool = False) -> Results:
    """Run all checks, print the outcomes on rank 0, and return them."""

    def print_once(text: str) -> None:
        if bench.rank == 0:
            print(text, flush=True)

    checks, measurements = CHECKS, MEASUREMENTS
    if in_full:
        from .meshes import mesh_checks
        from .speed import COMPARISONS
        from .state import state_checks

        checks = checks | mesh_checks(bench.world_size) | state_checks(bench.world_size)
        measurements = measurements | COMPARISONS
    start = time.perf_counter()
    hosts = [outcome.text for outcome in bench.run("hosts", lambda bench: socket.gethostname())]
    print_once(_header(bench, hosts) + "\n")
    found: dict[str, list[CheckOutcome]] = {}
    measured: dict[str, list[CheckOutcome]] = {}
    for name, check in checks.items():
        found[name] = bench.run(name, check)
        print_once(_row(name, found[name]))
        if _is_hanging(found[name]):
            print_once(f"  the other {len(checks) - len(found)} checks were not run: a rank hangs")
            break
    else:
        for name, measure in measurements.items():
            measured[name] = bench.run(name, measure)
            print_once(_row(name, measured[name], mark="·"))
    results = Results(found, measured, len(checks) - len(found), hosts, time.perf_counter() - start)
    verdict = f"failed: {', '.join(results.failed)};" if results.failed else "passed:"
    processes = f"{bench.world_size} process" + ("es" if bench.world_size > 1 else "")
    print_once(f"\n{verdict} {len(found)} checks on {processes} in {results.seconds:.1f} s")
    return results


def main() -> None:
    """Run the self-test in this process; rank 0 ends with exit code 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="meshwright.tools.selftest.script")
    parser.add_argument("--outcomes", metavar="FILE", help="run all checks, and write what they found to this file")
    args = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not have ✓
    with patch_environment(MESHWRIGHT_HANG_SECONDS="0"):  # here a hang is an outcome, and must not end the run
        _check(args.outcomes)


def _check(file: str | None) -> None:
    try:
        bench = Bench()
    except Exception as error:
        rank = ProcessInfo.from_environment().rank
        raise SystemExit(f"✗ rank {rank} could not join the others: {_reason(error)}") from error
    results = run(bench, in_full=file is not None)
    if file is not None and bench.rank == 0:
        facts = _facts(bench) | asdict(results)
        Path(file).write_text(json.dumps(facts), encoding="utf-8")
    bench.shut_down()
    if results.failed and bench.rank == 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
