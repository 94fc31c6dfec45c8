"""`Weights`: the weights of a model as full tensors, under the names of its checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.base import Strategy
from ..runtime.group.runtime import Runtime
from .adapters import Recipe, active_adapter, adapter_recipes, base_of, is_peft, merged_recipes
from .forms import Form, Held
from .gathering import Gatherer, Wanted
from .naming import Unit, grouped_by_layer, renamed, units_of, without_ignored, without_ties
from .sources import Source, source_of, stages_of

MERGED, ONLY = "merged", "only"
T = TypeVar("T")


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _ModelTensor:
    """A tensor of the model, as all processes know it."""

    form: Form
    owner: int | None
    """The stage that has it; None if every process has a part."""
    ranks: tuple[int, ...]
    """The processes with its parts, on its owner's stage."""


@dataclass(frozen=True)
class _Group:
    """A unit with all that it needs."""

    unit: Unit
    recipes: tuple[Recipe, ...]
    metas: tuple[TensorMeta, ...]

    @property
    def inputs(self) -> list[str]:
        """The names of the tensors that are gathered."""
        return [name for recipe in self.recipes for name in recipe.inputs]

    def make(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Make the tensors of the checkpoint."""
        given = list(tensors)
        members = []
        for recipe in self.recipes:
            members.append(recipe.compute(given[: len(recipe.inputs)]))
            given = given[len(recipe.inputs) :]
        return self.unit.convert(members)


@dataclass(frozen=True)
class _Survey:
    """What one process has."""

    source: Source
    entries: dict[str, Held]
    ties: list[list[str]]
    recipes: dict[str, Recipe]


@dataclass(frozen=True)
class _Plan:
    """What is gathered and made, in order."""

    entries: dict[str, _ModelTensor]
    groups: tuple[_Group, ...]
    layers: tuple[tuple[int, int], ...]
    """For each layer, its first group and the one after its last."""


class Weights:
    """The weights of a model, from any mesh: full tensors under the names of its Hugging Face checkpoint.

    Iterate over it for pairs of a name and a tensor. Every process of the run iterates, in lockstep, because tensors
    are gathered on the way; each of them gets every tensor. One pass may follow another. Nothing is moved before the
    first tensor, and a model that cannot be handed over raises before it, on all processes.

    A tensor that this process holds whole is not copied: it may share memory with the model. Clone what you keep.

    It has the methods of vLLM's `WeightSource`, and can be given to its `WeightTransferTrainerFactory`.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        *,
        dtype: torch.dtype | None,
        adapter: str,
        bucket_size: int,
    ) -> None:
        if adapter not in (MERGED, ONLY):
            raise ValueError(f"adapter={adapter!r} is not known: choose from {MERGED!r} and {ONLY!r}.")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} is not a floating-point dtype, to which weights could be converted.")
        self._model = model
        self._dtype = dtype
        self._adapter = adapter
        self._stages = stages_of(strategy, model)
        runtime = strategy.runtime
        self._gatherer = Gatherer(runtime.device, bucket_size, self._stages)
        self._runtime: Runtime = runtime
        self._plan: _Plan | None = None

    # --- what there is ----------------------------------------------------------------------------------------------

    def metadata(self) -> list[TensorMeta]:
        """Return name, dtype and shape of every tensor, in the order of iteration. No weights are moved.

        The first call is a collective: processes compare what they hold.
        """
        return [meta for group in self._planned().groups for meta in group.metas]

    def held_names(self) -> None:
        """Return None: every process gets every tensor."""

    def groups(self) -> list[list[str]]:
        """Return the names in groups: what comes before the layers, each decoder layer, and the rest."""
        plan = self._planned()
        return [[meta.name for group in plan.groups[begin:end] for meta in group.metas] for begin, end in plan.layers]

    @property
    def is_adapter(self) -> bool:
        """Whether these are the tensors of an adapter alone."""
        return self._adapter == ONLY

    # --- the tensors ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors. Collective."""
        plan = self._planned()
        yield from self._tensors(plan, self._current(plan))

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield the tensors of one group of `groups()` after the other, each as names and tensors. Collective."""
        plan = self._planned()
        with closing(self._tensors(plan, self._current(plan))) as tensors:
            for names in self.groups():
                pairs = [next(tensors) for _ in names]
                yield [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def save(self, folder: str | os.PathLike[str], max_shard_size: int | str = "50GB") -> None:
        """Write a folder that `from_pretrained` loads: safetensors, an index, and the configs. Collective.

        The main process writes tensors as they are gathered, so that none holds all. The files are those of
        `save_pretrained` on one process, byte for byte.

        Args:
            folder: Folder of the files. It is made where it does not exist.
            max_shard_size: Largest size of a file, in bytes or as "5GB".
        """
        from .export import save

        save(self, self._source().model, self._runtime, folder, max_shard_size)

    # --- the plan ---------------------------------------------------------------------------------------------------

    def _source(self) -> Source:
        return source_of(self._model, adapter_only=self.is_adapter)

    def _planned(self) -> _Plan:
        """Return the plan, which all processes make together the first time."""
        if self._plan is None:
            survey = self._together(self._survey)
            joined = self._joined(survey)
            plan = self._together(lambda: self._make_plan(survey.source.model, *joined))
            self._require_same(plan)
            self._plan = plan
        return self._plan

    def _together(self, function: Callable[[], T]) -> T:
        """Call a function that makes no collective; raise on every process if it raises on one."""
        try:
            result, error = function(), None
        except Exception as found:  # whatever it is: the others wait for this process
            result, error = None, found
        if not self._failed_anywhere(error is not None):
            return cast(T, result)
        messages = self._from_all(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = next(rank for rank, message in enumerate(messages) if message is not None)
        raise RuntimeError(f"Rank {failed} cannot hand over its weights. {messages[failed]}")

    def _failed_anywhere(self, here: bool) -> bool:
        """Tell whether any process says so: one small collective."""
        if self._runtime.num_processes == 1:
            return here
        failures = torch.tensor([float(here)], device=self._runtime.device)
        dist.all_reduce(failures)
        return bool(failures.item())

    def _require_same(self, plan: _Plan) -> None:
        digests = self._from_all(_digest(plan))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                f"Rank {self._runtime.process_index}: ranks {others} have other tensors than rank 0, by name, shape, "
                "dtype or division. Make the same model on every process."
            )

    def _from_all(self, own: Any) -> list[Any]:
        if self._runtime.num_processes == 1:
            return [own]
        found: list[Any] = [None] * self._runtime.num_processes
        dist.all_gather_object(found, own)
        return found

    def _survey(self) -> _Survey:
        """Return what this process has."""
        source = self._source()
        entries = source.held()
        if self.is_adapter:
            metas = {name: _empty(entry.form) for name, entry in entries.items()}
            recipes = adapter_recipes(source.model, metas, active_adapter(source.model))
        elif is_peft(source.model):
            recipes = merged_recipes(source.model, list(entries))
        else:
            recipes = {name: Recipe((name,)) for name in entries}
        return _Survey(source, entries, source.tied(), recipes)

    def _make_plan(
        self, model: nn.Module, known: dict[str, _ModelTensor], ties: list[list[str]], recipes: dict[str, Recipe]
    ) -> _Plan:
        if self.is_adapter:
            units = [Unit((name,), renamed(name)) for name in recipes]
        else:
            base = base_of(model) if is_peft(model) else model
            units = units_of(base, without_ties(base, without_ignored(base, recipes), _clean_ties(ties, recipes)))
        return _ordered(known, [self._group(unit, recipes, known) for unit in units])

    def _joined(self, survey: _Survey) -> tuple[dict[str, _ModelTensor], list[list[str]], dict[str, Recipe]]:
        """Return the tensors of all stages of a pipeline, in the order of the model, and what is known of them."""
        own = {name: (entry.form, entry.ranks) for name, entry in survey.entries.items()}
        if self._stages is None:
            entries = {name: _ModelTensor(form, None, ranks) for name, (form, ranks) in own.items()}
            return entries, survey.ties, survey.recipes
        contents: list[Any] = [None] * len(self._stages.rows)
        dist.all_gather_object(contents, (own, survey.ties, survey.recipes), group=self._stages.group)
        found: dict[str, _ModelTensor] = {}
        all_recipes: dict[str, Recipe] = {}
        for stage, (theirs, _, some) in enumerate(contents):
            for name, (form, ranks) in theirs.items():
                found.setdefault(name, _ModelTensor(form, stage, ranks))  # the first owner sends what several have
            all_recipes = {**some, **all_recipes}
        order = {name: place for place, name in enumerate(survey.source.names)}
        last = len(order)
        ordered = dict(sorted(found.items(), key=lambda item: order.get(item[0], last)))
        places = {name: place for place, name in enumerate(ordered)}
        by_place = sorted(all_recipes.items(), key=lambda item: min(places[name] for name in item[1].inputs))
        return ordered, [group for _, some_ties, _ in contents for group in some_ties], dict(by_place)

    def _group(self, unit: Unit, recipes: dict[str, Recipe], known: dict[str, _ModelTensor]) -> _Group:
        """Return a unit with its recipes, and with what it makes: found by making it of empty tensors."""
        chosen = tuple(recipes[name] for name in unit.members)
        made = _Group(unit, chosen, ())
        outputs = made.make([_empty(known[name].form) for name in made.inputs])
        metas = [TensorMeta(name, self._sent_dtype(t.dtype), tuple(t.shape)) for name, t in outputs.items()]
        return _Group(unit, chosen, tuple(metas))

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    # --- a pass -----------------------------------------------------------------------------------------------------

    def _current(self, plan: _Plan) -> dict[str, Held]:
        """Return the tensors as they are now; raise on every process if they are not those of the plan any more."""
        return self._together(lambda: self._checked(plan))

    def _checked(self, plan: _Plan) -> dict[str, Held]:
        entries = self._source().held()
        here = None if self._stages is None else self._stages.own
        expected = {name for name, entry in plan.entries.items() if entry.owner in (None, here)}
        for name in [*entries, *expected]:
            known, entry = plan.entries.get(name), entries.get(name)
            if known is None or entry is None or known.form != entry.form:
                now, before = ("absent" if each is None else _described(each.form) for each in (entry, known))
                raise RuntimeError(
                    f"{name} is {now}, and was {before} when metadata() was called. What an engine received does not "
                    "hold any more: call accelerator.weights(model) again."
                )
        return entries

    @torch.no_grad()
    def _tensors(self, plan: _Plan, entries: dict[str, Held]) -> Generator[tuple[str, Tensor], None, None]:
        wanted, ranks = [], []
        here = None if self._stages is None else self._stages.own
        for group in plan.groups:
            is_plain = not any(recipe.merges for recipe in group.recipes)
            for name in group.inputs:
                entry = plan.entries[name]
                dtype = self._sent_dtype(entry.form.dtype) if is_plain else entry.form.dtype
                held = entries[name] if entry.owner in (None, here) else None
                wanted.append(Wanted(entry.form, held, entry.owner, None if dtype == entry.form.dtype else dtype))
                ranks.append(entry.ranks if held is None else held.ranks)
        gathered = self._gatherer.tensors(wanted, ranks)
        for group in plan.groups:
            yield from self._made(group, [next(gathered) for _ in group.inputs])

    def _made(self, group: _Group, tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        outputs = group.make(tensors)
        tensors.clear()  # the caller holds the last reference then
        for meta in group.metas:
            tensor = outputs.pop(meta.name).to(meta.dtype).contiguous()
            if tuple(tensor.shape) != meta.shape:
                raise RuntimeError(f"{meta.name} has the shape {tuple(tensor.shape)} instead of {meta.shape}.")
            yield meta.name, tensor


def _clean_ties(ties: list[list[str]], recipes: dict[str, Recipe]) -> list[list[str]]:
    """Return tied names as names of the base model: those of its tensors to which nothing is added."""
    plain = {recipe.inputs[0]: name for name, recipe in recipes.items() if not recipe.merges}
    return [[plain[name] for name in group if name in plain] for group in ties]


def _empty(form: Form) -> Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device="meta")


def _described(form: Form) -> str:
    return f"{list(form.shape)} of {form.dtype}"


def _ordered(known: dict[str, _ModelTensor], groups: list[_Group]) -> _Plan:
    """Return a plan in the order in which engines take weights: layer by layer."""
    groups = [group for group in groups if group.metas]
    layers = grouped_by_layer([group.metas[0].name for group in groups])
    bounds, begin = [], 0
    for layer in layers:
        bounds.append((begin, begin + len(layer)))
        begin += len(layer)
    ordered = tuple(groups[index] for layer in layers for index in layer)
    twice = [meta.name for group in ordered for meta in group.metas]
    if len(set(twice)) < len(twice):
        name = next(name for name in twice if twice.count(name) > 1)
        raise RuntimeError(f"{name} is made twice: two tensors of the model have this name in its checkpoint.")
    return _Plan(known, ordered, tuple(bounds))


def _digest(plan: _Plan) -> str:
    """Return a checksum of what must be the same on all processes."""
    text = [repr((name, entry.form, entry.owner)) for name, entry in plan.entries.items()]
    text += [repr((group.inputs, group.metas, group.recipes)) for group in plan.groups]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()
