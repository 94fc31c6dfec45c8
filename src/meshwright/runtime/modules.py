"""Submodules, parameters and buffers by name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that owns a dotted name, and the last part of the name."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def tied_names(tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Return the groups of names that refer to the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute of an object that a dotted name refers to."""
    return attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class, a function or an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or getattr(named, "__name__", None) or obj)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and its submodules, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return a model and its submodules, children before parents; with `return_fqns` pairs with names."""
    found: list[tuple[str, nn.Module]] = []

    def walk(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module))

    walk("", model)
    return found if return_fqns else [module for _, module in found]
