"""Search for a better way to spread a run, and propose launches: `meshwright plan --search`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from ...config.launch.files import find_config
from ...config.launch.options import BY_NAME, OPTIONS, as_flags
from ...config.launch.parser import explicit_options
from ...config.launch.settings import LaunchSettings
from ...launch.config_files import config_from_options
from ...program import program_name
from ...runtime.devices.catalogue import DeviceCluster
from .memory.fit import EXPANDABLE
from .memory.levers import RECOMPUTE as RECOMPUTE_LEVER
from .plan import MORE, WantedTrace, plan_run
from .refusals import PlanError
from .result import Candidate, Plan
from .searching.changes import changes_of
from .searching.choices import Choice, Space, choice_of
from .searching.estimates import Estimates
from .searching.search import PlanSearch, Tried
from .trace import GRADIENTS, OPTIMIZER, WEIGHTS, Trace
from .traces import Traces

_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_OFFLOAD = "fsdp_offload_params"
_OFFLOADED = "state on the host (not timed)"
_OTHER_AXES = ("sp", "ep")

MakeTraces = Callable[..., Traces]
"""Called with a folder, `options` and `choice`."""


class Proposals:
    """Candidates for one script on one cluster."""

    def __init__(self, args: argparse.Namespace, cluster: DeviceCluster, folder: Path, make_traces: MakeTraces) -> None:
        self._args = args
        self._cluster = cluster
        self._folder = folder
        self._make_traces = make_traces
        self._given = explicit_options(args, OPTIONS)
        self._settings = LaunchSettings.resolve(self._given, find_config(args.config_file))
        self._as_mesh = bool(self._settings.resolved["use_parallelism_config"].value)

    def find(self, plan: Plan, traces: Traces) -> list[Candidate]:
        """Search, and return candidates, the best first."""
        trace = traces.get([WantedTrace(rank=0, blocks=MORE)])[0]
        timing = plan.ranks[0].timing
        assert timing is not None
        if set(trace.axes) & set(_OTHER_AXES) or any(
            f"parallelism_config_{axis}_size" in self._given for axis in _OTHER_AXES
        ):
            raise PlanError("--search varies dp_replicate, dp_shard, tp, cp and pp: leave sp_size and ep_size out.")
        base = choice_of(trace)
        saves = next((lever.saves for lever in plan.levers if lever.name == RECOMPUTE_LEVER), 0.0)
        estimates = Estimates(base, trace, plan.ranks[0].memory, timing, self._cluster, saves)
        search = PlanSearch(estimates, self._evaluate, _report, self._args.search_limit)
        found = search.run(self._space(trace, base, plan).choices(), plan)
        candidates = [self._candidate(each, base, trace) for each in found]
        if not any(each.fits for each in found):
            candidates = [*self._offloaded(found, base, trace), *candidates]
        return candidates

    def _space(self, trace: Trace, base: Choice, plan: Plan) -> Space:
        traits = trace.traits
        return Space(
            world_size=trace.world_size,
            ranks_per_node=self._cluster.node.devices,
            base=base,
            samples=plan.samples,
            blocks=trace.all_blocks,
            traits=traits,
            recomputes_itself=not traits.recomputes and any(event.recomputed for event in trace.operations),
            sharded=bool(self._settings.resolved["use_fsdp"].value) or "fsdp_plugin" in traits.in_code,
            fixed=self._given,
        )

    def _evaluate(self, choice: Choice) -> Plan:
        """Trace a choice by the same code as the script as it is."""
        folder = self._folder / str(abs(hash(choice)))
        traces = self._make_traces(folder, options=choice.options(as_mesh=self._as_mesh), choice=choice)
        plan = plan_run(traces.get, self._args.training_script, self._cluster, brief=True)
        trace = traces.get([WantedTrace(rank=0, blocks=MORE)])[0]
        if choice_of(trace) != choice:
            raise PlanError(f"the script ran as {choice_of(trace)}: its own code decides.")
        return plan

    def _candidate(self, tried: Tried, base: Choice, trace: Trace) -> Candidate:
        found = tried.candidate()
        if tried.choice == base:
            found.labels.append("as it is")
        found.changes = changes_of(tried.choice, base, trace.traits.in_code, self._args.training_script_args)
        options = tried.choice.options(as_mesh=self._as_mesh)
        if found.fits:
            self._propose(found, options, _EXPANDABLE if tried.fit.verdict == EXPANDABLE else "")
        return found

    def _offloaded(self, found: list[Tried], base: Choice, trace: Trace) -> list[Candidate]:
        """Return what would fit with all state on the host. This is an estimate, and the time of it is not known."""
        candidates = []
        for tried in found:
            owned = tried.plan.largest.memory.peak.bytes
            state = sum(owned.get(owner, 0.0) for owner in (WEIGHTS, GRADIENTS, OPTIMIZER))
            if tried.choice.shards == 1 or tried.fit.needed - state > tried.fit.available:
                continue
            candidate = replace(
                self._candidate(tried, base, trace),
                allocated=tried.fit.allocated - state,
                reserved=tried.fit.needed - state,
                rates=None,
                fits=True,
            )
            candidate.labels = [*candidate.labels, _OFFLOADED]
            self._propose(candidate, {**tried.choice.options(as_mesh=self._as_mesh), _OFFLOAD: "true"})
            candidates.append(candidate)
        return candidates

    def _propose(self, candidate: Candidate, options: Mapping[str, Any], variable: str = "") -> None:
        """Add the command and the file of a launch."""
        values = self._with_effect(self._given | self._hardware() | self._said(options))
        candidate.settings = values
        script = [self._args.training_script, *self._args.training_script_args]
        file = [] if self._args.config_file is None else ["--config_file", self._args.config_file]
        launch = ["meshwright", "launch", *file, *as_flags(values), *script]
        candidate.command = f"{variable} {shlex.join(launch)}".strip()
        candidate.yaml = self._yaml(values, variable)

    def _said(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options without those that a launch takes by default."""
        defaults = {"gradient_accumulation_steps": 1}
        return {
            name: value
            for name, value in options.items()
            if value != defaults.get(name, BY_NAME[name].default) or self._settings.given(name)
        }

    def _with_effect(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return options without those of an engine that is not used."""
        unused = {
            BY_NAME[switch].engine
            for switch in ("use_fsdp", "use_parallelism_config")
            if not values.get(switch, self._settings.resolved[switch].value)
        }
        return {name: value for name, value in values.items() if BY_NAME[name].engine not in unused}

    def _hardware(self) -> dict[str, Any]:
        cluster = self._cluster
        machines = ceil(cluster.size / cluster.node.devices)
        found: dict[str, Any] = (
            {"cpu" if cluster.device.name == "cpu" else "multi_gpu": True} if cluster.size > 1 else {}
        )
        return found | {"num_processes": cluster.size} | ({"num_machines": machines} if machines > 1 else {})

    def _yaml(self, values: Mapping[str, Any], variable: str) -> str:
        import yaml

        in_file = {} if (config := find_config(self._args.config_file)) is None else dict(config.values)
        contents = config_from_options(in_file | dict(values)).to_dict()
        script = shlex.join([self._args.training_script, *self._args.training_script_args])
        launch = f"{variable} {program_name()} launch --config_file FILE {script}".strip()
        return f"# {launch}\n{yaml.safe_dump(contents, sort_keys=True)}"


def _report(words: str) -> None:
    print(f"search: {words}", file=sys.stderr, flush=True)
