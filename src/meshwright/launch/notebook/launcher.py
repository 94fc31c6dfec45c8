"""Launch a function from Python: on several processes of a notebook, or with a debugger in one rank."""

from __future__ import annotations

import bdb
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...config.environment import export_settings, patch_environment, read_setting
from ...config.plugins.handlers import InitProcessGroupKwargs
from ...config.settings import check_precision
from ...errors import LaunchError, RuntimeConflictError, UnsupportedSettingError
from ...runtime.group.forks import freeze_inherited_objects
from ...runtime.group.network import local_address_towards, loopback, loopback_variables
from ...runtime.process import ProcessInfo
from ...temporary import temporary_folder
from ..console import loggers_silenced
from ..devices import count_accelerators
from ..machines.preflight import check_port
from ..processes.signals import TERMINATION_SIGNALS, handlers_restored
from .task import NotebookTask, attach_diagnosis, reset_signals, run_task, run_task_on_xla

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["debug_launcher", "notebook_launcher"]

_DEFAULT_PORT = "29500"
_DEBUG_TIMEOUT = timedelta(days=1)
_FAILURE_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
_HANDLED_SIGNALS = ",".join(number.name for number in TERMINATION_SIGNALS)
# With it, torch counts devices by NVML and does not initialise CUDA, after which a process cannot fork.
_COUNT_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    start_method: str | None = None,
) -> Any:
    """Run `function(*args)` on several processes and return what rank 0 returned.

    `num_processes` counts those of this host: one per accelerator unless given, one without accelerators. A single
    process is this one. The workers are forked, so that they have the function and the notebook's data; where an
    accelerator is in use here already, a fork cannot use it and they are spawned (`start_method` chooses; spawning
    needs cloudpickle). On TPUs torch_xla starts them. On one host the port is a free one; with `num_nodes` every host
    calls this with its `node_rank`, and the hosts that do not run rank 0 get None.
    """
    check_precision(mixed_precision, "notebook_launcher(mixed_precision=...)")
    _check_call("notebook_launcher", args, num_processes)
    refuse_nesting("notebook_launcher")
    on_xla = _asks_for_xla(num_processes)
    if num_processes is None and not on_xla:
        with patch_environment(**_COUNT_WITHOUT_CUDA):
            num_processes = (0 if read_setting("cpu") else count_accelerators()) or 1
    with patch_environment(**export_settings({"mixed_precision": mixed_precision})):
        if on_xla or num_processes is None:
            return _launch_on_xla(function, args, num_processes, start_method)
        if num_processes * num_nodes == 1:
            return _call_here(function, args)
        _refuse_existing_state("notebook_launcher")
        method = _start_method(start_method, _accelerator_in_use())
        address = master_addr if num_nodes > 1 else loopback()
        if rdzv_backend == "static" and num_nodes > 1 and max_restarts:
            rdzv_backend = "c10d"  # the hosts that have not failed start their processes again, too
        with _new_task(function, args, method, log_line_prefix_template) as task:
            _run_elastic(
                task,
                nproc_per_node=num_processes,
                min_nodes=num_nodes,
                max_nodes=num_nodes,
                local_addr=address if num_nodes == 1 else local_address_towards(address),
                backend=rdzv_backend,
                rank=node_rank,
                rdzv_endpoint=rdzv_endpoint or f"[{address}]:{_port(use_port, num_nodes)}",
                rdzv_configs=rdzv_conf or {},
                run_id=rdzv_id,
                max_restarts=max_restarts,
                monitor_interval=monitor_interval,
            )
            return task.result()


def debug_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    *,
    debug_rank: int | None = None,
) -> Any:
    """Run `function(*args)` on several CPU processes of this host and return what rank 0 returned.

    With `debug_rank` that rank is the calling process itself, so that `breakpoint()`, pdb and an IDE work there as in
    any program: the other ranks pass by breakpoints and wait for it, for a day if need be.
    """
    _check_call("debug_launcher", args, num_processes)
    if debug_rank is not None and not 0 <= debug_rank < num_processes:
        raise ValueError(f"debug_rank={debug_rank} is none of the ranks 0 to {num_processes - 1}.")
    refuse_nesting("debug_launcher")
    with patch_environment(**export_settings({"cpu": True})):
        if num_processes == 1:
            return _call_here(function, args)
        _refuse_existing_state("debug_launcher")
        with _new_task(function, args, _start_method(None, None)) as task:
            if debug_rank is not None:
                return _run_debugged_rank(task, num_processes, debug_rank)
            _run_elastic(
                task,
                nproc_per_node=num_processes,
                min_nodes=1,
                max_nodes=1,
                local_addr=loopback(),
                backend="static",
                rank=0,
                rdzv_endpoint=f"[{loopback()}]:0",
                rdzv_configs={},
                run_id="debug_launcher",
                max_restarts=0,
            )
            return task.result()


# --- refused calls ----------------------------------------------------------------------------------------------------


def _check_call(launcher: str, args: Sequence[Any], num_processes: int | None) -> None:
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{launcher}() takes args as a tuple, such as args=({args!r},), not {type(args).__name__}.")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"{launcher}() needs num_processes to be 1 or more, not {num_processes}.")


def refuse_nesting(launcher: str) -> None:
    """Refuse to launch in a process that a launcher has started."""
    here = ProcessInfo.from_environment()
    if here.world_size > 1 or read_setting("fork_launched"):
        raise RuntimeConflictError(
            f"{launcher}() was called in rank {here.rank} of {here.world_size} processes that "
            f"{here.launcher or 'another launcher'} has started: every one of them would launch processes of its own. "
            "Call the function itself here, or start this program with plain python."
        )


def _refuse_existing_state(launcher: str) -> None:
    """Refuse to launch where state exists: workers would inherit it, and each would train on its own."""
    import torch.distributed as dist

    from ...runtime.group.runtime import Runtime

    found = None
    if Runtime.existing() is not None:
        found = "An Accelerator or a PartialState exists"
    elif dist.is_available() and dist.is_initialized():
        found = "A process group is open"
    if found is not None:
        raise RuntimeConflictError(
            f"{found} in this process already, so {launcher}() cannot start others: they would inherit it and run "
            "as the only process. The `Accelerator` should only be initialized inside your training "
            "function: restart the kernel (or call PartialState._reset_state()) before launching again."
        )


# --- starting processes -----------------------------------------------------------------------------------------------


def _accelerator_in_use() -> str | None:
    """Return the accelerator type that this process has, or may have, initialised: a fork cannot use it."""
    import torch

    from ...runtime.devices.device import accelerator_type, device_module

    with patch_environment(**_COUNT_WITHOUT_CUDA):
        kind = accelerator_type()
    if kind is None:
        return None
    is_initialized = getattr(device_module(torch.device(kind)), "is_initialized", None)
    return kind if is_initialized is None or is_initialized() else None


def _start_method(requested: str | None, accelerator_in_use: str | None) -> str:
    if requested not in (None, "fork", "spawn"):
        raise ValueError(f'start_method={requested!r} is unknown: choose "fork" or "spawn", or leave it out.')
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    why_not = None if can_fork else "this system has no fork"
    if accelerator_in_use is not None:
        why_not = f"{accelerator_in_use} is in use in this process, and a forked process could not use it"
    if requested == "fork" and why_not is not None:
        raise RuntimeConflictError(
            f'start_method="fork" is not possible: {why_not}. Restart the kernel and touch the accelerator only inside '
            'the launched function, or use start_method="spawn".'
        )
    chosen = requested or ("fork" if why_not is None else "spawn")
    if chosen == "spawn" and find_spec("cloudpickle") is None:
        raise UnsupportedSettingError(
            'start_method="spawn"',
            f"{'it was set' if why_not is None else why_not}, and spawned processes get the function by "
            "cloudpickle, which is not installed.",
            "Run `pip install cloudpickle`, or restart the kernel and touch the accelerator only inside the function.",
        )
    return chosen


def _port(use_port: str | int, num_nodes: int) -> int:
    """Return the port of the rendezvous: on one host 0, for any free port, unless another one was chosen."""
    if num_nodes == 1:
        if str(use_port) == _DEFAULT_PORT:
            return 0
        try:
            check_port(loopback(), int(use_port))
        except LaunchError:
            return 0
    return int(use_port)


@contextmanager
def _new_task(
    function: Callable[..., Any], args: Sequence[Any], start_method: str, line_prefix: str | None = None
) -> Iterator[NotebookTask]:
    if start_method == "fork":
        freeze_inherited_objects()
    with temporary_folder("notebook") as directory:
        yield NotebookTask(
            function=function,
            args=tuple(args),
            directory=directory,
            start_method=start_method,
            line_prefix=line_prefix,
        )


@contextmanager
def _children_killed_on_error() -> Iterator[None]:
    """Kill the processes started inside the block if it is left by an error or a Ctrl-C."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()
        raise


def _asks_for_xla(num_processes: int | None) -> bool:
    """Return whether torch_xla is to start a process for every device: for several, and by default on TPUs."""
    from ...runtime.devices import xla

    if num_processes == 1 or read_setting("cpu") or not xla.is_used():
        return False
    return num_processes is not None or xla.kind_of_hardware() == "TPU"


def _launch_on_xla(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int | None, start_method: str | None
) -> Any:
    """Run the function in processes that torch_xla starts."""
    from ...runtime.devices import xla

    _refuse_existing_state("notebook_launcher")
    method = _start_method(start_method, "xla" if xla.is_initialized() else None)
    with _new_task(function, args, method) as task, _children_killed_on_error():
        try:
            xla.launch(run_task_on_xla, (task, num_processes), method)
        except Exception as error:
            raise (task.failure() or error) from None
        return task.result()


# --- running the function ---------------------------------------------------------------------------------------------


def _call_here(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run the function in this process, and reset the state that it has created."""
    from ...runtime.group.runtime import Runtime

    existed = Runtime.existing() is not None
    try:
        return function(*args)
    finally:
        if not existed:
            Runtime.reset()


def _run_elastic(task: NotebookTask, *, backend: str, rank: int, rdzv_configs: dict[str, Any], **launch: Any) -> None:
    """Run a task on workers of torchelastic."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ..processes.elastic import rendezvous

    variables = {"TORCHELASTIC_SIGNALS_TO_HANDLE": _HANDLED_SIGNALS, **_COUNT_WITHOUT_CUDA}
    rendezvous.register()
    options = {"is_host": rank == 0, "restarts": launch["max_restarts"] > 0}
    ended_by = None
    with (
        patch_environment(**variables),
        handlers_restored(),
        _children_killed_on_error(),
        nullcontext() if launch["max_restarts"] else loggers_silenced(*_FAILURE_LOGGERS),  # restarts stay visible
    ):
        config = LaunchConfig(
            start_method=task.start_method,
            logs_specs=DefaultLogsSpecs(log_dir=str(task.directory / "logs")),
            rdzv_backend=rendezvous.NAME,
            rdzv_configs={"kind": backend, "rank": rank, "options": options, **rdzv_configs},
            **launch,
        )
        try:
            elastic_launch(config, run_task)(task)
        except ChildFailedError as error:
            seen = {rank: failed.exitcode for rank, failed in error.failures.items()}
            failure = task.failure(seen, unseen=_exit_codes(error))
            assert failure is not None  # there is an exit code
            failure.failures = error.failures
            raise failure from None  # torch's own error names the rank that it looked at first, often collateral
        except SignalException as signalled:
            ended_by = signalled
    if ended_by is not None:
        signal.raise_signal(ended_by.sigval)  # for the handler from before: Ctrl-C raises KeyboardInterrupt again
        raise ended_by


def _exit_codes(error: ChildFailedError) -> dict[int, int]:
    """Return the exit codes of the ranks that failed: torch's error has only the one that it looked at first."""
    codes = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        with suppress(AttributeError, ValueError):  # not the frame of torch's launcher
            agent: Any = frame.f_locals.get("agent")
            for worker in agent._worker_group.workers:
                codes[worker.global_rank] = agent._pcontext._pc.processes[worker.local_rank].exitcode
    return {rank: code for rank, code in codes.items() if code not in (None, 0, -signal.SIGTERM)}  # which torch sends


def _run_debugged_rank(task: NotebookTask, num_processes: int, debug_rank: int) -> Any:
    """Run the debugged rank of a task in this process, and the other ranks in processes of their own."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    from ...runtime.group.runtime import Runtime
    from .failures import WorkerFailedError

    excepthook = sys.excepthook
    ranks = [rank for rank in range(num_processes) if rank != debug_rank]
    world = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes, **loopback_variables()}
    with patch_environment(**world), _children_killed_on_error(), loggers_silenced(*_FAILURE_LOGGERS):
        peers = start_processes(  # type: ignore[no-untyped-call]
            _run_peer, (task, ranks), nprocs=len(ranks), join=False, start_method=task.start_method
        )
        sys.excepthook = _ignore_error  # the error is raised here
        try:
            with patch_environment(RANK=debug_rank, LOCAL_RANK=debug_rank):
                result = _call_with_debug_timeout(task)
        except Exception as error:
            failure = task.failure()
            if failure is None:
                attach_diagnosis(error)
            raise error from (failure or error.__cause__)
        finally:
            Runtime.reset()
            sys.excepthook = excepthook  # opening a process group replaces the hook
        try:
            while not peers.join():
                pass
        except ProcessException as error:
            raise task.failure() or WorkerFailedError(ranks[error.error_index], error.msg) from error
        return result if debug_rank == 0 else task.result()


def _ignore_error(*_: Any) -> None:
    """Replace `sys.excepthook` where errors are reported elsewhere."""


def _run_peer(index: int, task: NotebookTask, ranks: Sequence[int]) -> None:
    """Run a rank that is not debugged, without breakpoints and without the debugger's signals."""
    reset_signals(on_interrupt=signal.SIG_DFL)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C at the debugger's prompt is not meant for this process
    sys.breakpointhook = _ignore_breakpoint
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)
    with patch_environment(RANK=ranks[index], LOCAL_RANK=ranks[index]):
        replace(task, function=_call_with_debug_timeout, args=(task,)).run()


def _ignore_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Replace `breakpoint()` in a rank that is not debugged."""


def _call_with_debug_timeout(task: NotebookTask) -> Any:
    """Call the function with a process group whose timeout allows for a rank in the debugger."""
    from ...runtime.group.runtime import Runtime

    rendezvous_file = (task.directory / "rendezvous").as_uri()
    options = InitProcessGroupKwargs(init_method=rendezvous_file, timeout=_DEBUG_TIMEOUT)
    Runtime.start(cpu=True, init_handler=options).barrier()  # no rank may leave before all have joined
    return task.function(*task.args)
