"""Plan which part of a model goes to which device, within memory budgets.

A plan is made of *atoms*, the smallest parts that may go to different places: modules without children, modules of a
class that is not split, and the direct tensors of a module with children. Atoms that share a tensor form a *group*,
because a tied weight in two places would be two weights. Groups are placed in the order of the model, device after
device, so that a forward pass crosses devices as rarely as possible.

*Offloaded* parts are computed on the main device, the first that holds anything. They are loaded layer by layer, so the
main device reserves memory for the largest of these layers and, unless they are offloaded too, for all their buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ...errors.callers import warn
from ...runtime.devices.device import accelerator_type, free_memory, shares_host_memory
from ..tensors import READS_CHILD_WEIGHTS
from .sizes import as_classes, compute_module_sizes, convert_file_size_to_int, get_max_layer_size, tensor_size

logger = logging.getLogger(__name__)
Place = int | str | torch.device
OFFLOADED = ("cpu", "disk")
UNLIMITED = float("inf")
_MAX_TRIES = 10


class DeviceMap(dict[str, Place]):
    """A dict from names to places, with the memory use of each place."""

    def __init__(self, places: Mapping[str, Place], rows: Sequence[tuple[Place, float, float, float]] = ()) -> None:
        super().__init__(places)
        self._rows = list(rows)

    def table(self) -> str:
        """Return a table of the parts and the memory use of each place."""
        lines = [("device", "holds", "keeps free", "budget", "what")]
        for place, used, kept, budget in self._rows:
            names = [name or "(everything)" for name, where in self.items() if where == place]
            shown = ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append((str(place), readable(used), readable(kept), readable(budget), shown or "-"))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in (1, 2, 3)), line[4]])
            for line in lines
        )


def readable(size: float) -> str:
    """Format a number of bytes."""
    if size == UNLIMITED:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


# --- Budgets ----------------------------------------------------------------------------------------------------------


USED_FOR_WEIGHTS = 0.9
"""Share of an accelerator's free memory; the rest is for activations, and for what kernels allocate."""


def get_max_memory(max_memory: Mapping[Any, float | str] | None = None) -> dict[Any, int]:
    """Return the budget of each device in bytes: those given, or nine tenths of what is free, and the host's memory.

    Sizes such as `10GB` are also converted in the given dict, with which transformers compares afterwards.
    """
    if max_memory is None:
        found: dict[Any, int] = {}
        host = psutil.virtual_memory().available
        for index in range(torch.accelerator.device_count() if accelerator_type() else 0):
            free = free_memory(index)
            if free is not None:
                found[index] = int(USED_FOR_WEIGHTS * (min(free, host) if shares_host_memory() else free))
        return {**found, "cpu": host - sum(found.values()) if shares_host_memory() else host}
    budgets = {place: convert_file_size_to_int(size) for place, size in max_memory.items()}
    if isinstance(max_memory, dict):
        max_memory.update({place: budgets[place] for place, size in max_memory.items() if isinstance(size, str)})
    return dict(sorted(budgets.items(), key=lambda item: _priority(item[0])))


def _priority(place: Place) -> tuple[int, int]:
    """Order places from the fastest: accelerators by index, then the host, then the disk."""
    if isinstance(place, int):
        return 0, place
    return {"cpu": 2, "disk": 3}.get(str(place), 1), 0


def _is_accelerator(place: Any) -> bool:
    return str(place) not in OFFLOADED


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Lower the budgets of the accelerators so that each gets about the same part of the model.

    With `low_zero` the first one gets only what the others cannot hold. The last keeps its whole budget, so that
    rounding never causes offload.
    """
    given = get_max_memory(max_memory)
    accelerators = [place for place in given if _is_accelerator(place) and given[place] > 0]
    if len(accelerators) < 2:
        return given
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    children = list(model.named_children())
    largest, _ = get_max_layer_size(children, sizes, sorted(as_classes(no_split_module_classes)))
    count = len(accelerators) - (1 if low_zero else 0)
    # Devices that are too small for an equal share increase the share of the others.
    share, rest, left = 0.0, float(sizes[""]), count
    for place in sorted(accelerators[1:] if low_zero else accelerators, key=lambda place: given[place]):
        share = rest / left
        if given[place] >= share:
            break
        rest, left = rest - given[place], left - 1
    room = int(share + 1.25 * largest)  # the last layer of a device may not fit
    balanced = dict(given)
    for place in accelerators[:-1]:
        balanced[place] = min(given[place], room)
    if low_zero:
        others = sum(balanced[place] for place in accelerators[1:])
        balanced[accelerators[0]] = min(given[accelerators[0]], max(0, sizes[""] - others))
    return balanced


# --- The plan ---------------------------------------------------------------------------------------------------------


@dataclass
class _TiedAtoms:
    """Atoms that must be on one device, because they share tensors."""

    atoms: list[str] = field(default_factory=list)
    tensors: dict[int, int] = field(default_factory=dict)
    """The size of each tensor by its id: tied tensors count once."""
    layer: int = 0
    """The size of the largest atom, which an offloaded group loads to the main device at once."""
    layer_without_buffers: int = 0
    buffers: int = 0

    @property
    def size(self) -> int:
        return sum(self.tensors.values())


@dataclass
class _Sizing:
    dtype: Any
    special_dtypes: Mapping[str, Any]
    whole: frozenset[str]


_Named = tuple[str, Tensor, bool]
"""A tensor with its name, and whether it is a buffer."""


def _atoms(model: nn.Module, whole: frozenset[str]) -> Iterable[tuple[list[str], list[_Named]]]:
    """Yield the names of atoms in the order of the model, with their tensors; direct tensors of a module are one item.

    It uses a stack, because models can be deeper than the recursion limit.
    """
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        dot = f"{name}." if name else ""
        children = [(dot + key, child) for key, child in module._modules.items() if child is not None]
        is_whole = not children or (type(module).__name__ in whole and name != "")
        is_whole = is_whole or isinstance(module, READS_CHILD_WEIGHTS)
        tensors = [(dot + key, tensor, False) for key, tensor in _parameters(module, recurse=is_whole)]
        tensors += [(dot + key, b, True) for key, b in module.named_buffers(recurse=is_whole, remove_duplicate=False)]
        if is_whole:
            yield [name], tensors
        else:
            if tensors:
                yield [tensor_name for tensor_name, _, _ in tensors], tensors
            stack.extend(reversed(children))


def _parameters(module: nn.Module, recurse: bool) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters(recurse=recurse, remove_duplicate=False))


def _groups(model: nn.Module, sizing: _Sizing) -> list[_TiedAtoms]:
    """Collect the atoms into groups, in the order of the model."""
    group_of: dict[int, _TiedAtoms] = {}  # by tensor
    groups: dict[int, _TiedAtoms] = {}  # by identity, in order
    for names, tensors in _atoms(model, sizing.whole):
        found = {id(group_of[id(tensor)]) for _, tensor, _ in tensors if id(tensor) in group_of}
        group, *others = [other for ident, other in groups.items() if ident in found] if found else [_TiedAtoms()]
        for other in others:
            _merge(group, other, group_of, groups)
        groups.setdefault(id(group), group)
        group.atoms += names
        layer = buffers = 0
        for tensor_name, tensor, is_buffer in tensors:
            size = tensor_size(tensor, tensor_name, sizing.dtype, sizing.special_dtypes)
            layer += size
            buffers += size if is_buffer else 0
            if id(tensor) not in group.tensors:
                group.tensors[id(tensor)] = size
                group.buffers += size if is_buffer else 0
                group_of[id(tensor)] = group
        group.layer = max(group.layer, layer)
        group.layer_without_buffers = max(group.layer_without_buffers, layer - buffers)
    return list(groups.values())


def _merge(
    first: _TiedAtoms, second: _TiedAtoms, group_of: dict[int, _TiedAtoms], groups: dict[int, _TiedAtoms]
) -> None:
    """Merge the second group into the first, which keeps its position in the order."""
    del groups[id(second)]
    first.atoms += second.atoms
    first.tensors |= second.tensors
    first.buffers += second.buffers
    first.layer = max(first.layer, second.layer)
    first.layer_without_buffers = max(first.layer_without_buffers, second.layer_without_buffers)
    for ident in second.tensors:
        group_of[ident] = first


@dataclass
class _Allocation:
    places: list[Any]
    """The place of each group."""
    used: dict[Any, int]

    @property
    def first_accelerator(self) -> Any:
        return next((place for place in self.places if _is_accelerator(place)), None)


class _DoesNotFit(Exception):
    """Raised for a group that fits in no place."""


class _Planner:
    """Allocate groups to places in order; the sizes of groups are computed once."""

    def __init__(
        self, groups: list[_TiedAtoms], budgets: dict[Any, float], offload_buffers: bool, fallback: bool
    ) -> None:
        self.groups, self.budgets = groups, budgets
        self.sizes = [group.size for group in groups]
        self.offload_buffers, self.fallback = offload_buffers, fallback
        self.refused: dict[int, list[Any]] = {}

    def allocate(self, main: Any, reserved: float, excluded: Sequence[Any] = ()) -> _Allocation:
        """Allocate every group, in order, to a place with enough room, on the main device beside the reserved memory.

        If memory is reserved, the main device is the first accelerator that gets a group: see `dispatch_model`.
        """
        places = [place for place in self.budgets if place not in excluded]
        room = {place: self.budgets[place] - (reserved if place == main else 0) for place in places}
        result = _Allocation([], dict.fromkeys(self.budgets, 0))
        self.refused, at = {}, 0
        for number, size in enumerate(self.sizes):
            start = 0 if self.fallback else at
            for index in range(start, len(places)):
                place = places[index]
                if reserved and place != main and _is_accelerator(place) and not result.used[main]:
                    continue
                if size <= room[place] - result.used[place] or size == 0:
                    break
                self.refused.setdefault(number, []).append(place)
            else:
                raise _DoesNotFit
            at = index
            result.places.append(place)
            result.used[place] += size
        return result

    def explain(self, allocation: _Allocation) -> str:
        """Return one line per group: its place, and the places that had no room for it."""
        lines = []
        for number, (group, place) in enumerate(zip(self.groups, allocation.places, strict=True)):
            refused = "".join(f", because {other} has no room" for other in self.refused.get(number, ()))
            tied = f" with {', '.join(group.atoms[1:])}, tied to it" if len(group.atoms) > 1 else ""
            lines.append(f"{group.atoms[0] or 'the model'}{tied} ({readable(self.sizes[number])}) -> {place}{refused}")
        return "\n".join(lines)

    def room_needed(self, allocation: _Allocation, offload_places: Sequence[str]) -> int:
        """Return the memory that the main device needs for offloaded groups."""
        return self._room_for(
            [group for group, place in zip(self.groups, allocation.places, strict=True) if place in offload_places]
        )

    def _room_for(self, offloaded: Sequence[_TiedAtoms]) -> int:
        """Return the size of the largest layer, plus all buffers if those stay on the main device."""
        if self.offload_buffers:
            return max((group.layer for group in offloaded), default=0)
        layer = max((group.layer_without_buffers for group in offloaded), default=0)
        return layer + sum(group.buffers for group in offloaded)

    def plan(self) -> tuple[_Allocation, Any, int]:
        """Return the allocation, the main device, and the memory reserved on it."""
        mains = [place for place in self.budgets if _is_accelerator(place)]
        for number, main in enumerate([*mains, "cpu"]):
            offload_places = ("disk",) if main == "cpu" else OFFLOADED
            kept, tries = 0, 0
            while True:
                try:
                    allocation = self.allocate(main, kept, excluded=mains[:number])
                except _DoesNotFit:
                    raise self._too_small() from None
                if not allocation.used.get(main) and main != "cpu":
                    break  # nothing fits beside the reserved memory: try the next main device
                needed = self.room_needed(allocation, offload_places)
                fits = allocation.used.get(main, 0) + needed <= self.budgets.get(main, 0)
                if not needed or (fits and allocation.first_accelerator in (main, None)):
                    return allocation, main, needed
                if main == "cpu" and not allocation.used.get("cpu"):
                    self._warn_about_layers(needed)
                    return allocation, main, needed
                tries += (
                    1  # reserved memory causes more offload, which may need more: at most what all groups would need
                )
                kept = needed if tries < _MAX_TRIES else max(needed, self._room_for(self.groups))
        raise AssertionError("the host is the last main device")

    def _too_small(self) -> ValueError:
        budgets = ", ".join(f"{place}: {readable(budget)}" for place, budget in self.budgets.items())
        largest = max(range(len(self.groups)), key=lambda index: self.sizes[index])
        return ValueError(
            f"The model does not fit into max_memory ({budgets}): it takes {readable(sum(self.sizes))}, and its "
            f"largest part that cannot be split, {self.groups[largest].atoms[0] or 'the whole model'}, "
            f"{readable(self.sizes[largest])}. Raise a budget, leave 'disk' out of max_memory so that it is not "
            "limited, or name fewer no_split_module_classes."
        )

    def _warn_about_layers(self, needed: int) -> None:
        logger.warning(
            f"There is insufficient memory: the largest layer takes {readable(needed)}, more than any device may use "
            f"({', '.join(f'{place}: {readable(b)}' for place, b in self.budgets.items() if place != 'disk')}). All is "
            "on disk and computed on the CPU, which exceeds its budget while that layer runs. Raise a budget to at "
            f"least {readable(needed)}, or name fewer no_split_module_classes."
        )


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Plan which part of a model goes to which device, within the budgets.

    The accelerators are filled first, then the host, then the disk. Tied weights are placed together and counted once;
    modules of `no_split_module_classes` are not split. Parts are offloaded only if they fit on no accelerator; then the
    main device keeps room for the largest offloaded layer, and for all offloaded buffers unless `offload_buffers`.
    `dtype` and `special_dtypes` (by tensor) plan for weights that will be loaded in another dtype.
    `fallback_allocation` lets small parts go back to a device that a larger one did not fit on. `verbose` prints every
    decision. Without `clean_result` parts of the model are listed even if all are in one place.
    """
    budgets: dict[Any, float] = {"disk": UNLIMITED, **get_max_memory(max_memory)}
    budgets["disk"] = budgets.pop("disk")
    sizing = _Sizing(dtype, special_dtypes or {}, as_classes(no_split_module_classes))
    planner = _Planner(_groups(model, sizing), budgets, offload_buffers, fallback_allocation)
    allocation, main, kept = planner.plan()
    if verbose:
        print(planner.explain(allocation))
    by_atom = {
        atom: place for group, place in zip(planner.groups, allocation.places, strict=True) for atom in group.atoms
    }
    rows = [
        (place, allocation.used[place], kept if place == main else 0, budget)
        for place, budget in budgets.items()
        if allocation.used[place] or place != "disk"
    ]
    device_map = DeviceMap(_collapsed(model, by_atom, to_root=clean_result), rows)
    check_device_map(model, device_map)
    return device_map


def _collapsed(model: nn.Module, by_atom: Mapping[str, Place], to_root: bool) -> dict[str, Place]:
    """Replace the parts of a module by the module if all are in one place."""
    mixed = object()
    place_of: dict[str, Any] = {}
    for atom, place in by_atom.items():
        name = atom
        while True:
            known = place_of.setdefault(name, place)
            if known is not place and known != place:
                place_of[name] = mixed
            if not name:
                break
            name = name.rpartition(".")[0]
    if not to_root and model._modules:
        place_of[""] = mixed
    collapsed: dict[str, Place] = {}
    for name in _ordered(model, by_atom):
        covering = ""
        for part in name.split("."):
            if place_of.get(covering, mixed) is not mixed:
                break
            covering = f"{covering}.{part}" if covering else part
        collapsed.setdefault(covering, by_atom[name])
    return collapsed


def _ordered(model: nn.Module, by_atom: Mapping[str, Place]) -> list[str]:
    """Return the atoms in the order of the modules, which groups of tied atoms do not keep."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def key(atom: str) -> tuple[int, int]:
        return (order[atom], 1) if atom in order else (order.get(atom.rpartition(".")[0], 0), 0)

    return sorted(by_atom, key=key)


# --- Maps made by hand ------------------------------------------------------------------------------------------------


def place_of(name: str, device_map: Mapping[str, Place]) -> Place | None:
    """Return the place of a module or tensor: its own, or that of the nearest enclosing module."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_device_map(model: nn.Module, device_map: Mapping[str, Place]) -> None:
    """Raise if a device map has no place for a tensor, and warn of names that the model does not have."""
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    missing = [name for name in tensors if place_of(name, device_map) is None]
    if missing:
        raise ValueError(
            f"The device_map provided does not give any device for {len(missing)} of the model's {len(tensors)} "
            f"tensors: {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}. Add their modules, or an entry "
            "'' for all that is not named."
        )
    known = {"", *tensors, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warn(f"The device_map names what the model does not have: {', '.join(map(str, unknown[:8]))}.")


def clean_device_map(device_map: dict[str, Place], module_name: str = "") -> dict[str, Place]:
    """Replace the parts of a module by the module if all are in one place; the map is changed and returned."""
    dot = f"{module_name}." if module_name else ""
    inner = [name for name in device_map if name.startswith(dot)]
    places = [device_map[name] for name in inner]
    if len(inner) > 1 and all(place == places[0] for place in places):
        for name in inner:
            del device_map[name]
        device_map[module_name] = places[0]
        return device_map
    children = dict.fromkeys(dot + name[len(dot) :].partition(".")[0] for name in inner)
    for child in children:
        if any(name.startswith(f"{child}.") for name in inner):
            clean_device_map(device_map, child)
    return device_map


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Place]) -> None:
    """Warn of tied parameters that a device map puts in several places, which get separate copies."""
    for group in tied_params:
        places = {name: place_of(name, device_map) for name in group}
        if len(set(map(str, places.values()))) > 1:
            warn(
                f"Tied parameters are on different devices: {places}. Each device gets a copy; put them on one, or let "
                "device_map='auto' do it.",
            )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """Return a module's size together with the modules its parameters are tied to, and those modules."""
    names: list[str] = []
    modules: list[Any] = []
    for parameter in tied_params:
        for name, module in modules_to_treat:
            if (parameter == name or parameter.startswith(f"{name}.")) and name not in names:
                names.append(name)
                modules.append(module)
    counted_twice = sum(module_sizes.get(parameter, 0) for parameter in tied_params)
    size = module_size + sum(module_sizes.get(name, 0) for name in names)
    return size - (counted_twice if names else 0), names, modules


def fallback_allocate(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    size_limit: float,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[tuple[str, Any]]]:
    """Find the first part of the given modules that fits a limit; return it and what is left, or None and all."""
    whole = as_classes(no_split_module_classes)
    tied = {name for group in tied_parameters or () for name in group}
    for index, (name, module) in enumerate(modules):
        is_tied = any(parameter.startswith(f"{name}.") or parameter == name for parameter in tied)
        if module_sizes.get(name, 0) <= size_limit and not is_tied:
            return name, module, [*modules[:index], *modules[index + 1 :]]
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in whole:
            own = [(f"{name}.{key}", value) for key, value in module.named_parameters(recurse=False)]
            inner = [*own, *((f"{name}.{key}", child) for key, child in children)]
            found, part, left = fallback_allocate(
                inner, module_sizes, size_limit, no_split_module_classes, tied_parameters
            )
            if found is not None:
                return found, part, [*modules[:index], *left, *modules[index + 1 :]]
    return None, None, list(modules)
