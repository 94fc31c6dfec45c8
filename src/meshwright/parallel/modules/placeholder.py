"""A placeholder for a module that another process owns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...runtime.collectives.nested import leaves

_MAX_CACHED = 64


class Placeholder(nn.Module):
    """Replace a module that another stage owns: it returns fake tensors of the right shapes."""

    def __init__(self, meta_module: nn.Module) -> None:
        super().__init__()
        self.__dict__["meta_module"] = meta_module  # not as a submodule: it has no state to save or train
        self.__dict__["_known"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module would return. Results of fake tensors are cached by the shapes of the inputs.

        Anything else, such as a mask or a number, may depend on input values, and is computed each time.
        """
        given = leaves((args, kwargs))
        key = tuple((x.shape, x.dtype, type(x)) if isinstance(x, Tensor) else (x, type(x)) for x in given)
        try:
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that cannot be compared
            return self.meta_module(*args, **kwargs)
        versions = _versions(given)
        result = self.meta_module(*args, **kwargs)
        without_data = all(leaf is None or isinstance(leaf, FakeTensor) for leaf in leaves(result))
        if without_data and _versions(given) == versions:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[key] = result
        return result

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to compile."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes of the replaced module, such as its width."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["meta_module"], name)


def _versions(data: list[Any]) -> list[int]:
    """Return the version counters of the real tensors."""
    tensors = [x for x in data if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
