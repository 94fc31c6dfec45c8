"""`meshwright launch --ray`: run a script on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import time

from ....config.launch.on_ray import resources_per_process
from ....config.launch.settings import LaunchSettings
from ....launch.console import notify
from ....launch.plan import LaunchPlan, worker_command
from ....launch.processes.supervise import conclude
from .launcher import connected, make_request, refuse_missing_ray

_LOGS = "above; Ray keeps each rank's output on its node, in the folder logs of its session"
SECONDS_FOR_OUTPUT = 1.0
"""Ray shows what a worker has printed some tenths of a second later, and not after the connection has ended."""


def run_script(settings: LaunchSettings, plan: LaunchPlan) -> int:
    """Run the script, print the verdict, and return the exit code of the launch."""
    refuse_missing_ray(f"ray ({settings.origin('ray')})")
    from .run import Work, run

    with connected(settings.ray_address):
        most, least = settings.num_processes, settings.ray_min_processes
        workers = most if most is None or least is None else (least, most)
        request = make_request(workers, resources_per_process(settings), cpu=settings.cpu)
        without_gpu = {} if "GPU" in request.resources else {"ACCELERATE_USE_CPU": "True"}
        outcome = run(
            Work(
                method="run_script",
                arguments=(_words(settings, plan), os.getcwd(), not settings.no_python),
                variables=plan.variables | without_gpu,
                max_restarts=settings.max_restarts,
                grace_period=settings.grace_period,
            ),
            request,
            notify,
        )
        time.sleep(SECONDS_FOR_OUTPUT)
    return conclude(settings, outcome, out_of_memory=False, num_machines=1, logs=_LOGS)


def _words(settings: LaunchSettings, plan: LaunchPlan) -> list[str]:
    """Return the command without the interpreter: that of the node is used."""
    command = worker_command(settings, plan.script, recorded=False)
    return command if settings.no_python else command[1:]
