"""Rank the meshes of nanotron's runs: it published the fastest of each pair of a model and a number of GPUs.

    python -m tests.tools.plan.published.figures meshes

Time comes from `analytic`, memory from a formula: there are hundreds of meshes, and a trace of one takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.runtime.devices.catalogue import DeviceCluster, load

from .analytic import Estimate, blocks_of_stages
from .rows import Case, block_parameters, flops_per_token, read_cases
from .script.options import Options

BEST = 3
_SIZES = (1, 2, 4, 8, 16, 32)
_LARGEST_TP = 16
_BATCHES = (1, 2, 4, 8)
_WEIGHTS, _STATE = 6, 12
"""Bytes of a parameter: bf16 weights and fp32 gradients; master weights and moments, which ZeRO-1 divides."""
_LOGITS = 14
"""Bytes of a logit: bf16 and fp32, forward and backward."""
_USED = 0.9
"""Part of a device's memory that a run can use: the allocator holds more than it gives."""

Mesh = tuple[int, int, int]
"""Sizes of dp, tp and pp."""


@dataclass(frozen=True)
class Cell:
    """A model on a number of GPUs: our meshes that fit, the fastest first."""

    case: Case
    rates: dict[Mesh, float]

    @property
    def published(self) -> Mesh:
        """The mesh that nanotron found fastest."""
        assert self.case.options is not None
        return mesh_of(self.case.options)

    @property
    def place(self) -> int | None:
        """Where it is among ours, from 1."""
        meshes = list(self.rates)
        return meshes.index(self.published) + 1 if self.published in meshes else None

    @property
    def found(self) -> bool:
        """Whether it is among our three fastest."""
        return self.place is not None and self.place <= BEST

    def __str__(self) -> str:
        ours = "; ".join(f"dp{dp} tp{tp} pp{pp} {self.rates[dp, tp, pp]:.0f}" for dp, tp, pp in list(self.rates)[:BEST])
        dp, tp, pp = self.published
        return f"{self.case.cluster:10} {self.case.label[:20]:20} dp{dp} tp{tp} pp{pp}: {self.place} of ours: {ours}"


def mesh_of(options: Options) -> Mesh:
    """Return the mesh of a run."""
    return options.dp_shard * options.dp_replicate, options.tp, options.pp


def cells(cases: Sequence[Case] | None = None, *, balanced: bool = True) -> Iterator[Cell]:
    """Rank the meshes of every row."""
    for case in cases or nanotron():
        assert case.options is not None
        cluster = load().cluster(case.cluster)
        rates: dict[Mesh, float] = {}
        for options in candidates(case.options, cluster):
            rate = Estimate(options, cluster, case.compiled, balanced).rate
            rates[mesh_of(options)] = max(rate, rates.get(mesh_of(options), 0.0))
        yield Cell(case, dict(sorted(rates.items(), key=lambda item: -item[1])))


def nanotron() -> list[Case]:
    """Return its rows."""
    return [case for case in read_cases() if case.source == "nanotron"]


def candidates(options: Options, cluster: DeviceCluster) -> Iterator[Options]:
    """Yield every mesh and micro-batch with the same global batch that fits."""
    samples = options.batch * options.accumulation * options.dp_shard * options.dp_replicate
    for tp in (size for size in _SIZES if size <= _LARGEST_TP):
        for pp in _SIZES:
            dp, rest = divmod(options.world_size, tp * pp)
            if rest or pp > options.layers:
                continue
            for batch in _BATCHES:
                for shards in (False, True) if dp > 1 else (False,):
                    accumulation, unequal = divmod(samples, dp * batch)
                    if unequal or not accumulation:
                        continue
                    found = replace(
                        options,
                        tp=tp,
                        pp=pp,
                        dp_shard=dp if shards else 1,
                        dp_replicate=1 if shards else dp,
                        batch=batch,
                        accumulation=accumulation,
                        tied=options.hidden < 4096 and pp == 1,
                        schedule="1f1b" if accumulation >= pp else "gpipe",
                    )
                    if needed(found) <= _USED * cluster.device.memory:
                        yield found


def needed(options: Options, *, balanced: bool = True) -> float:
    """Return about how many bytes the fuller one of the first and the last stage needs."""
    hidden, stages = options.hidden, blocks_of_stages(options, balanced=balanced)
    tokens = options.batch * options.seq
    ends = options.vocab * hidden * (1 if options.pp > 1 or options.tied else 2)
    kept = tokens * (4 * hidden + (16 * hidden + 6 * options.ffn) / options.tp)
    logits = tokens * options.vocab / options.tp * _LOGITS
    found = []
    for blocks, in_flight, is_last in (
        (stages[0], min(options.accumulation, options.pp), False),
        (stages[-1], 1, True),
    ):
        parameters = (block_parameters(options) * blocks + ends) / options.tp
        state = parameters * (_WEIGHTS + _STATE / options.dp_shard)
        found.append(state + kept * blocks * in_flight + logits * is_last)
    return max(found)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of values without ties."""
    ranks = [{index: rank for rank, index in enumerate(sorted(range(len(x)), key=x.__getitem__))} for x in (a, b)]
    distance = sum((ranks[0][index] - ranks[1][index]) ** 2 for index in range(len(a)))
    return 1 - 6 * distance / (len(a) * (len(a) ** 2 - 1))


def correlations(cases: Sequence[Case] | None = None, *, balanced: bool = True) -> tuple[float, float]:
    """Return the rank correlations of tokens per second and of the FLOPs utilisation over nanotron's rows."""
    ours, theirs, flops = [], [], []
    for case in cases or nanotron():
        assert case.options is not None
        assert case.rate is not None
        ours.append(Estimate(case.options, load().cluster(case.cluster), case.compiled, balanced).rate)
        theirs.append(case.rate)
        flops.append(flops_per_token(case.options))
    used, published = ([rate * each for rate, each in zip(x, flops, strict=True)] for x in (ours, theirs))
    return spearman(ours, theirs), spearman(used, published)
