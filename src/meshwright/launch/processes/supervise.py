"""Run several processes: check the rendezvous, run torchelastic, and report how the run ended."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.environment import CHECK, CHECK_FAILED_CODE, patch_environment, read, take
from ...config.launch.settings import LaunchSettings
from ...errors import REQUEUE_EXIT_CODE, LaunchError
from ...runtime.group.network import is_local_address, local_address_towards, loopback
from ...temporary import new_folder, remove_folder
from ..console import notify
from ..machines import preflight
from ..machines.memory import copies_of
from ..plan import LaunchPlan, worker_command
from .guard import Guard
from .signals import exit_at_once, handled_by
from .verdict import judge, panel
from .worker import LAUNCHER_PID, TRACEBACK_FILE_NAME

if TYPE_CHECKING:
    from .elastic.job import LocalOutcome


def supervise(settings: LaunchSettings, plan: LaunchPlan) -> int:
    """Run the processes of this machine by torchelastic, print the verdict, and return the exit code."""
    if not (settings.module or settings.no_python or Path(plan.script[0]).exists()):
        raise LaunchError(f"There is no script {plan.script[0]} in {Path.cwd()}.")
    with handled_by(exit_at_once):
        guard = Guard()  # starts during the rendezvous check and the import of torch
        _check_rendezvous(plan, take(preflight.SECRET_VARIABLE))
        # The launcher reports a lost machine itself; torch's store would print its C++ stack.
        silence = {} if settings.debug else {"TORCH_CPP_LOG_LEVEL": read("TORCH_CPP_LOG_LEVEL") or "ERROR"}
        with patch_environment(**silence):
            from .elastic import run  # noqa: F401
    kept = Path(settings.log_dir).expanduser() if settings.log_dir else None
    folder = kept or new_folder("logs")
    kills_before = _out_of_memory_kills()
    variables = plan.variables | {LAUNCHER_PID: str(os.getpid())}
    try:
        with patch_environment(**variables):
            outcome = _run(settings, plan, folder, guard)
        out_of_memory = outcome.failed and _out_of_memory_kills() > kills_before
        told = outcome.failed and not settings.quiet
        logs = str(kept) if kept else _kept_tracebacks(folder) if told else None
        return conclude(settings, outcome, out_of_memory=out_of_memory, num_machines=plan.num_machines, logs=logs)
    finally:
        if kept is None:
            remove_folder(folder)


def _kept_tracebacks(folder: Path) -> str | None:
    """Copy the tracebacks of a hang out of a folder that is removed; return where they are, in words."""
    files = sorted(folder.rglob(TRACEBACK_FILE_NAME.format(rank="*")))
    if not files:
        return None
    place = Path(tempfile.mkdtemp(prefix="meshwright-tracebacks-"))
    for file in files:  # in the order of attempts: the last one stays
        shutil.copyfile(file, place / file.name)
    return f"above; the tracebacks are in {place}"


def conclude(
    settings: LaunchSettings, outcome: LocalOutcome, *, out_of_memory: bool, num_machines: int, logs: str | None
) -> int:
    """Say how the processes ended, if they did not simply end; return the exit code of the launch."""
    if outcome.asks_for_restart:
        notify(f"the processes saved and left, to be started again (exit code {REQUEUE_EXIT_CODE}).")
        return REQUEUE_EXIT_CODE
    if outcome.signal is not None:
        return 128 + outcome.signal if outcome.failed else 0
    if not outcome.failed:
        return 0
    verdict = judge(outcome.endings, out_of_memory=out_of_memory)
    is_checked = CHECK in (settings.instruments or "").split(",")
    if is_checked and verdict.exit_code == CHECK_FAILED_CODE and verdict.culprit.signal_name is None:
        return CHECK_FAILED_CODE  # the findings were printed
    if settings.quiet:
        notify(verdict.headline)
    else:
        drawn = panel(
            verdict,
            machine_rank=outcome.machine_rank,
            num_machines=num_machines,
            logs=logs,
            attempts=outcome.attempts,
        )
        print(drawn, file=sys.stderr, flush=True)
    return verdict.exit_code


def _check_rendezvous(plan: LaunchPlan, secret: str) -> None:
    """Check ports and the other machines, before anything slow."""
    if plan.num_machines == 1:
        if not plan.port_is_free:
            preflight.check_port(plan.address, plan.port)
    elif plan.backend == "static":
        own = preflight.MachineReport(
            machine_rank=plan.machine_rank,
            num_machines=plan.num_machines,
            processes_here=plan.processes_here,
            host=socket.gethostname(),
        )
        preflight.wait_for_all_machines(
            own, plan.address, plan.port, plan.hosts, comes_up_late=plan.comes_up_late, secret=secret
        )
    elif not is_local_address(plan.address):
        preflight.check_reachable(plan.address, plan.port, comes_up_late=plan.comes_up_late)


def _run(settings: LaunchSettings, plan: LaunchPlan, folder: Path, guard: Guard) -> LocalOutcome:
    from .elastic.job import ElasticJob, PortInUse
    from .elastic.run import run

    several = plan.num_machines > 1
    tee, redirects = settings.tee, settings.redirects
    if settings.log_dir and tee == redirects == "0":
        tee, redirects = ("0:3" if plan.machine_rank == 0 else "0"), "3"
    job = ElasticJob(
        command=tuple(worker_command(settings, plan.script, recorded=True)),
        processes_here=plan.processes_here,
        min_machines=plan.min_machines,
        max_machines=plan.num_machines,
        machine_rank=plan.machine_rank,
        address=plan.address,
        port=plan.port,
        backend=plan.backend,
        rendezvous_settings=_rendezvous_settings(settings),
        local_address=local_address_towards(plan.address) if several else loopback(),
        run_id=_run_id(plan),
        role=settings.role,
        max_restarts=settings.max_restarts,
        survive=settings.survive,
        monitor_interval=settings.monitor_interval,
        grace_period=settings.grace_period,
        log_dir=folder,
        tee=tee,
        redirects=redirects,
        line_prefix=f"[{socket.gethostname()} rank ${{rank}}] " if several else "[rank ${rank}] ",
        debug=settings.debug,
        is_rendezvous_host=plan.machine_rank == 0 if plan.backend == "static" else is_local_address(plan.address),
    )
    try:
        with copies_of(settings):
            return run(job, guard)
    except PortInUse:
        if not plan.port_is_free:
            raise LaunchError(
                f"Port {plan.port} was taken while the run started: choose another --main_process_port."
            ) from None
        return _run(settings, plan.on_another_port(), folder, guard)


def _rendezvous_settings(settings: LaunchSettings) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in settings.rdzv_conf.split(",") if pair.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError(f"--rdzv_conf {settings.rdzv_conf!r} cannot be read: write key=value,key=value.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _run_id(plan: LaunchPlan) -> str:
    """Return an id that all machines of this run share."""
    return uuid.uuid4().hex[:8] if plan.num_machines == 1 else f"meshwright-{plan.port}"


def _out_of_memory_kills() -> int:
    """Return the kernel's count of out-of-memory kills; 0 where it has no such counter."""
    try:
        counters = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0
