"""Modules and the names of what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds what a dotted name means, and what it calls it."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def names_in_common(tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Return the groups of names that stand for one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return what a dotted name means, step by step from an object."""
    return attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class, a function or an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or getattr(named, "__name__", None) or obj)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and what it holds, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return a model and everything in it, what is held before what holds it; with `return_fqns` pairs with names."""
    found: list[tuple[str, nn.Module]] = []

    def walk(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module))

    walk("", model)
    return found if return_fqns else [module for _, module in found]
