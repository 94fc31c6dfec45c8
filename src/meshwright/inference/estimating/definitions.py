"""Create models without weights from a folder, a config.json, a name on the hub, or a function.

transformers, timm and huggingface_hub are imported on use.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import InvalidDataError
from ...untrusted import read_json
from ..empty import init_empty_weights
from ..tensors import META
from .batches import ModelArguments

CONFIG = "config.json"
LIBRARIES = ("timm", "transformers")
USUAL_LENGTH = 512
_HELP = (
    "Give a folder with its config.json instead, or a model of your own with --model module:callable, where the "
    "callable returns a torch.nn.Module."
)


class DefinitionError(ValueError):
    """Report a model that cannot be made, and what to do.

    `meshwright estimate-memory` needs a definition: a name on the Hub, a folder, or `module:function`. Check the name,
    the network and the packages that the message names.
    """


class NoBatchError(ValueError):
    """Report that no inputs are known for a model.

    A training step can be measured only with a batch. Write a function `batch` beside the one that makes the model.
    """


# --- Models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Definition:
    """The location of a model definition, and its library."""

    library: str
    place: str
    """A folder or a file, or a name of the library."""
    contents: dict[str, Any]


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Create a model on the meta device from a local folder, a local config.json, or a name on the hub."""
    found = _find(model_name, library_name, access_token)
    if found.library == "timm":
        return _timm_model(found)
    return _transformers_model(found, trust_remote_code, access_token)


def model_from_function(spec: str) -> nn.Module:
    """Create a model on the meta device by a function of the working directory: `module:callable`."""
    model = _called(spec, load_function(spec))
    if not isinstance(model, nn.Module):
        raise DefinitionError(f"{spec} returned a {type(model).__name__} and not a torch.nn.Module.")
    return model


def load_function(spec: str) -> Callable[..., Any]:
    """Import `module:callable`; the working directory comes first."""
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise DefinitionError(f"{spec!r} is not of the form module:callable.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        reason = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise DefinitionError(f"{module_name!r} cannot be imported from {os.getcwd()}: {reason}.") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise DefinitionError(f"{module_name} has no {path!r}.")
        found = getattr(found, name)
    if not callable(found):
        raise DefinitionError(f"{spec} is a {type(found).__name__} and cannot be called.")
    function: Callable[..., Any] = found
    return function


def _called(spec: str, function: Callable[..., Any], **passed: Any) -> Any:
    """Call a function that the user named; say in a sentence what it lacks or where it failed."""
    missing = _missing_arguments(function, passed)
    if missing:
        raise DefinitionError(
            f"{spec} needs arguments ({', '.join(missing)}), and it is called without. Write a function that needs "
            f"none and calls it, such as `def make(): return {spec.partition(':')[2]}(...)` in model.py, and give "
            "model:make."
        )
    try:
        return on_meta(lambda: function(**passed))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise DefinitionError(
            f"{spec} failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})."
        ) from error


def _missing_arguments(function: Callable[..., Any], passed: Container[str]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C do not say
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in passed
    ]


def on_meta(make: Callable[[], Any]) -> Any:
    """Call a function whose tensors are created on the meta device."""
    try:
        with META:
            return make()
    except (RuntimeError, NotImplementedError):
        # Some constructors read values of tensors they create. Then only parameters can be on meta.
        with init_empty_weights():
            return make()


def _find(name: str, library: str | None, token: str | None) -> _Definition:
    path = Path(name)
    if path.exists():
        config = path / CONFIG if path.is_dir() else path
        if not config.is_file():
            raise DefinitionError(f"{path} has no {CONFIG}, so it does not say which model it is.")
        return _from_config(config, library)
    if library == "timm" and "/" not in name:
        if name in _package("timm").list_models():
            return _Definition("timm", name, {})
        raise DefinitionError(f"timm has no model {name!r}, and there is no such folder here. {_HELP}")
    return _from_hub(name, library, token)


def _from_config(config: Path, library: str | None) -> _Definition:
    try:
        contents = read_json(config, str(config))
    except InvalidDataError as error:
        raise DefinitionError(f"{error}.") from None
    if library is None and isinstance(contents, dict):
        if "model_type" in contents or "architectures" in contents:
            library = "transformers"
        elif "architecture" in contents:
            library = "timm"
    if library is None or not isinstance(contents, dict):
        raise DefinitionError(
            f"{config} has neither a model_type, as transformers writes it, nor an architecture, as timm does. "
            "Name the library with --library_name."
        )
    return _Definition(library, str(config), contents)


def _from_hub(name: str, library: str | None, token: str | None) -> _Definition:
    hub = _package("huggingface_hub")
    try:
        cached = hub.try_to_load_from_cache(name, CONFIG)
    except hub.errors.HFValidationError:
        raise DefinitionError(
            f"There is no file or folder {name!r}, and no model on the hub can have this name."
        ) from None
    if isinstance(cached, str):
        return _from_config(Path(cached), library)
    try:
        info = hub.model_info(name, token=token)
    except hub.errors.GatedRepoError as error:
        raise DefinitionError(
            f"{name!r} is gated: accept its terms on {hub.constants.ENDPOINT}/{name} and log in with `hf auth login`."
        ) from error
    except hub.errors.RepositoryNotFoundError as error:
        raise DefinitionError(f"{name!r} is neither a file or folder here nor a model on the hub. {_HELP}") from error
    except Exception as error:  # any network error
        raise DefinitionError(
            f"{name!r} is no file or folder here, it is not in the hub's cache, and the hub, {hub.constants.ENDPOINT}, "
            f"could not be queried for it ({type(error).__name__}: {error}). {_HELP}"
        ) from error
    library = library or getattr(info, "library_name", None)
    if library not in LIBRARIES:
        raise DefinitionError(
            f"{name!r} is a model of {library or 'an unnamed library'}: this version knows those of "
            f"{' and '.join(LIBRARIES)}. Say which with --library_name, or use --model module:callable."
        )
    if library == "timm":
        return _from_config(Path(hub.hf_hub_download(name, CONFIG, token=token)), library)
    return _Definition(library, name, {})


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DefinitionError(
            f"This model needs the package {name}, which cannot be imported here ({error}). "
            f"Install it with: pip install {name}"
        ) from error


def _transformers_model(found: _Definition, trust_remote_code: bool, token: str | None) -> nn.Module:
    transformers = _package("transformers")
    if "auto_map" in found.contents and not trust_remote_code:
        raise DefinitionError(f"{found.place} brings code of its own. Run it with --trust_remote_code.")
    # Custom code of a model is beside its config, and is found by a folder or a name only.
    place = str(Path(found.place).parent) if Path(found.place).name == CONFIG else found.place
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, token=token)
    except (OSError, ValueError, KeyError) as error:
        raise DefinitionError(f"transformers {transformers.__version__} cannot read {found.place}: {error}") from error
    names = [name for name in (getattr(config, "architectures", None) or ()) if hasattr(transformers, name)]

    def make() -> Any:
        if names:
            return getattr(transformers, names[0])(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)

    try:
        model: nn.Module = on_meta(make)
    except (OSError, ValueError, KeyError) as error:
        raise DefinitionError(f"transformers cannot make the model of {found.place}: {error}") from error
    return model


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name that timm gives to a model on the hub. A name that says where its model is stays as it is."""
    if "/" not in model_name or ":" in model_name.partition("/")[0]:
        return model_name
    return f"hf-hub:{model_name}"


def _timm_model(found: _Definition) -> nn.Module:
    timm = _package("timm")
    contents = found.contents
    options = dict(contents.get("model_args") or {})
    if "num_classes" in contents:
        options["num_classes"] = contents["num_classes"]
    name = contents.get("architecture", found.place)
    try:
        model: nn.Module = on_meta(lambda: timm.create_model(name, pretrained=False, **options))
    except RuntimeError as error:
        raise DefinitionError(f"timm {timm.__version__} cannot make {name!r}: {error}") from error
    return model


# --- Batches ----------------------------------------------------------------------------------------------------------


def batch_from_function(spec: str, batch_size: int, sequence_length: int | None) -> ModelArguments:
    """Create a batch by a function of the working directory, called with the sizes that its signature names."""
    function = load_function(spec)
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length or USUAL_LENGTH}
    taken = inspect.signature(function).parameters
    passed = {name: size for name, size in sizes.items() if name in taken}
    return ModelArguments.of(_called(spec, function, **passed))


def example_batch(model: nn.Module, batch_size: int, sequence_length: int | None = None) -> ModelArguments:
    """Create a training batch for a model of transformers or timm, with labels if its class tells which."""
    config = getattr(model, "config", None)
    if hasattr(model, "main_input_name") and config is not None:
        return _transformers_batch(model, config, batch_size, sequence_length)
    facts = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(facts, dict) and "input_size" in facts:
        return ModelArguments(args=(torch.zeros(batch_size, *facts["input_size"], device=META),))
    raise NoBatchError("this model does not say what its inputs look like: give --inputs module:callable")


def _transformers_batch(model: Any, config: Any, batch_size: int, sequence_length: int | None) -> ModelArguments:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    usual = min(USUAL_LENGTH, longest) if isinstance(longest, int) and longest > 0 else USUAL_LENGTH
    length = sequence_length or usual

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(batch_size, *shape, dtype=torch.long, device=META)

    kind, main = type(model).__name__, model.main_input_name
    tokens = numbers(length)
    if main == "input_ids":
        inputs = {"input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens
    elif main == "pixel_values":
        inputs = {"pixel_values": torch.zeros(batch_size, *_image(config), device=META)}
    elif main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.zeros(batch_size, config.num_mel_bins, frames, device=META)}
        tokens = numbers(sequence_length or min(usual, getattr(config, "max_target_positions", usual)))
        inputs["decoder_input_ids"] = tokens
    else:
        raise NoBatchError(f"no inputs are known for {kind}, which takes {main}: give --inputs module:callable")
    return ModelArguments(kwargs=inputs | _labels(kind, main, tokens))


def _labels(kind: str, main: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the labels from which a model of this class computes its loss."""
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "Seq2SeqLM")):
        return {"labels": tokens} if main != "pixel_values" else {}
    if kind.endswith("ForTokenClassification"):
        return {"labels": tokens}
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": tokens[:, 0].clone()}
    if kind.endswith("ForQuestionAnswering"):
        return {"start_positions": tokens[:, 0].clone(), "end_positions": tokens[:, 0].clone()}
    return {}


def _image(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", 3)
    if isinstance(size, int):
        return channels, size, size
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return channels, int(size[0]), int(size[1])
    return channels, 224, 224  # models that accept any size name none, and this is the usual one
