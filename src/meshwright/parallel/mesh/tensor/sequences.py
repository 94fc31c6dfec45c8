"""Sequence parallelism: between the layers that a plan splits, every process holds a part of the sequence.

[Note: sequences] A plan splits regions: attention from its projections to the output, an MLP from its first layer to
its last. Outside of them (norms, dropout, residual sums) the same would be computed on every process of the axis.
Here the sequence is split instead: the first block gets a part of it, a region gathers the sequence at its input and
scatters the sum at its output, and after the last block the sequence is whole again. An all-reduce becomes a gather
and a scatter, which move as many bytes, and activations outside of the regions take 1 / `tp_size` of the memory. The
gradients of norms are then those of a part of the sequence; [Note: partial gradients] finds and sums them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import UnsupportedSettingError

Layers = Mapping[str, tuple[nn.Module, ParallelStyle]]
_SEQUENCE = 1
"""The dimension of the sequence."""


def split_between_regions(model: nn.Module, layers: Layers, rest: Mapping[str, str], mesh: DeviceMesh) -> Layers:
    """Split sequences between the regions of a plan; return its layers with styles that scatter their outputs."""
    if rest:
        raise _refusal(f"the plan has styles of transformers alone ({', '.join(sorted(set(rest.values())))})")
    closing = {name: module for name, (module, style) in layers.items() if _closes_region(module, style)}
    blocks = _blocks(model, list(closing))
    regions = dict.fromkeys(name.rpartition(".")[0] for name in closing)
    for region in regions:
        if region in blocks:
            raise _refusal(f"{region} has split layers of its own: attention and MLP must be modules inside of a block")
        model.get_submodule(region).register_forward_pre_hook(_GatherInput(mesh), with_kwargs=True)
    first, last = (model.get_submodule(blocks[end]) for end in (0, -1))
    first.register_forward_pre_hook(_SplitInput(mesh, blocks[0]), with_kwargs=True)
    last.register_forward_hook(_GatherOutput(mesh))
    scattered = {name: (module, RowwiseParallel(output_layouts=Shard(_SEQUENCE))) for name, module in closing.items()}
    return {**layers, **scattered}


def _closes_region(module: nn.Module, style: ParallelStyle) -> bool:
    is_rowwise = isinstance(style, RowwiseParallel) and not isinstance(module, nn.Embedding)
    return is_rowwise and not style.input_layouts[0].is_replicate()  # type: ignore[attr-defined]


def _blocks(model: nn.Module, names: list[str]) -> list[str]:
    """Return the elements of a list of modules that these layers are in, in their order."""
    blocks: dict[str, str] = {}
    for name in names:
        path = name.split(".")
        depths = [n for n in range(1, len(path)) if isinstance(_at(model, path[: n - 1]), nn.ModuleList)]
        if not depths:
            raise _refusal(f"{name} is in no nn.ModuleList of blocks")
        blocks[".".join(path[: depths[0]])] = ".".join(path[: depths[0] - 1])
    if len(set(blocks.values())) != 1:
        raise _refusal(f"there are several lists of blocks ({', '.join(sorted(set(blocks.values())))})" if blocks else
                       "the plan has no rowwise layer")  # fmt: skip
    return sorted(blocks, key=lambda block: int(block.rpartition(".")[2]))


def _at(model: nn.Module, path: list[str]) -> nn.Module:
    return model.get_submodule(".".join(path))


def _refusal(reason: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(
        "TorchTensorParallelConfig(sequence_parallel=True) (sequence_parallelism of Megatron-LM)",
        f"{reason}.",
        "Leave it out, or write sequence styles into the plan yourself.",
    )


class _SplitInput:
    """Give a block its part of the sequence."""

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        self.mesh = mesh
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_hidden_states(args, kwargs, self._split)

    def _split(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[_SEQUENCE]
        if length % self.mesh.size():
            raise ValueError(
                f"{self.name} was given a sequence of {length} positions, which tp_size={self.mesh.size()} does not "
                "divide; sequence_parallel splits it. Pad batches to a multiple."
            )
        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(_SEQUENCE)]).to_local()


class _GatherInput:
    """Give a region the whole sequence: as a DTensor, so that its layers sum their gradients in one message."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_hidden_states(args, kwargs, lambda hidden: _gathered(hidden, self.mesh))


class _GatherOutput:
    """Make the output of the last block whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return _gathered(output, self.mesh).to_local()
        return type(output)([_gathered(output[0], self.mesh).to_local(), *output[1:]])


def _gathered(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    parts = DTensor.from_local(hidden, mesh, [Shard(_SEQUENCE)], run_check=False)
    return parts.redistribute(placements=[Replicate()])


def _with_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """Return the arguments of a call with the hidden states changed: its first tensor."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    return args, kwargs
