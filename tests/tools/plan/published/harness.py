"""Plan published rows, and compare the plans with what was measured.

    python -m tests.tools.plan.published.harness --output results.tsv
    python -m tests.tools.plan.published.harness --sources torchtune litgpt --cache traces
    python -m tests.tools.plan.published.harness --lines 2 35

One process traces all rows, each rank in a process that is forked from it. Traces are kept in the folder `--cache`, so
that a change of the computation of memory or time is judged without tracing again.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.commands.plan import plan_parser
from meshwright.runtime.devices.catalogue import DEVICES, load
from meshwright.tools.plan.memory.fit import Fit
from meshwright.tools.plan.memory.peak import Memory
from meshwright.tools.plan.plan import WantedTrace, plan_run
from meshwright.tools.plan.trace import Trace, read_trace
from meshwright.tools.plan.traces import Traces

from .outcomes import Outcome, summary, write_outcomes
from .rows import Case, read_cases
from .script.options import Options

SCRIPT = Path(__file__).parent / "script" / "train.py"
OLDER_KERNELS = Path(__file__).parent / "kernels_2023.yaml"


@dataclass
class CaseTraces:
    """The traces of one case."""

    case: Case
    folder: Path

    @property
    def options(self) -> Options:
        """The arguments of the training script."""
        assert self.case.options is not None
        return self.case.options

    def get(self, parts: Sequence[WantedTrace]) -> list[Trace]:
        """Return traces. All operations of a run that was compiled count as compiled, also hand-fused ones."""
        missing = [part for part in dict.fromkeys(parts) if not self._file(part).exists()]
        if missing:
            self._trace(missing)
        traces = [read_trace(self._file(part)) for part in parts]
        for trace in traces:
            for operation in trace.operations:
                operation.compiled = self.case.compiled
        return traces

    def _trace(self, parts: list[WantedTrace]) -> None:
        command = ["--gpus", self.case.cluster, str(SCRIPT), "--options", self.options.to_json()]
        args = plan_parser().parse_args(command)
        cluster = load().cluster(self.case.cluster)
        with tempfile.TemporaryDirectory() as folder:
            traces = Traces(
                args,
                Path(folder),
                world_size=cluster.size,
                ranks_per_node=cluster.node.devices,
                on_accelerators=True,
            )
            for part, trace in zip(parts, traces.get(parts), strict=True):
                trace.save(self._file(part))

    def _file(self, part: WantedTrace) -> Path:
        asked = f"{_script_text()} {self.options.to_json()} {self.case.cluster.partition('x')[0]} {part}"
        return self.folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.trace"


@cache
def _script_text() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(SCRIPT.parent.glob("*.py")))


@dataclass(frozen=True)
class Planned:
    """What a plan says of a case."""

    memory: Memory
    """Of the rank that has the most."""
    rate: float
    """Tokens per second and device."""
    fit: Fit


def plan_case(case: Case, folder: Path, *, older_kernels: bool = True) -> Planned:
    """Plan a case."""
    is_older = older_kernels and case.source == "llm-foundry"
    cluster = load(OLDER_KERNELS if is_older else DEVICES).cluster(case.cluster)
    plan = plan_run(CaseTraces(case, folder).get, SCRIPT.name, cluster, case.cluster, brief=True)
    assert plan.rates is not None
    return Planned(plan.largest.memory, plan.rates.tokens_per_second_and_device, plan.fits[0])


def outcome_of(case: Case, folder: Path) -> Outcome:
    """Plan a case and compare; a case that cannot be planned has an outcome that says why."""
    if case.options is None:
        return Outcome(case, failure=case.reason)
    began = time.monotonic()
    try:
        planned = plan_case(case, folder)
        plain = planned.rate if case.source != "llm-foundry" else plan_case(case, folder, older_kernels=False).rate
    except (ValueError, IndexError, StopIteration, ZeroDivisionError, KeyError) as error:
        return Outcome(case, failure=f"not planned: {error!r}".replace("\n", " ")[:300])
    return Outcome(
        case,
        memory=getattr(planned.memory, case.measure),
        allocated=planned.memory.allocated,
        rate=planned.rate,
        plain_rate=plain,
        verdict=planned.fit.verdict,
        margin=planned.fit.margin,
        planned_in=time.monotonic() - began,
    )


def outcomes_of(cases: Sequence[Case], folder: Path, output: Path | None = None) -> list[Outcome]:
    """Plan cases one after the other; runs that differ in nothing but what was measured are planned once."""
    outcomes: list[Outcome] = []
    for case in cases:
        outcomes.append(outcome_of(case, folder))
        if case.options is not None:
            print(outcomes[-1], flush=True)
        if output is not None:
            write_outcomes(outcomes, output)
    return outcomes


def main() -> None:
    """Plan the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", nargs="*", type=int, help="lines of the file; all of them by default")
    parser.add_argument("--sources", nargs="*", help="sources, such as torchtitan")
    parser.add_argument("--output", type=Path, help="write a row of figures per case to this TSV file")
    parser.add_argument("--cache", type=Path, help="keep traces in this folder")
    args = parser.parse_args()
    cases = [
        case
        for case in read_cases()
        if (not args.lines or case.line in args.lines) and (not args.sources or case.source in args.sources)
    ]
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        print(summary(outcomes_of(cases, cache, args.output)))


if __name__ == "__main__":
    main()
