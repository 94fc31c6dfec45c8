"""Build models of fake tensors while everything else that a script does before `prepare` has real numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .....errors import UnsupportedSettingError
from .....program import program_name
from .values import Values

_LARGE_IN_MODEL, _LARGE = 1 << 16, 1 << 27
"""Elements from which a new tensor has no data: inside of a module's constructor, and anywhere."""
_LARGE_FILE = 1 << 26
"""Bytes of a file of weights from which its tensors are not read."""
_CONFIG_OPTIONS = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download")


class Building(TorchDispatchMode):
    """Make new parameters, and large tensors, fake. Ends with the first `prepare`."""

    def __init__(self, fake_mode: FakeTensorMode, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._values = values
        self._ended = False

    def begin(self) -> None:
        """Replace what makes parameters, and what reads weights from files."""
        plain_new, building = nn.Parameter.__new__, self

        def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            return plain_new(cls, building.faked(data) if type(data) is Tensor else data, requires_grad)

        nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
        nn.init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor
        nn.Module.compile = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
        self._replace_load()
        when_imported("transformers.modeling_utils", _build_transformers_from_configs)
        when_imported("diffusers.models.modeling_utils", _build_diffusers_from_configs)
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, models: Iterable[nn.Module], recorder: Any) -> None:
        """Take the data of buffers; from the first call on, every tensor that is made has none."""
        if not self._ended:
            recorder.__exit__(None, None, None)
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._fake_mode.__enter__()
            recorder.__enter__()
            self._ended = True
        for module in (module for model in models for module in model.modules()):
            for name, buffer in module._buffers.items():
                if type(buffer) is Tensor and buffer.device.type == "cpu":
                    module._buffers[name] = hidden = self.faked(buffer)
                    self._values.keep(hidden, buffer)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a tensor, a fake one where it is large."""
        kwargs = kwargs or {}
        shape = args[0] if args and not types else None
        if isinstance(shape, (list, tuple)) and all(isinstance(size, int) for size in shape):
            count = torch.Size(shape).numel()
            if count >= _LARGE or (count >= _LARGE_IN_MODEL and _in_constructor()):
                with self._fake_mode:
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    def faked(self, tensor: Any) -> Any:
        """Return a tensor of the same shape."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return tensor
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _replace_load(self) -> None:
        plain_load, fake_mode = torch.load, self._fake_mode

        def load(file: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, os.PathLike)) and os.path.getsize(file) >= _LARGE_FILE:
                with fake_mode:
                    return plain_load(file, *args, **kwargs)
            return plain_load(file, *args, **kwargs)

        torch.load = load  # type: ignore[assignment]


def _in_constructor() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


# --- libraries ------------------------------------------------------------------------------------------------------


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module now if it is imported, otherwise as soon as it is."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Changes(name, change))


class _Changes(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader, self._change)
        return spec


class _ChangingLoader(Loader):
    def __init__(self, plain: Any, change: Callable[[ModuleType], None]) -> None:
        self._plain, self._change = plain, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._plain.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _build_transformers_from_configs(library: ModuleType) -> None:
    """Make `from_pretrained` read the config only."""

    def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("quantization_config") or kwargs.get("load_in_4bit") or kwargs.get("load_in_8bit"):
            raise UnsupportedSettingError(
                f"{program_name()} plan with a quantized model",
                "its weights are packed by kernels that need numbers.",
                "Plan the script without quantization: activations and communication are the same.",
            )
        dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
        attention = kwargs.pop("attn_implementation", None)
        if config is None or isinstance(config, (str, os.PathLike)):
            config, _ = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        options = {} if attention is None else {"attn_implementation": attention}
        dtype = getattr(config, "dtype", None) if dtype == "auto" else dtype
        config.name_or_path = os.fspath(name) if name else ""
        model = cls._from_config(config, **options).eval()
        model = model if dtype is None else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return (model, {key: [] for key in _LOADING_INFO}) if kwargs.get("output_loading_info") else model

    library.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def _build_diffusers_from_configs(library: ModuleType) -> None:
    """Make `from_pretrained` read the config only."""

    def from_pretrained(cls: Any, /, name: Any, *args: Any, **kwargs: Any) -> Any:
        config = cls.load_config(name, **{key: kwargs[key] for key in _CONFIG_OPTIONS if key in kwargs})
        model = cls.from_config(config).eval()
        dtype = kwargs.get("torch_dtype") or kwargs.get("dtype")
        return model if dtype is None else model.to(dtype)

    library.ModelMixin.from_pretrained = classmethod(from_pretrained)
