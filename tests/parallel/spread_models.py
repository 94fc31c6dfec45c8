"""Ways to spread the small transformer before it comes to `prepare`, and the settings it may then meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from meshwright import FullyShardedDataParallelPlugin, ParallelismConfig, cpu_offload

from .small_transformer import TP_PLAN, Transformer

STYLES = {
    name.replace("*", str(block)): ColwiseParallel() if style == "colwise" else RowwiseParallel()
    for block in (0, 1)
    for name, style in TP_PLAN.items()
}


def shard(net: Transformer, **options: Any) -> nn.Module:
    """Shard blocks, then the model."""
    shard_blocks(net, **options)
    return fully_shard(net, **options)


def shard_blocks(net: Transformer, **options: Any) -> nn.Module:
    """Shard only the blocks."""
    for block in net.blocks:
        fully_shard(block, **options)
    return net


def split(net: Transformer, mesh: Any) -> nn.Module:
    """Split layers by torch's own function."""
    return parallelize_module(net, mesh, STYLES)


def _mesh(*sizes: int, names: str = "outer inner") -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()[-len(sizes) :]))


def _world() -> Any:
    return _mesh(dist.get_world_size())


def _wrap_a_block(net: Transformer) -> nn.Module:
    net.blocks[0] = DistributedDataParallel(net.blocks[0])
    return net


def _two_ways(net: Transformer) -> nn.Module:
    fully_shard(net.blocks[1])
    return _wrap_a_block(net)


def _fsdp1(net: Transformer) -> nn.Module:
    """Make a wrapper of FSDP1 without its constructor, which needs a GPU."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = net
    wrapper.training_state = None  # type: ignore[assignment]
    return wrapper


def _over_devices(net: Transformer) -> nn.Module:
    wrapper = DataParallel(net)
    wrapper.device_ids = [0, 1]
    return wrapper


def _sharded_and_split(net: Transformer) -> nn.Module:
    mesh = _mesh(2, 2)
    split(net, mesh["inner"])
    return shard(net, mesh=mesh["outer"])


def _divided_by_one(net: Transformer) -> nn.Module:
    sharded: Any = shard(net)
    sharded.set_gradient_divide_factor(1.0)
    return net


def _over_pairs(net: Transformer) -> nn.Module:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return DistributedDataParallel(net, process_group=groups[dist.get_rank() // 2])


KINDS: dict[str, Callable[[Transformer], nn.Module]] = {
    "fully_shard": shard,
    "fully_shard of blocks": shard_blocks,
    "fully_shard but one": lambda net: fully_shard(net, ignored_params={net.head.weight}),
    "fully_shard divided by 1": _divided_by_one,
    "parallelize_module": lambda net: split(net, _world()),
    "DDP": DistributedDataParallel,
    "DDP of a block": _wrap_a_block,
    "DDP of a block, fully_shard of another": _two_ways,
    "FSDP1": _fsdp1,
    "DataParallel": _over_devices,
    "replicate": lambda net: replicate(net),
    "cpu_offload": lambda net: cpu_offload(net, "cpu"),
}
"""Ways that work on any number of processes."""


KINDS_OF_FOUR: dict[str, Callable[[Transformer], nn.Module]] = {
    "HSDP": lambda net: shard(net, mesh=_mesh(2, 2)),
    "fully_shard over pairs": lambda net: shard(net, mesh=_mesh(2, 2)["inner"]),
    "fully_shard and parallelize_module": _sharded_and_split,
    "parallelize_module over pairs": lambda net: split(net, _mesh(2, 2)["inner"]),
    "parallelize_module over distant pairs": lambda net: split(net, _mesh(2, 2)["outer"]),
    "DDP over pairs": _over_pairs,
}
"""Ways that need four processes."""


def _sizes(**sizes: int) -> Callable[[], dict[str, Any]]:
    plan = TP_PLAN if "tp_size" in sizes else None
    return lambda: {"parallelism_config": ParallelismConfig(tp_plan=plan, **sizes)}


SETTINGS: dict[int, dict[str, Callable[[], dict[str, Any]]]] = {
    1: {"none": dict},
    2: {
        "none": dict,
        "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "tp": _sizes(tp_size=2),
        "pp": _sizes(pp_size=2),
    },
    4: {
        "none": dict,
        "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "hsdp": _sizes(dp_replicate_size=2, dp_shard_size=2),
        "fsdp x tp": _sizes(dp_shard_size=2, tp_size=2),
        "copies x tp": _sizes(dp_replicate_size=2, tp_size=2),
    },
}
"""The arguments of the Accelerator, by number of processes."""
