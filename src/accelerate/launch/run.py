"""Carry out a plan: in the place of this process, by torchelastic, or by the batch system's own starter."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ..config import environment
from ..config.launch_settings import LaunchSettings
from .plan import Plan, command_of


def carry_out(settings: LaunchSettings, plan: Plan) -> int:
    """Run the plan and return the exit code of the launch."""
    if plan.way != "elastic":
        sys.stdout.flush()
        _replace_this_process(settings, plan)
    from .supervise import supervise

    return supervise(settings, plan)


def _replace_this_process(settings: LaunchSettings, plan: Plan) -> NoReturn:
    command = command_of(settings, plan.script, recorded=False)
    if plan.way == "mpirun":
        total = str(plan.num_processes)
        command = ["mpirun", "--hostfile", str(settings.mpirun_hostfile), "-np", total, *_exported(plan), *command]
    elif plan.way == "srun":
        # The same launch once per machine; Slurm then tells each which one it is.
        machines = str(plan.num_machines)
        command = ["srun", f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        command += ["--cpu-bind=none", *_all_accelerators(), sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        command += ["launch", *settings.as_words(), *plan.script]
    try:
        os.execvpe(command[0], command, os.environ | plan.variables)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{command[0]} is not on the PATH: {plan.way} cannot be used to start.") from error


def _all_accelerators() -> list[str]:
    """Undo `--gpus-per-task`, by which each launcher would get the accelerators of one process."""
    number = environment.read("SLURM_GPUS_ON_NODE") if environment.read("SLURM_GPUS_PER_TASK") else None
    return [f"--gpus-per-node={number}"] if number else []


def _exported(plan: Plan) -> list[str]:
    return [word for name in plan.variables for word in ("-x", name)]
