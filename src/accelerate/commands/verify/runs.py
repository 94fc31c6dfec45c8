"""The runs of a script that `accelerate verify-parallel` compares."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import torch

from ...accelerator.verification import script
from ...accelerator.verification.recording.data import Recording, read_recordings
from ...accelerator.verification.recording.shrinking import shrink_transformers
from ...config.environment import VERIFY_FOLDER
from ...config.launch.files import find_config
from ...config.launch.options import OPTIONS
from ...config.launch.parser import explicit_options
from ...config.launch.settings import LaunchSettings
from ...launch.plan import free_port, make_plan
from ...launch.processes.forked import World, run_forked
from ...runtime.loop.random import set_seed


class Runs:
    """Run one script on the mesh, on one process, and there again with another order of summation."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        options = explicit_options(args, OPTIONS) | {"cpu": True, "num_machines": 1, "machine_rank": 0}
        settings = LaunchSettings.resolve(options, find_config(args.config_file))
        self._args = args
        self._plan = make_plan(settings, (args.training_script, *args.training_script_args), None)
        self._as_module = bool(settings.module)
        self._folder = folder
        if self._plan.processes_here < 2:
            raise ValueError("there is nothing to compare on one process: give --num_processes and the axes of a mesh.")
        torch.set_num_threads(1)
        self._import_before_fork()

    def on_mesh(self) -> list[Recording]:
        """Run the script on the mesh, and return the recording of every rank."""
        processes = self._plan.processes_here
        mesh = self._run(script.MESH, processes, f"on {processes} processes", {})
        if mesh[0].num_optimizers != 1 and mesh[0].data_ranks > 1:
            raise ValueError(
                f"the script prepared {mesh[0].num_optimizers} optimizers, and this mesh has {mesh[0].data_ranks} data "
                "ranks: one process can stand for several data ranks with one optimizer only. Verify the script on a "
                "mesh of tp, cp or pp alone."
            )
        return mesh

    def on_one_process(self, mesh: list[Recording]) -> tuple[Recording, Recording]:
        """Run the script on one process with the work of all data ranks, twice; the second run measures rounding."""
        passes = [str(len(step.losses)) for step in mesh[0].steps]
        variables = {script.DATA_RANKS: str(mesh[0].data_ranks), script.PASSES: ",".join(passes)}
        one = self._run(script.ONE_PROCESS, 1, "on one process", variables)
        reordered = self._run(script.REORDERED, 1, "on one process, with another order of summation", variables)
        return one[0], reordered[0]

    def _run(self, role: str, processes: int, description: str, variables: dict[str, str]) -> list[Recording]:
        print(f"accelerate verify-parallel: {description} …", file=sys.stderr, flush=True)
        folder = self._folder / role
        variables = {
            **self._plan.variables,
            **variables,
            VERIFY_FOLDER: str(folder),
            script.ROLE: role,
            script.STEPS: str(self._args.steps),
        }
        world = World(
            script=self._plan.script,
            as_module=self._as_module,
            processes=processes,
            port=free_port(),
            variables=variables,
            folder=folder,
            before=self._before_script,
        )
        failure = run_forked(world, self._args.seconds_per_run)
        if failure is not None:
            sys.stderr.write(failure.log[-6000:])
            raise ValueError(
                f"the script failed {description}: rank {failure.rank} {failure.reason}. Its output is above."
            )
        recordings = read_recordings(folder)
        if len(recordings) < processes or not all(recording.steps for recording in recordings):
            raise ValueError(
                f"no optimizer step was seen {description}. The script must give its optimizer to prepare(), call "
                "accelerator.backward, and have enough batches for a step of all data ranks."
            )
        return recordings

    def _import_before_fork(self) -> None:
        """Import what takes seconds, once for all runs."""
        from ...parallel.pipeline import strategy  # noqa: F401 - and with it FSDP2, DTensor and pipelines

        script = Path(self._args.training_script)
        source = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
        if "transformers" in source:
            with suppress(ImportError):  # the script will say so
                import transformers  # noqa: F401

    def _before_script(self) -> None:
        """Seed a script that does not do so itself, and shrink its models."""
        set_seed(0)
        script.watch_clipping()
        if not self._args.full_size:
            shrink_transformers(self._plan.processes_here)
