"""The runs of a script that `meshwright check --mesh` compares."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import torch

from ...config.environment import VERIFY_FOLDER, variable_of
from ...launch.arguments import checked_settings
from ...launch.plan import make_plan
from ...launch.processes.forked import World, run_forked
from ...program import program_name
from ...runtime.group.network import get_free_port
from ...runtime.loop.random import set_seed
from . import script
from .comparing.comparison import Comparison
from .comparing.findings import Finding
from .recording.call_order import disagreement
from .recording.data import Recording, read_recordings
from .recording.shrinking import shrink_transformers

_STEPS = 2
_SECONDS_PER_RUN = 300.0


class RanksDisagreeError(Exception):
    """The ranks do not make the same calls: `result` says where.

    `meshwright check --mesh` prints it. Let all ranks decide together whether a step is skipped or the loop ends.
    """

    def __init__(self, folder: Path, found: tuple[int, int, str], processes: int) -> None:
        super().__init__(found)
        recordings = read_recordings(folder)
        rank, step, words = found
        sizes = recordings[0].sizes if recordings else {}
        first = Finding(what="calls", module="", name=words, step=step, ranks=[0, rank], cause=_OTHER_CALLS)
        self.result = Comparison(sizes=sizes, processes=processes, steps=step - 1, first=first)


_OTHER_CALLS = (
    "A condition that only one rank meets skips a step or leaves the loop there, and the others wait for it in their "
    "next collective operation. Let all ranks decide together: accelerator.set_trigger() and check_trigger(), or a "
    "value that was gathered."
)


class VerifyRuns:
    """Run one script on the mesh, on one process, and there again with another order of summation."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        settings = checked_settings(args, cpu=True, num_machines=1, machine_rank=0)
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
        return self._run(script.MESH, processes, f"on {processes} processes", {})

    def alone(self, mesh: list[Recording]) -> tuple[list[Recording], list[Recording]]:
        """Run the script without a mesh, on a process for each data rank, twice; the second run measures rounding."""
        ranks = mesh[0].data_ranks
        variables = {script.DATA_RANKS: str(ranks)}
        where = "on one process" if ranks == 1 else f"on one process for each of {ranks} data ranks"
        one = self._run(script.ONE_PROCESS, ranks, where, variables)
        return one, self._run(script.REORDERED, ranks, f"{where}, with another order of summation", variables)

    def _run(self, role: str, processes: int, description: str, variables: dict[str, str]) -> list[Recording]:
        print(f"{program_name()} check --mesh: {description} …", file=sys.stderr, flush=True)
        folder = self._folder / role
        variables = {
            **self._plan.variables,
            **variables,
            VERIFY_FOLDER: str(folder),
            variable_of("first_steps"): "off",
            script.ROLE: role,
            script.STEPS: str(_STEPS if self._args.steps is None else self._args.steps),
        }
        world = World(
            script=self._plan.script,
            as_module=self._as_module,
            processes=processes,
            port=get_free_port(),
            variables=variables,
            folder=folder,
            number=None if role == script.MESH else script.DATA_RANK,
            before=self._before_script,
        )
        failure = run_forked(world, self._args.seconds_per_run or _SECONDS_PER_RUN)
        if found := disagreement(folder, failed=failure is not None):
            raise RanksDisagreeError(folder, found, processes)
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
                import transformers

                if "Trainer" in source:
                    _ = transformers.Trainer  # imported on first use

    def _before_script(self) -> None:
        """Seed a script that does not do so itself, and shrink its models."""
        set_seed(0)
        script.watch_clipping()
        if not self._args.full_size:
            shrink_transformers(self._plan.processes_here)
