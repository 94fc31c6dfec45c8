"""Read the arguments of `Accelerator`: handlers of each class once, and arguments that exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

from ..config.enums import DynamoBackend
from ..config.environment import CHECK, FIRST_STEPS, VERIFY_FOLDER, read, read_setting, variable_of
from ..config.origins import NOT_YET
from ..config.plugins.compilation import TorchDynamoPlugin
from ..config.plugins.handlers import KwargsHandler
from ..config.settings import TrainingSettings
from ..errors import UnsupportedSettingError
from ..instruments import Instrument
from ..parallel.base import Strategy

H = TypeVar("H", bound=KwargsHandler)


class Handlers:
    """The `kwargs_handlers` argument: at most one handler of each class, and none that nothing reads."""

    def __init__(self, handlers: Sequence[KwargsHandler]) -> None:
        self._by_type: dict[type, KwargsHandler] = {}
        for handler in handlers:
            if not isinstance(handler, KwargsHandler):
                raise TypeError(
                    f"Unsupported kwargs handler passed: {handler!r}. kwargs_handlers takes objects such as "
                    "DistributedDataParallelKwargs(...)."
                )
            if type(handler) in self._by_type:
                raise ValueError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`: there are two.")
            self._by_type[type(handler)] = handler

    def take(self, kind: type[H]) -> H | None:
        """Return the handler of a class, which is then read."""
        return cast("H | None", self._by_type.pop(kind, None))

    def refuse_rest(self) -> None:
        """Raise for a handler that nothing has read."""
        for kind in self._by_type:
            raise UnsupportedSettingError(f"kwargs_handlers=[{kind.__name__}()]", NOT_YET, "Leave it out.")


def one_of(deepspeed_plugin: Any, deepspeed_plugins: Any) -> Any:
    """Return the DeepSpeed plugins, which are given in one of two arguments."""
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ValueError(
            "Accelerator was given deepspeed_plugin and deepspeed_plugins: pass all of them in deepspeed_plugins."
        )
    return deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin


def compilation_in_code(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None
) -> TorchDynamoPlugin | None:
    """Return how `prepare` compiles models, by one of two arguments; None where neither is given."""
    if backend is None:
        return plugin
    if plugin is not None:
        raise ValueError(
            "Accelerator was given dynamo_backend and a dynamo_plugin: give the backend in one place, "
            "TorchDynamoPlugin(backend=...)."
        )
    return TorchDynamoPlugin(backend=backend)


def settings_of_run(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings as given, or those of a run that `meshwright check --mesh` compares."""
    if read(VERIFY_FOLDER) is None:
        return settings
    from ..tools.verify.script import adapted  # hardly any run needs it

    return adapted(settings)


def strategy_of_run(strategy: Strategy) -> Strategy:
    """Return the strategy as given, or that of a run that `meshwright check --mesh` compares."""
    if read(VERIFY_FOLDER) is None:
        return strategy
    from ..tools.verify.script import adapted_strategy

    return adapted_strategy(strategy)


def instruments_of_run() -> list[Instrument]:
    """Return the instruments that the environment names as `package.module:Class`, separated by commas.

    The check of the first steps is one of them, unless it is switched off; `meshwright check` sees more than it does.
    """
    names = [name.strip() for name in (read_setting("instruments") or "").split(",") if name.strip()]
    if CHECK not in names and read_setting("first_steps") != "off":
        names.append(FIRST_STEPS)
    return [_make_instrument(name) for name in names]


def _make_instrument(name: str) -> Instrument:
    module, _, attribute = name.partition(":")
    try:
        instrument = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedSettingError(
            f"{variable_of('instruments')}={name}", f"{error}.", "Name an importable class: package.module:Class."
        ) from error
    if not isinstance(instrument, Instrument):
        raise UnsupportedSettingError(
            f"{variable_of('instruments')}={name}",
            f"it makes a {type(instrument).__name__}, which is no Instrument.",
            "Derive the class from meshwright.Instrument.",
        )
    return instrument


def placements_of(objects: Sequence[Any], given: Sequence[bool | None] | None) -> Sequence[bool | None]:
    """Return one choice of placement for each object of `prepare`."""
    placements = [None] * len(objects) if given is None else given
    if len(placements) != len(objects):
        raise ValueError(
            f"`device_placement` should be a list with {len(objects)} elements, one for each object, but it has "
            f"{len(placements)}."
        )
    return placements
