"""Trace a script as chosen ranks of a world, each in a process of its own."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ...config.environment import variable_of
from ...config.launch.files import find_config
from ...config.launch.options import OPTIONS
from ...config.launch.parser import explicit_options
from ...config.launch.settings import LaunchSettings
from ...launch.plan import make_plan
from ...launch.processes.forked import Failure, World, run_several
from .plan import WantedTrace
from .refusals import STILL_RUNNING, PlanError, too_few_steps, why_not
from .searching.changes import change_settings_in_code
from .searching.choices import Choice
from .trace import Trace, read_trace
from .tracing.host.progress import read_progress
from .tracing.script import PROGRESS, TraceRequest, trace_script

_AT_ONCE = 2


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
        choice: Choice | None = None,
    ) -> None:
        given = explicit_options(args, OPTIONS) | dict(options or {})
        settings = LaunchSettings.resolve(
            given | {"cpu": True, "num_machines": 1, "machine_rank": 0, "num_processes": world_size},
            find_config(args.config_file),
        )
        self._args = args
        self._plan = make_plan(settings, (args.training_script, *args.training_script_args), None)
        self._as_module = bool(settings.module)
        self._choice = choice
        self._folder = folder
        self._world_size = world_size
        self._ranks_per_node = min(ranks_per_node, world_size)
        self._on_accelerators = on_accelerators
        self._known: dict[WantedTrace, Trace] = {}
        torch.set_num_threads(1)
        self._import_before_fork()

    def get(self, parts: Sequence[WantedTrace]) -> list[Trace]:
        """Return traces, in the order of the requests; each is made once."""
        missing = [part for part in dict.fromkeys(parts) if part not in self._known]
        worlds = [self._world(part) for part in missing]
        failures = run_several(worlds, self._args.seconds_per_run, _AT_ONCE)
        for part, failure in zip(missing, failures, strict=True):
            output = self._output(part)
            if failure is not None or not output.exists():
                raise _error(part, failure, self._plan.script[0], output, self._world_size)
            self._known[part] = read_trace(output)
            output.unlink()
        return [self._known[part] for part in parts]

    def _world(self, part: WantedTrace) -> World:
        request = TraceRequest(
            rank=part.rank,
            world_size=self._world_size,
            output=self._output(part),
            blocks=part.blocks,
            on_accelerators=self._on_accelerators,
            batch_size=None if self._choice is None else self._choice.batch,
            accumulation=None if self._choice is None else self._choice.accumulation,
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
            "MESHWRIGHT_PLAN": "1",
            variable_of("first_steps"): "off",
        }
        return World(
            script=self._plan.script,
            as_module=self._as_module,
            processes=1,
            port=1,
            variables=variables,
            folder=self._folder / f"rank_{part.rank}_{part.blocks and part.blocks[0]}",
            before=partial(_prepare, request, self._choice, self._args.seconds_per_run),
        )

    def _output(self, part: WantedTrace) -> Path:
        return self._folder / f"rank_{part.rank}_{part.blocks and part.blocks[0]}" / "trace"

    def _import_before_fork(self) -> None:
        """Import what takes seconds, once for all traces."""
        from ...parallel.pipeline import strategy  # noqa: F401 - and with it FSDP2, DTensor and pipelines

        for name, parts in _installed_imports(Path(self._args.training_script)).items():
            with suppress(Exception):  # the script will say so
                module = import_module(name)
                for part in parts:
                    getattr(module, part, None)  # large libraries import their parts on first use


def _installed_imports(script: Path) -> dict[str, list[str]]:
    """Return the modules of installed packages that a script imports at its top, and what it imports from each."""
    names: dict[str, list[str]] = {}
    with suppress(SyntaxError):
        for statement in ast.parse(script.read_bytes()).body if script.is_file() else ():
            if isinstance(statement, ast.Import):
                names |= {alias.name: [] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                names.setdefault(statement.module, []).extend(alias.name for alias in statement.names)
    return {name: parts for name, parts in names.items() if _is_installed(name.partition(".")[0])}


def _is_installed(package: str) -> bool:
    spec = find_spec(package) if package not in sys.builtin_module_names else None
    return spec is not None and (spec.origin or "").startswith(sysconfig.get_path("purelib"))


def _prepare(request: TraceRequest, choice: Choice | None, seconds: float) -> None:
    signal.signal(signal.SIGALRM, _tell_place)
    signal.setitimer(signal.ITIMER_REAL, max(0.9 * seconds, seconds - 5))
    trace_script(request)
    if choice is not None:
        change_settings_in_code(choice)


def _tell_place(number: int, frame: FrameType | None) -> None:
    """Print where the script is shortly before its time is over, so that a message can name the line."""
    print(STILL_RUNNING, file=sys.stderr)
    traceback.print_stack(frame)
    sys.stderr.flush()


def _error(part: WantedTrace, failure: Failure | None, script: str, output: Path, world_size: int) -> PlanError:
    if failure is None:
        progress = read_progress(output.with_suffix(PROGRESS))
        return PlanError(too_few_steps(progress, script, part.rank, world_size))
    return PlanError(f"{why_not(failure.reason, failure.log, script)} (as rank {part.rank})")
