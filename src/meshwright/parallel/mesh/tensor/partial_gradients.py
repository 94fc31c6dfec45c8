"""Find replicated parameters that compute on split activations under tensor parallelism, and sum their gradients.

[Note: partial gradients] Between a column-wise layer and the row-wise layer after it every process holds some columns
of the activations. A replicated parameter there (the norm per head of Qwen3 and Gemma3) gets the gradient of these
columns only; the true gradient is the sum over the processes. A parameter that computes on whole activations gets the
true gradient on every process, and a sum would be wrong. Names or the order of modules do not tell them apart (a norm
may be before, between or after), and comparing gradients misses those that are equal by chance, such as zeros. So the
first forward pass in training is traced, operation by operation:

- the local output of a split layer (`DTensor.to_local`) is *split*, and so is what is computed from it, until a
  row-wise layer or a collective makes it whole again;
- a whole tensor carries the parameters it was computed from since the last split layer, because a split layer
  completes the gradient of its whole inputs (`DTensor.from_local`);
- where a whole tensor is combined with a split one, the gradients of its parameters are partial; where it enters a
  split layer or is returned by the model they are whole.

Partial parameters get a hook that sums their gradient, whole ones none. A parameter that is both is refused by name. So
is a tensor that a split layer returned whole and that is then combined with a split one, because its gradient would be
partial. Tracing works below autograd and sees every torch operation; the first pass is slow. Passes are traced until
every trained parameter has been used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from ....errors import UnsupportedSettingError
from ....runtime.collectives.nested import leaves
from ...modules.spread import rows_of
from ...modules.unwrapping import own_name

logger = logging.getLogger(__name__)

_COLLECTIVES = ("allreduce", "all_reduce", "allgather", "all_gather")
_FACTORIES = ("_like", "new_", "empty", "zeros", "ones", "full")
"""Operations that use only the shape of a tensor."""
_HINT = (
    'runs under a plan of tensor parallelism. If it is the shapes that do not fit: outputs of a "colwise" layer are '
    'split, and only a "rowwise" layer takes them so; "colwise_rep" gathers them. A "rowwise" layer takes split '
    'inputs; "rowwise_rep" takes whole ones.'
)


@dataclass(frozen=True, kw_only=True)
class Completing:
    """Modules that reduce gradients themselves: those of their inputs, or of their outputs."""

    inputs: Sequence[nn.Module] = ()
    outputs: Sequence[nn.Module] = ()


def sum_partial_gradients(
    model: nn.Module, mesh: DeviceMesh, completing: Completing, *, came_split: bool = False
) -> None:
    """Trace the first forward passes in training, and sum partial gradients over the mesh from then on.

    A model that came split may be sharded too; there, a partial gradient with a hook is refused, which may sum it.
    """
    names = [
        name
        for name, param in model.named_parameters()
        if not isinstance(param, DTensor) or (came_split and not rows_of(mesh) <= rows_of(param.device_mesh))
    ]
    if names:
        _ForwardTracker(model, _Dataflow(model, names, mesh), completing, came_split)


class _ForwardTracker:
    """Hooks that trace forward passes until every trained parameter was used."""

    def __init__(self, model: nn.Module, flow: _Dataflow, completing: Completing, came_split: bool) -> None:
        self.flow = flow
        self.completing = completing
        self.came_split = came_split
        self.inside: list[nn.Module] = []
        self.summed = 0
        self.has_warned = False
        self.context: Any = None
        self.names = {module: name for name, module in model.named_modules()}
        # Not as decorators: these would import the compiler with this module, which takes seconds.
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)  # type: ignore[no-untyped-call]
        self.handles = [
            handle
            for module in self.names
            for handle in (
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            )
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.inside:
            # Checkpointed blocks run again in the backward pass.
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return
            if next(module.parameters(), None) is None:  # stages share such modules, and another one may run
                return
            self.context = self.flow.tracking()
            self.context.__enter__()
        self.inside.append(module)
        self.flow.place = self.names[module]
        if module in self.completing.inputs:
            self.flow.complete(args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self.inside:
            return
        while self.inside.pop() is not module:  # the end of a stage ends its modules without their hooks
            pass
        error = sys.exc_info()[1]
        if error is not None:
            self.flow.explain(error)
        elif module in self.completing.outputs:
            self.flow.complete(output)
        if self.inside:
            self.flow.place = self.names[self.inside[-1]]
            return
        try:
            if error is None:
                self._apply_findings(output)
        finally:
            self.context.__exit__(None, None, None)

    def _require_no_hook(self, param: Any, bit: int) -> None:
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            name = next(name for name, own in self.flow.bits.items() if own == bit)
            raise UnsupportedSettingError(
                f"a gradient hook on {name} of a model that was split before prepare()",
                "the parameter computes on split activations, so its gradient is summed over the tp axis, and the hook "
                "may sum it too.",
                "Remove the hook, or register it after the first forward pass.",
            )

    def _apply_findings(self, output: Any) -> None:
        flow = self.flow
        flow.require_whole(output)
        flow.require_one_use()
        partial = flow.partial & ~flow.whole
        for bit, param in flow.parameters.items():
            if partial & ~self.summed & bit:
                if self.came_split:
                    self._require_no_hook(param, bit)
                sum_gradient_of(param, flow.mesh)
        self.summed |= partial
        trained = flow.trained()
        unused = [name for name, bit in flow.bits.items() if name in trained and not flow.used & bit]
        if not unused:
            for handle in self.handles:
                handle.remove()
        elif not self.has_warned:
            self.has_warned = True
            logger.warning(
                "Tensor parallelism follows forward passes until it has seen on what every layer outside of the plan "
                "computes, and the first one did not use %s. Forward passes are slower until then; freeze what is "
                "never used by requires_grad_(False).",
                abbreviated(unused),
            )


class _Dataflow(TorchDispatchMode):
    """Track which tensors are split, and which parameters each whole tensor depends on, as a bit set."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.mesh = mesh
        self._own: dict[DeviceMesh, bool] = {}
        self.bits = {name: 1 << position for position, name in enumerate(names)}
        self.activation = 1 << len(names)
        """The bit of whole outputs of split layers and of the model's inputs."""
        self.parameters: dict[int, nn.Parameter] = {}
        """By bit, as autograd sees them: under FSDP2 the gathered parameter, which is the same object in every pass."""
        self.place = ""
        """The name of the running module."""
        self.used = self.partial = self.whole = 0
        self.mixed_in: dict[int, str] = {}
        self._frozen = 0
        self._known: dict[int, int] = {}
        # A weak reference only keeps the address from being reused.
        self._tensors: dict[StorageWeakRef, tuple[bool, int]] = {}

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Trace what is computed inside the context."""
        trained = self.trained()
        self._frozen = sum(bit for name, bit in self.bits.items() if name not in trained)
        from_local, to_local, full = DTensor.from_local, DTensor.to_local, DTensor.full_tensor
        flow = self

        def enters(local: Tensor, *args: Any, **kwargs: Any) -> DTensor:
            made = from_local(local, *args, **kwargs)
            flow._enters(local, made)
            return made

        def leaves_layer(tensor: DTensor, *, grad_placements: Any = None) -> Tensor:
            local = to_local(tensor, grad_placements=grad_placements)
            if not flow._is_own(tensor.device_mesh):  # a part of a weight that another axis spreads
                flow._set(local, (False, 0))
                return local
            completed = any(isinstance(placement, Partial) for placement in grad_placements or ())
            is_split = flow._is_split(tensor) and not completed
            flow._set(local, (is_split, 0 if is_split or completed else flow.activation))
            return local

        def joined(tensor: DTensor, **kwargs: Any) -> Tensor:
            result = full(tensor, **kwargs)
            flow._set(result, (False, flow.activation))
            return result

        DTensor.from_local = staticmethod(enters)  # type: ignore[assignment]
        DTensor.to_local, DTensor.full_tensor = leaves_layer, joined  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign]
            DTensor.to_local, DTensor.full_tensor = to_local, full  # type: ignore[method-assign]
            self._tensors.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record what its results depend on."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        name = func.__name__
        if any(isinstance(tensor, DTensor) for tensor in tensors) or "detach" in name:
            return result
        is_split, origins = self._state_of_result(name, tensors)
        changed = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
        if _is_one_of(name, _COLLECTIVES):
            changed += [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        for tensor in changed:
            self._set(tensor, (is_split, origins if tensor.is_floating_point() else 0))
        return result

    def _state_of_result(self, operation: str, tensors: list[Tensor]) -> tuple[bool, int]:
        """Return whether an operation's results are split and what they depend on; record the parameters used."""
        states = [self._state(tensor) for tensor in tensors]
        origins = reduce(or_, (origin for _, origin in states), 0)
        self.used |= origins
        if _is_one_of(operation, _COLLECTIVES):
            return False, 0
        if any(is_split for is_split, _ in states):
            self._mark_partial(origins)
            return True, 0
        return False, 0 if _is_one_of(operation, _FACTORIES) else origins

    def trained(self) -> set[str]:
        """Return the names of the parameters that require gradients."""
        return {own_name(name) for name, param in self.model.named_parameters() if param.requires_grad}

    def complete(self, data: Any) -> None:
        """Mark the gradients of these tensors as whole."""
        for tensor in _plain_tensors(data):
            is_split, origins = self._state(tensor)
            self.whole |= origins
            self._set(tensor, (is_split, 0))

    # --- checks -----------------------------------------------------------------------------------------------------

    def require_whole(self, output: Any) -> None:
        """Refuse a model whose first output is split."""
        states = [self._state(tensor) for tensor in _plain_tensors(output)]
        if states and states[0][0]:
            raise ValueError(
                "The plan of tensor parallelism leaves the model's output split: every process has some columns of it. "
                'Give the last layer the style "colwise_rep" (gathered), or "vocab" (logits for cross_entropy).'
            )
        for _, origins in states:
            self.whole |= origins

    def require_one_use(self) -> None:
        """Refuse parameters whose gradient is partial for one use and whole for another."""
        both = self.partial & self.whole & ~self._frozen | self.partial & self.activation
        if both:
            names = [name for name, bit in self.bits.items() if both & bit] or ["what comes before"]
            where = sorted({place or "the model itself" for bit, place in self.mixed_in.items() if both & bit})
            raise ValueError(
                f"Under the plan of tensor parallelism {abbreviated(names)} would get gradients that are whole in part "
                "and in part those of this process's columns: something whole is combined with something split in "
                f'{abbreviated(where)}. Name the layer that makes the whole one in the plan too ("colwise"), or gather '
                'the split one by "colwise_rep".'
            )

    def explain(self, error: BaseException) -> None:
        """Add a hint about the plan to a shape error, once."""
        if (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and _HINT not in str(error)
        ):
            error.args = (f"{error} {self.place or 'The model'} {_HINT}",)

    # --- dependencies of tensors -------------------------------------------------------------------------------------

    def _enters(self, local: Tensor, made: DTensor) -> None:
        if not self._is_own(made.device_mesh) or isinstance(local, DTensor):
            return
        is_split, origins = self._state(local)
        if self._is_split(made):
            self._mark_partial(origins)
        elif is_split:
            raise ValueError(
                f"The plan of tensor parallelism gives {self.place or 'a layer'} an input that is split; it takes a "
                'whole one. Give the layer before it the style "colwise_rep" (gathered), or this one "rowwise".'
            )
        else:
            self.whole |= origins

    def _mark_partial(self, origins: int) -> None:
        if fresh := origins & ~self.partial:
            self.partial |= origins
            for bit in (*self.bits.values(), self.activation):
                if fresh & bit:
                    self.mixed_in[bit] = self.place

    def _is_split(self, tensor: DTensor) -> bool:
        return self._is_own(tensor.device_mesh) and any(not placement.is_replicate() for placement in tensor.placements)

    def _is_own(self, mesh: DeviceMesh) -> bool:
        """Return whether a mesh has the ranks of ours: a model that came split has one with other names."""
        if mesh not in self._own:
            self._own[mesh] = rows_of(mesh) == rows_of(self.mesh)
        return self._own[mesh]

    def _set(self, tensor: Tensor, state: tuple[bool, int]) -> None:
        self._tensors[_memory(tensor)] = state

    def _state(self, tensor: Tensor) -> tuple[bool, int]:
        is_split, origins = self._tensors.get(_memory(tensor), (False, self.activation))
        if isinstance(tensor, nn.Parameter) and not is_split:
            return False, self._origin(tensor)
        if torch.is_grad_enabled() and not tensor.requires_grad:
            origins &= self._frozen  # no gradient flows through this tensor to trained parameters
        return is_split, origins

    def _origin(self, param: Tensor) -> int:
        if id(param) not in self._known:
            for name, current in self.model.named_parameters(remove_duplicate=False):
                bit = self.bits.get(own_name(name))
                if bit is not None and not isinstance(current, DTensor):
                    self._known[id(current)] = bit
                    self.parameters[bit] = current  # also keeps the address from being reused
        return self._known.get(id(param), 0)


def _is_one_of(operation: str, kinds: Sequence[str]) -> bool:
    return any(kind in operation for kind in kinds)


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Return a key that a tensor shares with all its views."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _plain_tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]


def sum_gradient_of(param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Sum every gradient of a parameter over a mesh, before it is accumulated."""
    group = mesh.get_group()

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    trained = param.requires_grad
    param.requires_grad_(True).register_hook(summed)  # type: ignore[no-untyped-call] # frozen ones too: they may be trained later
    param.requires_grad_(trained)


def abbreviated(names: list[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
