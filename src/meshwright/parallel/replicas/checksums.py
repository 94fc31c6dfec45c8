"""Compare the parameters of replicas bitwise, by checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ReplicaMismatchError
from ...runtime.collectives.operations import all_gather_single
from ..modules.dtensors import local

_WORD = 8
_FACTOR = 6364136223846793005  # odd, so that a difference in any tensor is a difference of the total


def require_equal_replicas(models: Iterable[nn.Module], ranks: Sequence[int], group: Any, device: torch.device) -> None:
    """Raise `ReplicaMismatchError` on every rank of the run if the parameters of one replica differ by a bit.

    If there are several groups, because each replica is spread over ranks, all of them learn of a difference.
    """

    def gather(numbers: Tensor) -> Tensor:
        everywhere = numbers.new_empty(len(ranks) * len(numbers))
        all_gather_single(everywhere, numbers, group=group)
        return everywhere

    found = difference(models, ranks, device, gather)
    text = "" if found is None else found.text
    if group is not None:
        text = _first_finding(text, device)
    if text:
        raise ReplicaMismatchError(text)


@dataclass(frozen=True, kw_only=True)
class ReplicaDifference:
    """Replicas that are not equal."""

    odd: tuple[int, ...]
    """The ranks that differ from most others; empty if no majority tells."""
    tensors: str
    """What differs."""
    text: str
    """All of it, and what to do."""


def difference(
    models: Iterable[nn.Module], ranks: Sequence[int], device: torch.device, gather: Callable[[Tensor], Tensor]
) -> ReplicaDifference | None:
    """Compare the parameters of all ranks; `gather` returns what the ranks pass to it, in their order.

    One number per rank is exchanged. Only if these differ are the checksums of all tensors.
    """
    named = [(name, param) for model in models for name, param in model.named_parameters()]
    if not named:
        return None
    sums = torch.stack([checksum(param).to(device) for _, param in named])
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number in sums.unbind():
        total = total * _FACTOR + number
    totals = gather(total.reshape(1)).tolist()
    if len(set(totals)) == 1:
        return None
    return _describe(ranks, totals, [name for name, _ in named], gather(sums).reshape(len(ranks), -1))


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers; a tensor that is spread counts with this rank's part."""
    own = local(tensor.detach()).contiguous()
    own = torch.view_as_real(own) if own.is_complex() else own
    content = own.reshape(-1).view(torch.uint8)
    if content.storage_offset() % _WORD:  # which no wider integer may begin at
        content = content.clone()
    words = len(content) // _WORD * _WORD
    # Sums of 64-bit integers are fifteen times as fast as those of narrower ones that are added up as such.
    return content[:words].view(torch.int64).sum() + content[words:].sum(dtype=torch.int64)


def _first_finding(finding: str, device: torch.device) -> str:
    """Return the finding of the first rank that has one; only if there is one are texts exchanged."""
    exists = torch.tensor(int(bool(finding)), device=device)
    dist.all_reduce(exists, op=dist.ReduceOp.MAX)
    if not exists:
        return ""
    findings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    return str(next(filter(None, findings)))


def _describe(ranks: Sequence[int], totals: Sequence[int], names: Sequence[str], sums: Tensor) -> ReplicaDifference:
    (usual, count), *others = Counter(totals).most_common()
    odd = [index for index, total in enumerate(totals) if total != usual]
    is_clear = not others or count > others[0][1]
    reference = totals.index(usual)
    unequal = (sums != sums[reference]).any(dim=0).tolist()
    different = [name for name, differs in zip(names, unequal, strict=True) if differs]
    some = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
    where = f"{len(different)} of {len(names)} tensors ({some})"
    if is_clear:
        who = f"Rank {', '.join(str(ranks[index]) for index in odd)} differs from the other {count} replicas"
        remedy = "Suspect the memory of that rank's device: go on without its host, from a checkpoint of before."
    else:
        who = f"The replicas on ranks {', '.join(map(str, ranks))} differ, and no majority tells which is right,"
        remedy = "Go on from a checkpoint of before."
    text = (
        f"{who} in {where}. Replicas apply the same gradients, and are bitwise equal unless a device computes "
        f"wrongly or the script changes parameters on one rank only. {remedy}"
    )
    return ReplicaDifference(odd=tuple(ranks[index] for index in odd) if is_clear else (), tensors=where, text=text)


class PeriodicComparison:
    """Compare replicas after every so many steps of optimizers."""

    def __init__(self, every: int, compare: Callable[[], None]) -> None:
        if every < 1:
            raise ValueError(f"Replicas are compared every N optimizer steps, and N is {every}: use 1 or more.")
        self.every = every
        self._compare = compare
        self._steps = 0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer, and compare after some of them."""
        follower = ref(self)  # another comparison takes its place when the interval is changed

        def on_step(*_: Any) -> None:
            if (comparison := follower()) is not None:
                comparison.count()

        optimizer.register_step_post_hook(on_step)

    def count(self) -> None:
        """Count a step."""
        self._steps += 1
        if self._steps % self.every == 0:
            self._compare()
