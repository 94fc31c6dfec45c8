"""`Sleeping`: free the device of models and optimizers for a while, and restore them bit by bit.

[Note: sleeping storages]
What is moved are storages, not tensors: each is copied once and resized to nothing, and on waking gets its size and its
bytes back. So parameters, DTensors, gradients, views in the buckets of DDP and shards of FSDP2 remain the same objects,
and what shares memory goes on sharing it. A tensor whose storage is empty must not be read: torch would read from
address 0. Hooks refuse the calls that do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..checkpoint.commit.staging import Staging
from ..config.combinations import Feature, require_combination
from ..config.plugins.offload import PLACEMENTS
from ..errors import UnsupportedSettingError
from ..optimizer import AcceleratedOptimizer
from ..parallel.modules.dtensors import local
from ..parallel.modules.memory.stepping import early_steps_of
from ..parallel.modules.unwrapping import is_compiled_module
from ..precision.quantized import is_composed, refuse_quantized
from ..runtime.collectives.nested import tensors_of
from ..runtime.devices.device import clear_device_cache, has_streams
from ..runtime.group.runtime import Runtime
from ..runtime.streams.mapping import new_shared_file, release_pages, return_freed_memory, write_pages

_CALL = Feature.ASLEEP.value


class Sleeping:
    """Models and optimizers whose tensors leave the device inside a `with` block. See [Note: sleeping storages]."""

    def __init__(
        self,
        objects: tuple[nn.Module | Optimizer, ...],
        runtime: Runtime,
        features: Mapping[Feature, str],
        *,
        to: str,
        folder: Path | None,
    ) -> None:
        if to not in PLACEMENTS:
            raise ValueError(f"asleep(to={to!r}): choose one of {', '.join(PLACEMENTS)}.")
        if folder is not None and to != "disk":
            raise ValueError(f"asleep(folder=...) is for to='disk', not {to!r}.")
        for each in objects:
            if not isinstance(each, (nn.Module, Optimizer)):
                raise TypeError(f"asleep() takes models and optimizers, not a {type(each).__name__}.")
        self.num_bytes = 0
        """The bytes that are away from the device. In host memory, they are pinned where the device has streams."""
        self._models = [each for each in objects if isinstance(each, nn.Module)]
        self._prepared = [each for each in objects if isinstance(each, AcceleratedOptimizer)]
        self._optimizers = [_own(each) for each in objects if isinstance(each, Optimizer)]
        self._features = dict(features)
        self._device = runtime.device
        self._rank = runtime.process_index
        self._to = to
        self._folder = folder or Path(tempfile.gettempdir())
        self._staging = Staging()
        self._moved: list[tuple[Tensor, Tensor]] = []
        """For each storage, its bytes on the device, and their copy."""
        self._hooks: list[Any] = []

    def __enter__(self) -> Sleeping:
        self._refuse()
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # an evaluation leaves the root gathered
        storages = self._storages()
        copies = self._copied(storages)
        self._moved = list(zip(storages, copies, strict=True))
        self.num_bytes = sum(copy.nbytes for copy in copies)
        self._synchronize()  # other streams may read what is freed
        self._watch()
        self._resize(to_nothing=True)
        self._release()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wake()

    def wake(self) -> None:
        """Bring everything back, as the end of the block does. A second call does nothing.

        Where the device has no room, nothing is lost: free memory, and call it again.
        """
        if not self._moved:
            return
        clear_device_cache()  # what an engine of this process has freed
        try:
            self._resize(to_nothing=False)
        except RuntimeError as error:
            self._resize(to_nothing=True)
            raise RuntimeError(
                f"Rank {self._rank} cannot wake: {self.num_bytes} bytes that were on {self._device} "
                f"do not fit there any more. Free the memory of the engine, then call wake() of what `with {_CALL} as "
                f"sleeping` gave: nothing is lost. {error}"
            ) from error
        for own, copy in self._moved:
            own.copy_(copy, non_blocking=True)
        self._synchronize()
        for hook in self._hooks:
            hook.remove()
        for wrapper in self._prepared:
            wrapper.refuse_use = None
        self._hooks, self._moved, self.num_bytes = [], [], 0
        self._staging.clear()

    # --- what cannot sleep ------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """Refuse what is not known to be right, before anything is moved."""
        in_use = {Feature.ASLEEP: _CALL} | self._features
        if any(early_steps_of(optimizer) is not None for optimizer in self._optimizers):
            in_use[Feature.STEP_IN_BACKWARD] = Feature.STEP_IN_BACKWARD.value
        if any(_is_compiled(module) for model in self._models for module in model.modules()):
            in_use.setdefault(Feature.COMPILE, Feature.COMPILE.value)
        require_combination(in_use)
        for model in self._models:
            refuse_quantized(
                model, _CALL, "scales are beside the weights, and were not tried.", "Load the model again instead."
            )

    def _storages(self) -> list[Tensor]:
        """Return the bytes of every storage on the device, each once."""
        found: dict[int, Tensor] = {}
        for name, tensor in self._named_tensors():
            own = local(tensor.detach())
            if objection := _objection(own):
                raise UnsupportedSettingError(f"{_CALL} with {name}", objection, "Leave it out.")
            if own.device.type != self._device.type or own.numel() == 0:
                continue
            storage = own.untyped_storage()
            if storage.nbytes() == 0:
                raise RuntimeError(
                    f"Rank {self._rank}: {name} is asleep already. Wake it, or name it in one block only."
                )
            found.setdefault(storage._cdata, torch.empty(0, dtype=torch.uint8, device=own.device).set_(storage))
        return list(found.values())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for model in self._models:
            for name, param in model.named_parameters():
                yield name, param
                if param.grad is not None:
                    yield f"the gradient of {name}", param.grad
            yield from model.named_buffers()
        for optimizer in self._optimizers:
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for tensor in tensors_of([*optimizer.state.values(), *options]):
                yield f"the state of {type(optimizer).__name__}", tensor

    # --- moving -----------------------------------------------------------------------------------------------------

    def _copied(self, storages: list[Tensor]) -> list[Tensor]:
        if self._to == "host":
            copies: list[Tensor] = self._staging.copy("asleep", storages)
            self._staging.synchronize()
            return copies
        files = [new_shared_file(self._folder, own.nbytes) for own in storages]  # a full disk shows here
        for own, file in zip(storages, files, strict=True):
            file.copy_(own)
            write_pages(file)
            release_pages(file)
        return files

    def _resize(self, *, to_nothing: bool) -> None:
        for own, copy in self._moved:
            own.untyped_storage().resize_(0 if to_nothing else copy.nbytes)

    def _synchronize(self) -> None:
        if has_streams(self._device):
            torch.accelerator.synchronize(self._device)

    def _release(self) -> None:
        """Give freed memory back, for engines of other processes."""
        if has_streams(self._device):
            clear_device_cache()
        else:
            return_freed_memory()

    # --- calls while asleep -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Refuse calls that would read or write what is away."""
        for model in self._models:
            for module in model.modules():
                refuse = self._refusal(type(module).__name__)
                self._hooks += [
                    module.register_forward_pre_hook(refuse, prepend=True),  # before FSDP2 gathers
                    module.register_state_dict_pre_hook(refuse),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(refuse),  # type: ignore[no-untyped-call]
                ]
        for wrapper in self._prepared:
            wrapper.refuse_use = self._refusal(type(wrapper.optimizer).__name__)
        for optimizer in self._optimizers:
            refuse = self._refusal(type(optimizer).__name__)
            self._hooks += [
                optimizer.register_step_pre_hook(refuse),
                optimizer.register_state_dict_pre_hook(refuse, prepend=True),
                optimizer.register_load_state_dict_pre_hook(refuse, prepend=True),
            ]

    def _refusal(self, name: str) -> Callable[..., NoReturn]:
        message = (
            f"Rank {self._rank}: {name} is asleep: its tensors are away from {self._device} (to={self._to!r}) until "
            f"the block of {_CALL} ends. Use it after the block."
        )

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(message)

        return refuse


def _own(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or getattr(module, "_compiled_call_impl", None) is not None


def _objection(own: Tensor) -> str | None:
    """Return why the storage of a tensor cannot be emptied and filled again."""
    if own.is_meta:
        return "it is on the meta device: an offloaded weight is brought by other means."
    if is_composed(own):
        return f"a {type(own).__name__} has tensors inside, which were not tried."
    if own.layout != torch.strided:
        return f"a tensor of layout {own.layout} has no single storage."
    storage: Any = own.untyped_storage()
    if not storage.resizable() or (own.device.type == "cpu" and storage.is_shared()):
        return "its memory belongs to somebody else (NumPy, a file, another process)."
    return None
