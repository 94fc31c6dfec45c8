"""Estimate the memory of a model for inference and training. Nothing is allocated and nothing is printed.

Weights, gradients and optimizer state are counted exactly. The memory of a batch is measured: the model runs on fake
tensors, which have shapes and dtypes but no values, while a hook records the tensors that autograd saves.

[Note: what is in a training step]
Parameters are stored in one format and computed in another one. `float32` does both in fp32. In mixed precision the
parameters, their gradients and Adam's two moments stay in fp32, and autocast makes a 16-bit copy of the weights that
lives as long as the graph. `pure` means that nothing is kept in fp32. The total is the sum of all parts. They do not
all peak at the same time, so it is an upper bound, except for the gradients of activations, the workspaces of kernels
and memory that the allocator caches.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...parallel.modules.wrapping import blocks_in_lists, units_of
from ...runtime.collectives.nested import leaves, recursively_apply
from ..quantized import layers_to_convert, quantized_size
from ..tensors import get_non_persistent_buffers

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = (*FLOATS, "int8", "int4")
_STEP_BYTES = torch.float32.itemsize
"""Adam has a step tensor for each parameter."""
_GATHERED_BLOCKS = 2  # the one that computes, and the next one, which is prefetched


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of a call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Batch:
        """Convert a tensor to one argument, a tuple or a list to arguments, and a mapping to keywords."""
        if isinstance(value, Batch):
            return value
        if isinstance(value, Mapping):
            return cls(kwargs=dict(value))
        return cls(args=tuple(value) if isinstance(value, (tuple, list)) else (value,))


Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The distribution of a model over processes: a copy on each, or with `fsdp` a shard of every parameter."""

    processes: int = 1
    fsdp: bool = False
    reshard_after_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Bytes of one process for inference."""

    weights: int
    gathered: int
    """The parameters of a sharded model that are gathered at one time."""
    forward: int | None
    """The peak of the forward pass, including the batch and outputs; None if not measured."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gathered + (self.forward or 0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Bytes of one process for training."""

    stored_in: str
    computed_in: str
    weights: int
    gradients: int
    optimizer: int
    """Adam: two moments and a step tensor per parameter."""
    activations: int | None
    """Tensors saved for the backward pass, including the batch; None if not measured."""
    copies: int | None
    """Weights that autocast has cast; None if not measured."""
    communication: int
    """Buckets of DDP, or gathered parameters and gradients of FSDP."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        counted = self.weights + self.gradients + self.optimizer + self.communication
        return counted + (self.activations or 0) + (self.copies or 0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a model in one format."""

    dtype: str
    largest_layer: int
    largest_layer_name: str
    inference: Inference
    training: Training | None
    """None for formats that are for inference only."""
    left_out: str | None = None
    """Why the memory of a batch was not measured."""


def estimate(
    model: nn.Module,
    dtype: str,
    *,
    batch: Batch | None = None,
    loss: Loss | None = None,
    spread: Spread = Spread(),
    pure: bool = False,
) -> Estimate:
    """Estimate the memory of a model in a format, per process. It may be on the meta device, and is not changed.

    Without a batch the memory of activations is omitted. `loss` is called with the outputs and the batch; by default it
    is the loss that the model returns, or else a mean of the outputs.
    """
    if dtype not in FORMATS:
        raise ValueError(f"dtype={dtype!r} is unknown: choose one of {', '.join(FORMATS)}.")
    if dtype not in FLOATS:
        spread = Spread(processes=spread.processes)  # quantised weights are not sharded
    sizes = _Sizes(model, dtype)
    name, largest = max(sizes.layers(), key=lambda layer: layer[1], default=("", 0))
    computed_in = FLOATS.get(dtype, torch.float16)
    stored_in = computed_in if pure or dtype not in FLOATS else torch.float32
    forward = saved = copies = None
    problems = [] if batch is not None else ["no batch was given"]
    if batch is not None:
        with _recording_problems(problems):
            forward = forward_peak(model, batch, computed_in)
    if batch is not None and dtype in FLOATS:
        autocast = computed_in if computed_in != stored_in and not spread.fsdp else None
        run_in = stored_in if autocast is not None else computed_in  # FSDP casts what it gathers
        with _recording_problems(problems):
            saved, copies = saved_for_backward(model, batch, run_in, loss=loss, autocast=autocast)
    training = None
    if dtype in FLOATS:
        training = replace(
            _training(_Sizes(model, _dtype_name(stored_in)), _Sizes(model, dtype), spread),
            activations=saved,
            copies=copies,
        )
    return Estimate(
        dtype=dtype,
        largest_layer=largest,
        largest_layer_name=name,
        inference=Inference(
            weights=sizes.share(spread), gathered=sizes.gathered(spread) if spread.fsdp else 0, forward=forward
        ),
        training=training,
        left_out=problems[0] if problems else None,
    )


@contextmanager
def _recording_problems(problems: list[str]) -> Iterator[None]:
    """Record why a model could not be measured: its code may not run on fake tensors. Logs of torch are silenced."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        problems.append(f"the model did not run without numbers ({type(error).__name__}: {reason[:300]})")
    finally:
        logger.setLevel(level)


def _training(stored: _Sizes, computed: _Sizes, spread: Spread) -> Training:
    trained = [param for param in stored.model.parameters() if param.requires_grad]
    gradients = sum(stored.shard(param, spread) for param in trained)
    if spread.processes == 1:
        communication = 0
    elif spread.fsdp:
        # The gradients of a unit are unsharded, in the storage dtype, when they are reduced.
        communication = computed.gathered(spread) + max(stored.units(), default=stored.share(Spread()))
    else:
        communication = gradients  # DDP's buckets are as large as the gradients
    return Training(
        stored_in=stored.dtype,
        computed_in=computed.dtype,
        weights=stored.share(spread),
        gradients=gradients,
        optimizer=2 * gradients + _STEP_BYTES * len(trained),
        activations=None,
        copies=None,
        communication=communication,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Counting ---------------------------------------------------------------------------------------------------------


class _Sizes:
    """The bytes of the tensors of a model in a format; tied tensors count once."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.model = model
        self.dtype = dtype
        self.quantized: set[int] = set()
        self.unchanged: set[int] = set()
        if dtype not in FLOATS:
            self.quantized = {id(layer.weight) for layer in layers_to_convert(model).values()}
            computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
            self.unchanged = {id(buffer) for name, buffer in model.named_buffers() if name in computed}

    def whole(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor."""
        if id(tensor) in self.quantized:
            return quantized_size(tensor, bits=int(self.dtype.removeprefix("int")))
        if not tensor.is_floating_point() or id(tensor) in self.unchanged:
            return tensor.numel() * tensor.element_size()
        return tensor.numel() * FLOATS.get(self.dtype, torch.float16).itemsize

    def shard(self, param: Tensor, spread: Spread) -> int:
        """Return the bytes of the shard of a parameter: rows, padded to the same number on all ranks."""
        if not spread.fsdp or spread.processes == 1:
            return self.whole(param)
        rows = param.shape[0] if param.dim() else 1
        return -(-rows // spread.processes) * (self.whole(param) // max(rows, 1))

    def share(self, spread: Spread) -> int:
        """Return the bytes of the model on one process; buffers are not sharded."""
        params = sum(self.shard(param, spread) for param in self.model.parameters())
        return params + sum(self.whole(buffer) for buffer in self.model.buffers())

    def units(self) -> list[int]:
        """Return the bytes of the parameters of each block."""
        return [sum(self.whole(param) for param in block.parameters()) for block in blocks_of(self.model)]

    def gathered(self, spread: Spread) -> int:
        """Return the bytes of the parameters that FSDP has gathered at one time."""
        if spread.processes == 1:
            return 0
        units = sorted(self.units(), reverse=True)
        total = sum(self.whole(param) for param in self.model.parameters())
        outside = total - sum(units)  # the root unit stays gathered from its first use to its last
        return outside + sum(units[:_GATHERED_BLOCKS]) if spread.reshard_after_forward else total

    def layers(self) -> Iterator[tuple[str, int]]:
        """Yield the parts that cannot be split, with their bytes: blocks, and modules outside of them."""
        blocks = {id(block) for block in blocks_of(self.model)}
        inside: set[int] = set()
        for name, module in self.model.named_modules():
            if id(module) in inside:
                continue
            whole = id(module) in blocks
            if whole:
                inside |= {id(part) for part in module.modules()}
            tensors = [*module.parameters(recurse=whole), *module.buffers(recurse=whole)]
            if tensors:
                yield name, sum(map(self.whole, tensors))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: those that it names, or those in its module lists."""
    try:
        found = units_of(model, FullyShardedDataParallelPlugin(auto_wrap_policy=None))
    except ValueError:  # it names classes of which it has no modules
        found = blocks_in_lists(model)
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


# --- Measuring --------------------------------------------------------------------------------------------------------


def saved_for_backward(
    model: nn.Module,
    batch: Batch,
    dtype: torch.dtype = torch.float32,
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[int, int]:
    """Return the bytes that autograd saves in a forward pass, and those of the weights that autocast cast."""
    try:
        return _saved(model, batch, dtype, loss, autocast, training=True)
    except DataDependentOutputException:
        # Stochastic depth reads the value of a tensor. Without any dropout the model has its largest size except for
        # the masks, which are small.
        return _saved(model, batch, dtype, loss, autocast, training=False)


def _saved(
    model: nn.Module, batch: Batch, dtype: torch.dtype, loss: Loss | None, autocast: torch.dtype | None, training: bool
) -> tuple[int, int]:
    with _with_fake_tensors(model, batch, dtype) as called, _training_mode(model, training=training):
        cast = torch.autocast("cpu", autocast) if autocast is not None else nullcontext()
        with _CastParameters(model) as casts, _kept_by_autograd() as kept:
            with cast:
                outputs = model(*called.args, **called.kwargs)
            if autocast is not None:
                outputs = recursively_apply(_as_fp32, outputs)
            result = (loss or default_loss)(outputs, called)
        own = {_storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        sizes = {key: storage.nbytes() for key, storage in kept.items() if key not in own}
        copies = sum(size for key, size in sizes.items() if key in casts.storages)
        del result  # it keeps the graph alive until here
        return sum(sizes.values()) - copies, copies


def forward_peak(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.float32) -> int:
    """Return the peak bytes of a forward pass without gradients, beside those of the model."""
    with _with_fake_tensors(model, batch, dtype) as called, _training_mode(model, training=False), torch.no_grad():
        tensors = [leaf for leaf in leaves([called.args, called.kwargs]) if _is_tensor(leaf)]
        given: dict[int, int] = {_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        own = {_storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        with _LiveMemory(ignored={*own, *given}) as live:
            model(*called.args, **called.kwargs)
        return sum(given.values()) + int(live.peak)


def default_loss(outputs: Any, batch: Batch) -> Tensor:
    """Return the loss that a model returned, or else a scalar that depends on all of its outputs."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    numbers = [leaf.float().mean() for leaf in leaves(outputs) if _is_tensor(leaf) and leaf.is_floating_point()]
    if not numbers:
        raise ValueError("the model returned no tensor of floating-point numbers")
    return torch.stack(numbers).sum()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _storage_id(tensor: Tensor) -> int:
    """Return an id of the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _kept_by_autograd() -> Iterator[dict[int, Any]]:
    """Collect the storages that autograd saves. They are kept alive, so that no later one reuses an id."""
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages.setdefault(_storage_id(tensor), tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


class _CastParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the storages of parameters that are cast to another dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.params = {_storage_id(param) for param in model.parameters()}
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage_id(args[0]) in self.params:
            self.storages[_storage_id(result)] = result.untyped_storage()
        return result


class _LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track the memory of tensors that are created inside the mode, and its peak."""

    def __init__(self, ignored: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = set(ignored)
        self.references: dict[int, Any] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        return result

    def _track(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_id(tensor)
        if key in self.known:
            return
        size = storage.nbytes()

        def on_free(_: Any) -> None:
            self.known.discard(key)
            self.references.pop(key, None)
            self.now -= size

        self.known.add(key)
        self.references[key] = weakref.ref(storage, on_free)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def _training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the training mode inside the block."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@contextmanager
def _with_fake_tensors(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Iterator[Batch]:
    """Replace the tensors of a model and a batch by fake ones inside the block, floating-point ones in a dtype.

    Their device is the CPU and not meta, because autocast and attention take other code paths on meta.
    """
    fakes: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            if id(tensor) not in fakes:
                number_format = dtype if tensor.is_floating_point() else tensor.dtype
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=number_format, device="cpu")
                is_param = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_param else made
            return fakes[id(tensor)]

        with _replaced(model, fake):
            args, kwargs = recursively_apply(fake, [batch.args, dict(batch.kwargs)])
            yield Batch(args=args, kwargs=kwargs)


@contextmanager
def _replaced(model: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace all tensors of a model by the results of a function, including those in plain attributes."""
    places: list[tuple[dict[str, Any], str, Any]] = [
        (place, name, value)
        for module in model.modules()
        for place in (module._parameters, module._buffers, vars(module))
        for name, value in place.items()
        if isinstance(value, Tensor)
    ]
    try:
        for place, name, value in places:
            place[name] = function(value)
        yield
    finally:
        for place, name, value in places:
            place[name] = value
