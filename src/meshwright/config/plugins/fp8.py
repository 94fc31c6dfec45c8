"""The recipes of fp8: public classes that hold values, and the resolved settings with their origins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedSettingError
from ...errors.callers import warn
from ..enums import FP8BackendType
from ..origins import resolve
from .handlers import KwargsHandler

Filter = Callable[[Any, str], bool]
"""Return, for a module and its name, whether it computes in fp8."""


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Tune fp8 through torchao. A field that is None is left to `config`, then to the environment and its default."""

    config: Any = None
    """A `torchao.float8.Float8LinearConfig`; by default scales are computed for every tensor."""
    module_filter_func: Filter | None = None
    """Which linear layers are converted; by default all but the first, the last, and those that do not divide by 16."""
    pad_inner_dim: bool | None = None
    """Pad the inner dimension of products to a multiple of 16, which the hardware needs."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather shards in fp8. It has no effect in this version, which gathers them in their own format."""


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Tune fp8 through NVIDIA's TransformerEngine. A field that is None is left to the environment and its default."""

    use_autocast_during_eval: bool | None = None
    """Compute in fp8 in evaluation too."""
    margin: int | None = None
    """Margin of the scaling factor."""
    interval: int | None = None
    """Steps between two computations of the scaling factor."""
    fp8_format: str | None = None
    """"HYBRID", "E4M3" or "E5M2"."""
    amax_history_len: int | None = None
    """Length of the history of maxima."""
    amax_compute_algo: str | None = None
    """How a maximum is chosen from the history: "max" or "most_recent"."""
    override_linear_precision: tuple[bool, bool, bool] | None = None
    """Which products keep a higher precision: forward, gradient of inputs, gradient of weights."""
    use_mxfp8_block_scaling: bool | None = None
    """Scale by blocks (MXFP8)."""


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Tune fp8 through MS-AMP, which this version refuses."""

    opt_level: str | None = None
    """Level of optimisation: "O1" or "O2"."""


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Tune fp8 through TransformerEngine or MS-AMP: the older form of the two classes above."""

    backend: str | None = None
    """"TE" or "MSAMP"."""


RECIPES: tuple[type[KwargsHandler], ...] = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)


@dataclass(frozen=True, kw_only=True)
class Fp8Settings:
    """The backend of fp8 and its recipe."""

    backend: FP8BackendType
    backend_origin: str
    recipe: AORecipeKwargs
    te_recipe: TERecipeKwargs
    in_code: KwargsHandler | None
    """The recipe among the `kwargs_handlers`, if there is one."""

    @classmethod
    def from_arguments(cls, recipes: Sequence[KwargsHandler | None]) -> Fp8Settings:
        """Resolve the handlers of `Accelerator` against the environment."""
        given = [recipe for recipe in recipes if recipe is not None]
        if len(given) > 1:
            names = " and ".join(type(recipe).__name__ for recipe in given)
            raise ValueError(f"kwargs_handlers has {names}: give one recipe for fp8.")
        in_code = given[0] if given else None
        backend = resolve("fp8_backend", None if in_code is None else _backend_of(in_code), "AO")
        name = str(backend.value).upper()
        if name not in FP8BackendType.__members__:
            choices = ", ".join(member for member in FP8BackendType.__members__ if member != "NO")
            raise ValueError(
                f"fp8_backend {backend.value!r} (from {backend.origin}) is unknown: choose one of {choices}."
            )
        recipe = in_code if isinstance(in_code, AORecipeKwargs) else AORecipeKwargs()
        return cls(
            backend=FP8BackendType[name],
            backend_origin=backend.origin,
            recipe=_filled(recipe),
            te_recipe=_filled_te(in_code if isinstance(in_code, TERecipeKwargs) else TERecipeKwargs()),
            in_code=in_code,
        )

    def warn_of_other_format(self, mixed_precision: str) -> None:
        """Warn if a recipe was given for a run that does not compute in fp8."""
        if self.in_code is not None:
            warn(
                f"kwargs_handlers has {type(self.in_code).__name__}, which has no effect with "
                f'mixed_precision={mixed_precision!r}: it is read with "fp8" only.',
            )

    def refuse_other_engines(self) -> None:
        """Raise if the backend of fp8 is neither torchao nor TransformerEngine."""
        if self.backend != FP8BackendType.AO:
            raise UnsupportedSettingError(
                f"fp8 through {_ENGINES.get(self.backend, 'nobody')} ({self.backend_origin})",
                "this version computes in fp8 through torchao or TransformerEngine.",
                "Use AORecipeKwargs() or --fp8_backend ao, with `pip install torchao`.",
            )


_ENGINES = {FP8BackendType.MSAMP: "MS-AMP"}


def _backend_of(recipe: KwargsHandler) -> str:
    if isinstance(recipe, FP8RecipeKwargs):
        return recipe.backend or "TE"
    return {AORecipeKwargs: "AO", TERecipeKwargs: "TE", MSAMPRecipeKwargs: "MSAMP"}[type(recipe)]


def _filled(recipe: AORecipeKwargs) -> AORecipeKwargs:
    """Fill open fields from the environment, unless a whole config is given."""
    if recipe.config is not None:
        return recipe
    return AORecipeKwargs(
        module_filter_func=recipe.module_filter_func,
        pad_inner_dim=resolve("fp8_pad_inner_dim", recipe.pad_inner_dim, True).value,
        enable_fsdp_float8_all_gather=resolve(
            "fp8_enable_fsdp_float8_all_gather", recipe.enable_fsdp_float8_all_gather, False
        ).value,
    )


def _filled_te(recipe: TERecipeKwargs) -> TERecipeKwargs:
    """Fill open fields from the environment."""
    settings = {field: f"fp8_{field.removeprefix('fp8_')}" for field in _TE_FIELDS}
    values = {field: resolve(name, getattr(recipe, field), None).value for field, name in settings.items()}
    return TERecipeKwargs(
        override_linear_precision=recipe.override_linear_precision,
        use_mxfp8_block_scaling=recipe.use_mxfp8_block_scaling,
        **values,
    )


_TE_FIELDS = ("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo")
