"""Choose the FSDP units of a model: modules that are gathered, computed and freed one by one."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from ...config.plugins.sharding import FullyShardedDataParallelPlugin

logger = logging.getLogger(__name__)

_DEFAULT_SIZE = 100_000_000


def units_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the units inside a model, inner before outer. The model itself is always one more.

    Units must not share a weight, because one would free it while the other uses it. Such modules are sharded with the
    model.
    """
    wanted = fsdp2_prepare_auto_wrap_policy(plugin, model)
    chosen = [module for module in _post_order(model) if module is not model and wanted(module)]
    tied = _modules_with_shared_weights(model, chosen)
    if tied:
        names = {id(module): name for name, module in model.named_modules()}
        logger.info("Sharded with the model, because they share weights: %s.", ", ".join(names[id(m)] for m in tied))
    return [module for module in chosen if module not in tied]


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool]:
    """Return a predicate for the modules that the plugin makes units.

    It keeps its published name because other libraries replace it.
    """
    plugin = fsdp2_plugin
    policy = plugin.auto_wrap_policy
    if callable(policy):
        given: Callable[..., bool] = policy
        return lambda module: given(module=module, recurse=False, nonwrapped_numel=-1)
    if policy == "no_wrap":
        return lambda module: False
    if policy == "size_based_wrap" or (policy is None and plugin.min_num_params):
        return _by_size(model, plugin.min_num_params or _DEFAULT_SIZE)
    names = plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)
    if names:
        return _by_name(model, list(names))
    if policy == "transformer_based_wrap":
        raise ValueError(
            "auto_wrap_policy='transformer_based_wrap' needs the classes of the blocks: "
            f"transformer_cls_names_to_wrap=[...]. This model has {_class_names(model)}."
        )
    blocks = {id(block) for block in blocks_in_lists(model)}
    return lambda module: id(module) in blocks


def _by_name(model: nn.Module, names: list[str]) -> Callable[[nn.Module], bool]:
    paths = {id(module): path for path, module in model.named_modules()}

    def is_named(module: nn.Module, name: str) -> bool:
        return type(module).__name__ == name or matches_pattern(paths[id(module)], name)

    missing = [name for name in names if not any(is_named(module, name) for module in model.modules())]
    if len(missing) == len(names):
        raise ValueError(
            f"transformer_cls_names_to_wrap={names}: the model has no module of such a class or name. It has "
            f"{_class_names(model)}."
        )
    return lambda module: any(is_named(module, name) for name in names)


def matches_pattern(path: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern such as `blocks.*.up`, in which `*` is one component."""
    steps, wanted = path.split("."), pattern.split(".")
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a name is that of one of these modules, or of something inside of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _by_size(model: nn.Module, smallest: int) -> Callable[[nn.Module], bool]:
    """Choose modules in post-order whose parameters outside of other units are large enough."""
    taken: set[int] = set()
    units: set[int] = set()
    for module in _post_order(model):
        own = {id(param): param.numel() for param in module.parameters() if id(param) not in taken}
        if sum(own.values()) >= smallest:
            units.add(id(module))
            taken |= own.keys()
    return lambda module: id(module) in units


def blocks_in_lists(model: nn.Module) -> list[nn.Module]:
    """Return the composite modules whose class occurs several times in a list inside the model."""
    found: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            composed = [child for child in container if any(True for _ in child.children())]
            counts = Counter(map(type, composed))
            found += [child for child in composed if counts[type(child)] > 1]
    return found


def repeated_blocks(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of the blocks that the model holds in lists."""
    return {type(block) for block in blocks_in_lists(model)}


def ignored_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules that are not sharded."""
    ignored = plugin.ignored_modules
    if ignored is None:
        return []
    if not isinstance(ignored, str):
        return list(ignored)
    pattern = re.compile(ignored)
    modules = [module for name, module in model.named_modules() if name and pattern.fullmatch(name)]
    if not modules:
        raise ValueError(f"ignored_modules={ignored!r} matches the name of no module.")
    return modules


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the current parameters of modules, without duplicates, in the same order on all processes."""
    return list(dict.fromkeys(param for module in modules for param in module.parameters()))


def _modules_with_shared_weights(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), set()).add(id(module))
    shared = []
    for unit in units:
        inside = {id(module) for module in unit.modules()}
        if any(owners[id(param)] - inside for param in unit.parameters()):
            shared.append(unit)
    return shared


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(current: nn.Module) -> Iterator[nn.Module]:
        if id(current) in seen:
            return
        seen.add(id(current))
        for child in current.children():
            yield from walk(child)
        yield current

    return walk(module)


def _class_names(model: nn.Module) -> str:
    counts = Counter(type(module).__name__ for module in model.modules() if module is not model)
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(8)) or "no modules"
