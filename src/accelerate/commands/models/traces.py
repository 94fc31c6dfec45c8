"""Trace a script as chosen ranks of a world, each in a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...accelerator.planning.plan import Part
from ...accelerator.planning.trace import Trace, read_trace
from ...accelerator.planning.tracing.script import Request, trace_script
from ...config.launch.files import find_config
from ...config.launch.options import OPTIONS
from ...config.launch.parser import explicit_options
from ...config.launch.settings import LaunchSettings
from ...launch.plan import make_plan
from ...launch.processes.forked import Failure, World, run_several

_AT_ONCE = 2


class PlanError(ValueError):
    """Report a script that cannot be planned, where it stopped, and what to do.

    The message names the line of the script. Lines that need the numbers of a tensor can be left out of the first two
    steps, or written without them.
    """


class Traces:
    """Trace one script on one world."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        *,
        world_size: int,
        ranks_per_node: int,
        on_accelerators: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = explicit_options(args, OPTIONS) | dict(options or {})
        settings = LaunchSettings.resolve(
            given | {"cpu": True, "num_machines": 1, "machine_rank": 0, "num_processes": world_size},
            find_config(args.config_file),
        )
        self._args = args
        self._plan = make_plan(settings, (args.training_script, *args.training_script_args), None)
        self._as_module = bool(settings.module)
        self._folder = folder
        self._world_size = world_size
        self._ranks_per_node = min(ranks_per_node, world_size)
        self._on_accelerators = on_accelerators
        self._known: dict[Part, Trace] = {}
        torch.set_num_threads(1)
        self._import_before_fork()

    def get(self, parts: Sequence[Part]) -> list[Trace]:
        """Return traces, in the order in which they were asked for; each is made once."""
        missing = [part for part in dict.fromkeys(parts) if part not in self._known]
        worlds = [self._world(part) for part in missing]
        failures = run_several(worlds, self._args.seconds_per_run, _AT_ONCE)
        for part, failure in zip(missing, failures, strict=True):
            output = self._output(part)
            if failure is not None or not output.exists():
                raise PlanError(_explanation(part, failure, self._plan.script[0]))
            self._known[part] = read_trace(output)
            output.unlink()
        return [self._known[part] for part in parts]

    def _world(self, part: Part) -> World:
        request = Request(
            rank=part.rank,
            world_size=self._world_size,
            output=self._output(part),
            blocks=part.blocks,
            on_accelerators=self._on_accelerators,
        )
        here = self._ranks_per_node
        variables = {
            **self._plan.variables,
            "RANK": str(part.rank),
            "LOCAL_RANK": str(part.rank % here),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(here),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # nobody connects
        }
        return World(
            script=self._plan.script,
            as_module=self._as_module,
            processes=1,
            port=1,
            variables=variables,
            folder=self._folder / f"rank_{part.rank}_{part.blocks and part.blocks[0]}",
            before=partial(trace_script, request),
        )

    def _output(self, part: Part) -> Path:
        return self._folder / f"rank_{part.rank}_{part.blocks and part.blocks[0]}" / "trace"

    def _import_before_fork(self) -> None:
        """Import what takes seconds, once for all traces."""
        from ...parallel.pipeline import strategy  # noqa: F401 - and with it FSDP2, DTensor and pipelines

        script = Path(self._args.training_script)
        source = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
        if "transformers" in source:
            with suppress(ImportError):  # the script will say so
                import transformers  # noqa: F401


def _explanation(part: Part, failure: Failure | None, script: str) -> str:
    if failure is None:
        return (
            f"rank {part.rank} ended without an optimizer step. The script must give its model and optimizer to "
            "prepare(), and have enough batches for two steps."
        )
    sys.stderr.write(failure.log[-4000:])
    place = next((line.strip() for line in failure.log.splitlines()[::-1] if f'File "{script}"' in line), "")
    return (
        f"the script {failure.reason} as rank {part.rank}{f' at {place}' if place else ''}. Its output is above. "
        "Planning runs it on tensors without data: what needs their numbers, or a device by name, cannot be planned."
    )
