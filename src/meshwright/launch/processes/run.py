"""Run a plan: by one command, which may be srun or mpirun, or by torchelastic."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType

from ...config import environment
from ...config.launch.settings import LaunchSettings
from ..plan import LaunchPlan, worker_command
from .signals import handled_by


def run_plan(settings: LaunchSettings, plan: LaunchPlan, *, replace_process: bool) -> int:
    """Run the plan and return the exit code of the launch.

    With `replace_process`, a plan of one command replaces this process (exec), and the call does not return. Otherwise
    the command runs as a child.
    """
    if plan.method == "elastic":
        from .supervise import supervise

        return supervise(settings, plan)
    command, variables = _command(settings, plan), os.environ | plan.variables
    sys.stdout.flush()
    try:
        if replace_process:
            os.execvpe(command[0], command, variables)
        return _run(command, variables)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{command[0]} is not on the PATH: {plan.method} cannot be used to start.") from error


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Run a command as a child and return its exit code as a shell does; termination signals go to the child."""
    child = subprocess.Popen(command, env=variables)

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends that one to both
            child.send_signal(number)

    with handled_by(forward):
        code = child.wait()
    return code if code >= 0 else 128 - code


def _command(settings: LaunchSettings, plan: LaunchPlan) -> list[str]:
    command = worker_command(settings, plan.script, recorded=False)
    if plan.method == "mpirun":
        total = str(plan.num_processes)
        command = ["mpirun", "--hostfile", str(settings.mpirun_hostfile), "-np", total, *_export_flags(plan), *command]
    elif plan.method == "srun":
        # The same launch once per machine; each reads its rank from Slurm's variables.
        machines = str(plan.num_machines)
        command = ["srun", f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        command += ["--cpu-bind=none", *_all_accelerators(), sys.executable, "-m", "meshwright"]
        command += ["launch", *settings.to_flags(), *plan.script]
    return command


def _all_accelerators() -> list[str]:
    """Undo `--gpus-per-task`, by which each launcher would get the accelerators of one process."""
    number = environment.read("SLURM_GPUS_ON_NODE") if environment.read("SLURM_GPUS_PER_TASK") else None
    return [f"--gpus-per-node={number}"] if number else []


def _export_flags(plan: LaunchPlan) -> list[str]:
    return [word for name in plan.variables for word in ("-x", name)]
