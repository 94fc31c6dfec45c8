"""Record what a rank does: every storage, every kernel and every collective, in the order in which they are issued."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...meter.formulas import flops_of
from ..trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    COPIES,
    FORWARD,
    MAIN_STREAM,
    SETUP,
    TEMPORARIES,
    UPDATE,
    WEIGHTS,
    Allocation,
    Collective,
    Operation,
    Trace,
)
from .groups import COLLECTIVE_NAMESPACES, collective_of
from .host.values import Values

_HOST = ""
"""The owner of memory that no step has touched: a data set, for example. It is not on the device."""
OFFLOADED = "host"
"""The owner of memory that a strategy keeps on the host."""
_OWNER_OF_PHASE = {SETUP: _HOST, FORWARD: ACTIVATIONS}
_aten = torch.ops.aten
_NO_KERNEL = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.detach.default, _aten.alias.default, _aten._unsafe_view.default,
    _aten.lift_fresh.default, torch.ops.prim.device.default,
}  # fmt: skip
_ASKS = (torch.ops.prim.device.default, _aten._local_scalar_dense.default)
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm}


class TraceRecorder(TorchDispatchMode):
    """Write a `Trace` of the fake tensors that pass through torch."""

    supports_higher_order_operators = True

    def __init__(self, trace: Trace, values: Values, axes_of: Callable[[tuple[int, ...]], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.phase = SETUP
        """The phase outside of autograd's engine; inside of it the phase is always BACKWARD."""
        self.module: Callable[[], tuple[str, bool]] = lambda: ("", False)
        """Tells which module is running, and whether it runs its forward pass."""
        self.stream = MAIN_STREAM
        self.owner: str | None = None
        """The owner of new memory, where a strategy knows better than the phase."""
        self.offloads = False
        """Whether weights, gradients and optimizer state are kept on the host, where the optimizer then steps."""
        self._values = values
        self._axes_of = axes_of
        self._muted = 0
        self._live: dict[int, tuple[Allocation, Any]] = {}
        self._issued: dict[int, Collective] = {}
        self._plain_resize: Any = None

    @property
    def tick(self) -> int:
        """The position in the order of events."""
        return self._tick

    _tick = 0

    def __enter__(self) -> TraceRecorder:
        """Begin to record, also storages that are resized in place."""
        self._plain_resize = plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Record nothing: this work happens on the host, or does not happen in a real run."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def labelled(self, *, stream: str | None = None, owner: str | None = None) -> Iterator[None]:
        """Attribute new events to a stream and new memory to an owner."""
        before = self.stream, self.owner
        self.stream, self.owner = stream or self.stream, owner or self.owner
        try:
            yield
        finally:
            self.stream, self.owner = before

    def claim(self, tensor: Any, owner: str, module: str) -> None:
        """Attribute the memory of a tensor to an owner and a module, from its beginning."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not isinstance(local, FakeTensor):
            return
        self._see(local, owner)
        known = self._live.get(local.untyped_storage()._cdata)
        if known is not None:
            stays = self.offloads or known[0].owner == OFFLOADED
            known[0].owner, known[0].module = OFFLOADED if stays else owner, module

    def wait(self, collectives: list[Collective]) -> None:
        """Note that computation waits for collectives here."""
        for collective in collectives:
            if collective.needed is None:
                collective.needed = self._tick

    def finish(self) -> None:
        """Drop memory that stayed on the host."""
        self.trace.allocations = [a for a in self.trace.allocations if a.owner not in (_HOST, OFFLOADED) and a.size]

    # --- events -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors, and write down what it does on a device."""
        kwargs = kwargs or {}
        if function in _ASKS:
            answer = _told(function, args[0])
            if answer is not NotImplemented:
                return answer
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        answer = self._values.answer(function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        result = args[0] if function is torch.ops._c10d_functional.wait_tensor.default else function(*args, **kwargs)
        self._values.learn(function, args, kwargs, result)
        if self._muted:
            return result
        self._tick += 1
        inside_collective = function.namespace in COLLECTIVE_NAMESPACES
        owner = self.owner or (COMMUNICATION if inside_collective else self._owner(function, args))
        outputs = _tensors(result)
        for index, tensor in enumerate(outputs):
            self._see(tensor, OFFLOADED if self._is_computed_on_host(args, index, len(outputs)) else owner)
        if function.is_view:
            return result
        inputs = _tensors((*args, *kwargs.values()))
        if self._phase() != SETUP:
            self._bring_to_device(inputs)
        if inside_collective:
            self._note_collective(function, args, kwargs, inputs, outputs)
        else:
            self._note_operation(function, args, kwargs, result, inputs, outputs)
        return result

    def _owner(self, function: Any, args: Any) -> str:
        phase = self._phase()
        if phase == UPDATE and self.offloads:
            return OFFLOADED
        if function is _aten._to_copy.default and phase != SETUP and isinstance(args[0], FakeTensor):
            known = self._live.get(args[0].untyped_storage()._cdata)
            if known is not None and known[0].owner == WEIGHTS:
                return COPIES
        return _OWNER_OF_PHASE.get(phase, TEMPORARIES)

    def _is_computed_on_host(self, args: Any, index: int, count: int) -> bool:
        """Return whether a result of the update belongs to a parameter on the host; of lists, each to its own."""
        if self._phase() != UPDATE or not args:
            return False
        first = args[0]
        source = first[index] if isinstance(first, (list, tuple)) and len(first) == count else first
        known = self._live.get(source.untyped_storage()._cdata) if isinstance(source, FakeTensor) else None
        return known is not None and known[0].owner == OFFLOADED

    def _phase(self) -> str:
        return BACKWARD if torch._C._current_autograd_node() is not None else self.phase

    def _note_operation(
        self, function: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        if function in _NO_KERNEL or not (inputs or outputs):
            return
        packet = function._overloadpacket
        flops = flops_of(packet, args, kwargs, result)
        largest = max((*inputs, *outputs), key=Tensor.numel)
        module, in_forward = self.module()
        phase = self._phase()
        self.trace.operations.append(
            Operation(
                tick=self._tick,
                name=f"{function.namespace}.{packet.__name__}",
                module=module,
                phase=phase,
                step=len(self.trace.steps),
                flops=flops,
                read_and_written=sum(t.numel() * t.element_size() for t in (*inputs, *outputs)),
                dtype=str((inputs[0] if flops and inputs else largest).dtype).removeprefix("torch."),
                shape=_product_shape(args) if packet in _PRODUCTS else (),
                causal=_is_causal(function, args, kwargs),
                recomputed=phase == BACKWARD and in_forward,
            )
        )

    def _note_collective(
        self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        tensors = [*inputs, *outputs]
        if function is torch.ops._c10d_functional.wait_tensor.default:
            self.wait([self._issued.pop(id(tensor)) for tensor in inputs if id(tensor) in self._issued])
            return
        found = collective_of(function, args, kwargs)
        if found is None or not tensors:
            return
        name, ranks = found
        collective = Collective(
            tick=self._tick,
            name=name,
            axis=self._axes_of(ranks),
            ranks=ranks,
            size=max(map(_bytes, (*args, *kwargs.values(), outputs))),
            module=self.module()[0],
            phase=self._phase(),
            step=len(self.trace.steps),
            stream=self.stream,
        )
        self.trace.collectives.append(collective)
        if function.namespace == "_c10d_functional":
            self._issued[id(outputs[0])] = collective
        elif self.stream == MAIN_STREAM:
            collective.needed = self._tick

    # --- memory -----------------------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, owner: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._allocate(storage, key, owner)
        elif self._live[key][0].size != storage.nbytes():
            self._resized(storage)

    def _allocate(self, storage: Any, key: int, owner: str) -> None:
        allocation = Allocation(
            size=storage.nbytes(),
            owner=owner,
            born=self._tick,
            freed=None,
            module=self.module()[0],
            phase=self._phase(),
            stream=self.stream,
        )
        self.trace.allocations.append(allocation)
        self._live[key] = allocation, weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._tick += 1
            known[0].freed = self._tick

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._live and self._live[key][0].size != storage.nbytes() and not self._muted:
            owner = self.owner or self._live[key][0].owner
            self._free(key)
            self._allocate(storage, key, owner)

    def _bring_to_device(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            known = self._live.get(tensor.untyped_storage()._cdata)
            owner = WEIGHTS if isinstance(tensor, torch.nn.Parameter) else ACTIVATIONS  # of a model that is only used
            if known is None:
                self._see(tensor, owner)
            elif known[0].owner == _HOST:
                known[0].owner = owner


def _told(function: Any, tensor: Any) -> Any:
    """Return the device of a tensor, for which every operator asks, and numbers that autograd has saved as tensors."""
    if function is torch.ops.prim.device.default:
        return tensor.fake_device if isinstance(tensor, FakeTensor) else NotImplemented
    return NotImplemented if isinstance(tensor, Tensor) else tensor


def _is_causal(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is attention with a causal mask of its kernel."""
    if "attention" not in function.__name__:
        return False
    names = [argument.name for argument in function._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("is_causal", False))


def _product_shape(args: Any) -> tuple[int, ...]:
    first, second = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    batch = first.shape[0] if first.dim() == 3 else 1
    return batch * first.shape[-2], first.shape[-1], second.shape[-1]


def _tensors(data: Any) -> list[Tensor]:
    """Return the tensors of an operator's arguments or results: it takes and returns tensors and lists of them."""
    found = []
    for item in data if isinstance(data, (tuple, list)) else (data,):
        if isinstance(item, Tensor):  # positions and masks that do not depend on data are real
            found.append(item)
        elif isinstance(item, (tuple, list)):
            found += _tensors(item)
    return found


def _bytes(data: Any) -> int:
    """Return the bytes of a tensor or of a list of them; a collective names its larger side in one argument."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _tensors(data))
