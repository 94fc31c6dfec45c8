"""Every name of torch that this package uses is where the package looks for it.

    python tests/versions/symbols.py

Importing a module proves only what it imports at its top. The names inside functions, most of all private ones, are
found by reading the source: `torch.a.b`, `dist.a`, and `from torch.a import b`, wherever they stand.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import torch

import accelerate
from meshwright.config.meshes import MESH_CACHES

OF_A_CUDA_BUILD = (
    "torch._C._cuda_hasPrimaryContext",
    "torch._C._distributed_c10d._dump_nccl_trace",
    "torch.distributed.ProcessGroupNCCL",
)
"""Optional names, looked up by `getattr`, that a build with CUDA must have."""
OPTIONAL = (
    "torch.hpu",
    "torch.npu",
    "torch.mlu",
    "torch.musa",
    "torch.sdaa",
    "torch.tpu",
    "torch.neuron",
    "torch.utils.tensorboard",
)
"""Modules that other packages bring or need."""


def names_in(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the full names of torch's that a file uses, with their lines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname: each.name for each in node.names if each.asname and _is_of_torch(each.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_of_torch(node.module or ""):
            for each in node.names:
                yield f"{node.module}.{each.name}", node.lineno
                modules[each.asname or each.name] = f"{node.module}.{each.name}"
    guarded = {id(inner) for node in ast.walk(tree) if _may_miss(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in guarded:
            parts = ast.unparse(node).split(".")
            if parts[0] in modules and all(part.isidentifier() for part in parts):
                yield ".".join([modules[parts[0]], *parts[1:]]), node.lineno


def _is_of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def _may_miss(node: ast.AST) -> bool:
    """Tell whether a statement is ready for a name that is missing."""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    caught = {
        name.id for handler in handlers for name in ast.walk(handler.type or handler) if isinstance(name, ast.Name)
    }
    return bool(caught & {"AttributeError", "ImportError"})


def exists(name: str) -> bool:
    """Tell whether a name can be reached by imports and attributes."""
    found: object = torch
    path = "torch"
    for part in name.split(".")[1:]:
        if not isinstance(found, (ModuleType, type)):
            return True  # attributes of objects are not followed
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ImportError:
            return False
    return True


def missing_caches() -> list[str]:
    """Return the caches of meshes that are not there. Some are under one name in torch 2.9 and under another later."""
    found = []
    for module, path in MESH_CACHES:
        try:
            attrgetter(path)(importlib.import_module(module))
        except (ImportError, AttributeError):
            found.append(f"{module}: {path}")
    return found


def missing() -> list[str]:
    """Return the names that are not there, with the place that uses each."""
    root = Path(accelerate.__path__[0])
    used = {
        name: f"{file.relative_to(root)}:{line}" for file in sorted(root.rglob("*.py")) for name, line in names_in(file)
    }
    used |= dict.fromkeys(OF_A_CUDA_BUILD if torch.version.cuda else (), "a build with CUDA")
    return [f"{name} ({place})" for name, place in used.items() if not name.startswith(OPTIONAL) and not exists(name)]


if __name__ == "__main__":
    print(*missing(), sep="\n")
