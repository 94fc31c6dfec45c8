"""`DeepSpeedPlugin`: the config of DeepSpeed, with the origin of every value.

[Note: claims] A config of DeepSpeed can come from a file, a dict, the plugin's fields and variables, and it repeats
values of the script: batch sizes, accumulation, learning rates. No source overwrites another. A value is *claimed*
with its origin. Where the config has "auto" or no value, the claim is set. Where the config has another value, that is
a conflict, and all conflicts are raised as one error that names both sides.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedSettingError
from ...untrusted import parse_json, read_text
from ..environment import DEEPSPEED_VARIABLES, read_deepspeed
from ..packages import has_package

if TYPE_CHECKING:
    from torch import nn

AUTO = "auto"
STAGE = "zero_optimization.stage"
GATHER_ON_SAVE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
ACCUMULATION = "gradient_accumulation_steps"
CLIPPING = "gradient_clipping"

# Field of the plugin -> the key of DeepSpeed's config.
KEY_OF_FIELD: Mapping[str, str] = {
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIPPING,
    "zero_stage": STAGE,
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": GATHER_ON_SAVE,
}


class HfDeepSpeedConfig:
    """DeepSpeed's config with access by dotted keys: from a dict, a JSON file, or JSON as base64 text."""

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config, self.source = _load(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Store the ZeRO stage, and whether anything is offloaded."""
        stage = self.get_value(STAGE, -1)
        self._stage = -1 if stage == AUTO else stage
        devices = [self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds a dotted key, or None, and the last part of the key."""
        return _node_of(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key and what is below it."""
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"{ds_key_long} is not in {self.source}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether gradients are partitioned, and parameters are not."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether parameters are partitioned."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether anything is offloaded."""
        return self._offload


class Claims:
    """A config that is being merged: values, their origins and conflicts. See [Note: claims]."""

    def __init__(self, config: dict[str, Any], source: str, origins: dict[str, str] | None = None) -> None:
        self.config = config
        self.source = source
        self.origins: dict[str, str] = {} if origins is None else origins
        self.filled: dict[str, str] = {}
        """Key -> origin, of those that were "auto"."""
        self.conflicts: list[str] = []

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key, or None."""
        node, last = _node_of(self.config, key)
        return None if node is None else node.get(last)

    def claim(self, key: str, value: Any, origin: str) -> None:
        """Set a key, or record a conflict if it has another value."""
        known = self.value_of(key)
        if known is None or known == AUTO:
            self._put(key, value, origin)
        elif known != value:
            there = self.origins.get(key, self.source)
            self.conflicts.append(f"{key} is {known!r} in {there}, {value!r} by {origin}")

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Set a key that is "auto"."""
        if self.value_of(key) == AUTO:
            self._put(key, value, origin)

    def default(self, key: str, value: Any, origin: str) -> None:
        """Set a key that is "auto" or missing."""
        if self.value_of(key) in (None, AUTO):
            self._put(key, value, origin)

    def remaining(self) -> list[str]:
        """Return the keys that are still "auto"."""
        return [key for key, value in _flat(self.config) if value == AUTO]

    def check(self) -> None:
        """Raise all conflicts as one error."""
        if self.conflicts:
            raise ValueError(
                "DeepSpeed's config and the script disagree: "
                + "; ".join(self.conflicts)
                + '. Change one of the two, or write "auto" in the config.'
            )

    def explain(self) -> str:
        """Return each value that was "auto" with its origin, one line each."""
        return "\n".join(f"{key} = {self.value_of(key)}  ({origin})" for key, origin in self.filled.items())

    def _put(self, key: str, value: Any, origin: str) -> None:
        *path, last = key.split(".")
        node = self.config
        for name in path:
            node = node.setdefault(name, {})
        if node.get(last) == AUTO:
            self.filled[key] = origin
        node[last] = value
        self.origins[key] = origin


@dataclass
class DeepSpeedPlugin:
    """Configure DeepSpeed by its own config, by the published fields, or by both where they agree."""

    hf_ds_config: Any = None
    """DeepSpeed's config: a JSON file, a dict or an `HfDeepSpeedConfig`. Values may be "auto"."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per step; by default the Accelerator's."""
    gradient_clipping: float | None = None
    """Largest norm of the gradients; without it, the argument of `clip_grad_norm_` in each step."""
    zero_stage: int | None = None
    """What is partitioned: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too. Without a config, 2."""
    is_train_batch_min: bool = True
    """With several data loaders, take the smallest batch as DeepSpeed's micro-batch, or else the largest."""
    offload_optimizer_device: str | None = None
    """Where optimizer states are offloaded to: none, cpu or nvme."""
    offload_param_device: str | None = None
    """Where parameters are offloaded to under ZeRO-3: none, cpu or nvme."""
    offload_optimizer_nvme_path: str | None = None
    """Folder of the optimizer states with `offload_optimizer_device="nvme"`."""
    offload_param_nvme_path: str | None = None
    """Folder of the parameters with `offload_param_device="nvme"`."""
    zero3_init_flag: bool | None = None
    """Let transformers make models in partitions, so that no process ever holds a whole one. Under ZeRO-3, yes."""
    zero3_save_16bit_model: bool | None = None
    """Gather the weights of ZeRO-3 for a state dict. True, unless the config has false."""
    transformer_moe_cls_names: str | None = None
    """Classes, with commas between them, that ZeRO-3 fetches as a whole: experts of which not all are used."""
    enable_msamp: bool | None = None
    """Refused if true: MS-AMP is no longer developed."""
    msamp_opt_level: str | None = None
    """Has no effect without MS-AMP."""

    def __post_init__(self) -> None:
        if self.enable_msamp:
            raise UnsupportedSettingError("enable_msamp=True", "MS-AMP is no longer developed.", "Use bf16.")
        words = read_deepspeed()
        self.hf_ds_config = self.hf_ds_config if self.hf_ds_config is not None else words.pop("hf_ds_config", None)
        has_config = self.hf_ds_config is not None
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config or {})
        self._selected = False
        self.dschf: Any = None
        self.origins: dict[str, str] = {}
        claims = self.claims()
        for field, key in KEY_OF_FIELD.items():
            if (value := getattr(self, field)) is not None:
                claims.claim(key, value, f"DeepSpeedPlugin({field}={value!r})")
            elif field in words:
                claims.claim(key, _read(field, words[field]), f"the variable {DEEPSPEED_VARIABLES[field]}")
        claims.default(STAGE, 0 if has_config else 2, "the default")
        claims.default(GATHER_ON_SAVE, True, "the default: weights can be saved")
        claims.check()
        self.hf_ds_config.set_stage_and_offload()
        for field, key in KEY_OF_FIELD.items():
            setattr(self, field, None if claims.value_of(key) == AUTO else claims.value_of(key))
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = words.get("transformer_moe_cls_names")
        self.zero3_init_flag = self._zero3_init(words.get("zero3_init_flag"))

    def _zero3_init(self, word: str | None) -> bool:
        """Return whether transformers makes models in partitions; old configs ask for it at every stage."""
        flag = self.zero3_init_flag
        if flag is None and word is not None:
            flag = _read("zero3_init_flag", word)
        return self.zero_stage == 3 and (flag is None or bool(flag))

    def claims(self) -> Claims:
        """Return the config with its origins, to claim more values."""
        return Claims(self.deepspeed_config, self.source, self.origins)

    @property
    def source(self) -> str:
        """The origin of the config."""
        return str(getattr(self.hf_ds_config, "source", "the config given in code"))

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's config as it is now."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    # --- published methods ------------------------------------------------------------------------------------------

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a key is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill a key that is "auto" from the arguments, or note where they disagree with it."""
        if ds_key_long not in kwargs:
            return
        claims = self.claims()
        (claims.claim if must_match else claims.fill)(ds_key_long, kwargs[ds_key_long], "arguments")
        if mismatches is None:
            claims.check()
        else:
            mismatches += claims.conflicts

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every key that is "auto" from the arguments, and raise if any of them disagrees with the config."""
        claims = Claims(self.deepspeed_config if config is None else config, self.source, self.origins)
        for key, known in list(_flat(claims.config)):
            if prefix + key in kwargs and (must_match or known == AUTO):
                claims.claim(key, kwargs[prefix + key], "arguments")
        claims.check()

    # --- number formats, and models made in partitions --------------------------------------------------------------

    @property
    def mixed_precision(self) -> str | None:
        """Return the precision that the config sets, or None where it sets none."""
        for name in ("fp16", "bf16"):
            if self.get_value(f"{name}.enabled") is True:
                return name
        flags = [self.get_value(f"{name}.enabled") for name in ("fp16", "bf16")]
        return "no" if all(value is False for value in flags) else None

    def set_mixed_precision(self, mixed_precision: str, origin: str = "mixed_precision") -> None:
        """Set the precision; raise if the config has another one."""
        claims = self.claims()
        for name in ("fp16", "bf16"):
            enabled = mixed_precision == name or (name == "bf16" and mixed_precision == "fp8")
            if enabled or claims.value_of(name) is not None:
                claims.claim(f"{name}.enabled", enabled, f"{origin}={mixed_precision!r}")
        claims.check()

    def is_zero3_init_enabled(self) -> bool:
        """Return whether transformers makes models in partitions."""
        return bool(self.zero3_init_flag)

    def set_deepspeed_weakref(self) -> None:
        """Make transformers, where it is installed, build models in partitions: it looks for a live config object."""
        self.dschf = None
        if self.zero3_init_flag and has_package("transformers") and has_package("deepspeed"):
            from transformers.integrations import HfDeepSpeedConfig as ConfigOfTransformers

            claims = Claims(deepcopy(self.deepspeed_config), self.source)
            claims.default("train_micro_batch_size_per_gpu", 1, "not known yet")  # DeepSpeed reads the config whole
            claims.default(ACCUMULATION, 1, "not known yet")
            claims.config.pop("train_batch_size", None)
            self.dschf = ConfigOfTransformers(claims.config)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Let transformers make models in partitions, or whole, inside the block."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable and self.zero_stage == 3
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let ZeRO-3 fetch the named classes as a whole: which experts a batch uses is not known before."""
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        wanted = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in wanted if name not in classes]
        if missing:
            raise ValueError(
                f"transformer_moe_cls_names names {', '.join(missing)}, and {type(model).__name__} has no such module: "
                f"it has {', '.join(sorted(classes))}."
            )
        set_z3_leaf_modules(model, [classes[name] for name in wanted])

    # --- several plugins ----------------------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Return whether the next model that is prepared uses this plugin."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refuse: `AcceleratorState().select_deepspeed_plugin(name)` chooses, so that one is chosen at a time."""
        if not _from_accelerator_state:
            raise NotImplementedError("Choose by AcceleratorState().select_deepspeed_plugin(name).")
        self._selected = True
        self.set_deepspeed_weakref()

    def _deselect(self) -> None:
        self._selected = False
        self.dschf = None


def _load(given: Any) -> tuple[dict[str, Any], str]:
    if isinstance(given, dict):
        return deepcopy(given), "the config given in code"
    path = Path(str(given)).expanduser()
    if path.is_file():
        text, source = read_text(path, str(path)), str(path)
    else:
        try:
            text, source = base64.urlsafe_b64decode(str(given)).decode("utf-8"), "the config given as base64 text"
        except (UnicodeDecodeError, binascii.Error, ValueError):
            raise ValueError(f"DeepSpeed's config {given!r} is not a dict, an existing JSON file or base64.") from None
    config = parse_json(text, source)
    if not isinstance(config, dict):
        raise ValueError(f"{source} must hold keys and values, not a {type(config).__name__}.")
    return config, source


def _node_of(config: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *path, last = key.split(".")
    node: Any = config
    for name in path:
        node = node.get(name)
        if not isinstance(node, dict):
            return None, last
    return node, last


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(field: str, word: str) -> Any:
    """Parse a variable as the type of its field."""
    if field in ("zero_stage", "gradient_accumulation_steps"):
        return int(word)
    if field == "gradient_clipping":
        return float(word)
    if field.startswith("zero3_"):
        return word.strip().lower() in ("1", "true", "yes", "on")
    return word
