"""Find, read and write the configuration files of `meshwright config`, and detect unknown keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...program import program_name
from ...untrusted import parse_json, parse_yaml, read_text, require_no_control
from ..enums import DistributedType
from ..environment import read
from .options import AWS, BY_NAME, BY_YAML_KEY, DEEPSPEED, FSDP, MANIFESTS, MEGATRON, PARALLELISM, TPU, Option, yes_no

# Keys for the kind of a file, and keys of other commands: known, but no options of a launch.
KIND_KEYS = ("compute_environment", "distributed_type")
OTHER_KEYS = (
    *("tpu_name", "tpu_zone", "command_file", "commands"),
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
    *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
)
SECTIONS = tuple(dict.fromkeys(key.split(".")[0] for key in BY_YAML_KEY if "." in key))
KNOWN_KEYS = frozenset((*BY_YAML_KEY, *KIND_KEYS, *OTHER_KEYS, *SECTIONS))

# What a file's `distributed_type` switches on; MULTI_CPU, and the MULTI_ names of accelerators, only count processes.
SWITCH_OF_KIND = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
    "TPU": "tpu",
}
# A section is written for its engine; the value of an engine's section counts as a request for the engine.
_SWITCH_OF_SECTION = {"parallelism_config": "use_parallelism_config"}

ENGINE_OF_SWITCH = {
    "use_fsdp": FSDP,
    "use_deepspeed": DEEPSPEED,
    "use_megatron_lm": MEGATRON,
    "use_parallelism_config": PARALLELISM,
    "tpu": TPU,
    "kubernetes": MANIFESTS,
    "skypilot": MANIFESTS,
}


def config_folder() -> Path:
    """Return the folder of the default file: in HF_HOME, else in XDG_CACHE_HOME, else in ~/.cache."""
    if home := read("HF_HOME"):
        return Path(home).expanduser() / "accelerate"
    cache = Path(read("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "huggingface" / "accelerate"


def default_config_path() -> Path:
    """Return the default file, which need not exist; a `.json` file of an old version is found too."""
    yaml_file = config_folder() / "default_config.yaml"
    json_file = yaml_file.with_suffix(".json")
    return json_file if json_file.exists() and not yaml_file.exists() else yaml_file


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The contents of one file."""

    path: Path
    values: Mapping[str, Any]
    """Option name -> value, for every key that is an option of a launch."""
    keys: Mapping[str, str]
    """Option name -> the key in the file."""
    kind: str = "LOCAL_MACHINE"
    unknown: tuple[str, ...] = ()
    """A message for every unknown key."""
    misspelt: tuple[str, ...] = ()
    """Those of them whose key is nearly a known one, and was probably meant."""
    contents: Mapping[str, Any] = field(default_factory=dict)
    """All keys and values, old keys renamed to the current ones."""

    def origin_of(self, option: str) -> str:
        """Return the file and key in which an option is set."""
        return f"{self.path}: {self.keys[option]}"


def find_config(path: str | Path | None) -> ConfigFile | None:
    """Read the file that was named, else the default one if there is one."""
    if path is not None:
        return read_config(path)
    default = default_config_path()
    return read_config(default) if default.is_file() else None


def read_config(path: str | Path) -> ConfigFile:
    """Read a YAML or JSON file, of this library or of accelerate 1.x."""
    path = Path(path).expanduser()
    contents = _migrate_old_keys(load_mapping(path))
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    unknown: list[str] = []
    misspelt: list[str] = []
    for key, value in _flat(contents):
        option = BY_YAML_KEY.get(key) or BY_YAML_KEY.get(f"{key.partition('.')[0]}.{key.rpartition('.')[2]}")
        if option is not None:
            if value is not None:
                values[option.name], keys[option.name] = _as_option(option, value, path, key), key
        elif key in SECTIONS and value:
            unknown.append(f"{path}: nobody reads `{key}: {value}`: it must hold `key: value` lines of its own.")
        elif key not in KNOWN_KEYS:
            unknown.append(_unknown_key(path, key))
            if _is_misspelt(key, contents):
                misspelt.append(unknown[-1])
    _check_kind(contents, path)
    _apply_kind(contents, values, keys)
    return ConfigFile(
        path=path,
        values=values,
        keys=keys,
        kind=str(contents.get("compute_environment") or "LOCAL_MACHINE"),
        unknown=tuple(unknown),
        misspelt=tuple(misspelt),
        contents=contents,
    )


def load_mapping(path: Path) -> dict[str, Any]:
    """Load a YAML or JSON file that holds keys and values."""
    what = f"The configuration file {path}"
    try:
        text = read_text(path, what)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The configuration file {path} does not exist. Write it with "
            f"`{program_name()} config --config_file {path}`, or leave --config_file out."
        ) from error
    contents = parse_json(text, what) if path.suffix == ".json" else parse_yaml(text, what)
    require_no_control(contents, what)
    if contents is None:
        return {}
    if not isinstance(contents, dict):
        raise ValueError(
            f"The configuration file {path} must hold `key: value` lines, not a {type(contents).__name__}."
        )
    return {str(key): value for key, value in contents.items()}


def write_config(path: str | Path, contents: Mapping[str, Any], *, as_json: bool | None = None) -> Path:
    """Write keys and values as YAML, or as JSON where that is requested or the name says so, and return the path."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json" if as_json is None else as_json:
        import json

        path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        import yaml

        path.write_text(yaml.safe_dump(dict(contents), sort_keys=True), encoding="utf-8")
    return path


def did_you_mean(word: str, known: Iterable[str], *, similarity: float = 0.62) -> str:
    """Return ` Did you mean X?`, or an empty string if no known word is similar. The dashes of flags do not count."""
    import difflib

    words = {name.lstrip("-"): name for name in sorted(known, key=lambda name: (name.startswith("-"), name))}
    close = difflib.get_close_matches(word.lstrip("-"), words, n=1, cutoff=similarity)
    return f" Did you mean {words[close[0]]}?" if close else ""


def _migrate_old_keys(contents: dict[str, Any]) -> dict[str, Any]:
    """Translate the two keys that files of accelerate 0.x have and 1.15 still reads."""
    if "fp16" in contents:
        fp16 = contents.pop("fp16")
        contents.setdefault("mixed_precision", "fp16" if fp16 else "no")
    if "dynamo_backend" in contents:
        backend = contents.pop("dynamo_backend")
        contents["dynamo_config"] = {"dynamo_backend": backend, **(contents.get("dynamo_config") or {})}
    return contents


def _flat(contents: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in contents.items():
        if key in SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", inner_value
        else:
            yield key, value


def _as_option(option: Option, value: Any, path: Path, key: str) -> Any:
    if isinstance(value, bool) and option.choices is not None:  # YAML reads an unquoted `no` as False
        value = "no" if value is False else "yes"
    if option.repeated:
        return list(value) if isinstance(value, list) else [str(value)]
    if isinstance(value, (list, dict)) and option.read not in (int, float, yes_no):
        return value
    try:
        read_value = option.read(str(value))
    except ValueError as error:
        raise ValueError(f"{path}: {key}: {value!r} is not a valid value ({error}).") from error
    if option.choices is None:
        return read_value
    for choice in option.choices:  # files of 1.15 have some in capitals
        if choice.lower() == str(read_value).lower():
            return choice
    raise ValueError(f"{path}: {key}: {value!r} is unknown: choose one of {', '.join(option.choices)}.")


def _apply_kind(contents: Mapping[str, Any], values: dict[str, Any], keys: dict[str, str]) -> None:
    kind = distributed_kind(contents)
    switches = {SWITCH_OF_KIND[kind]: "distributed_type"} if kind in SWITCH_OF_KIND else {}
    if kind.startswith("MULTI_") and kind != "MULTI_CPU":
        switches["multi_gpu"] = "distributed_type"
    switches |= {switch: section for section, switch in _SWITCH_OF_SECTION.items() if contents.get(section)}
    for switch, key in switches.items():
        assert switch in BY_NAME
        values[switch], keys[switch] = True, key
    if values.get("num_processes", 1) < 1:  # -1 in old files: as many as there are accelerators
        del values["num_processes"], keys["num_processes"]


def distributed_kind(contents: Mapping[str, Any]) -> str:
    """Return the file's `distributed_type`: in capitals, `NO` where it is missing or an unquoted `no`."""
    return str(contents.get("distributed_type") or "NO").rpartition(".")[2].upper()


def _check_kind(contents: Mapping[str, Any], path: Path) -> None:
    known = (*(member.value for member in DistributedType), *SWITCH_OF_KIND)
    kind = distributed_kind(contents)
    if kind not in known and engine_of_kind(str(contents.get("compute_environment"))) is None:
        raise ValueError(
            f"{path}: distributed_type: {kind!r} is unknown.{did_you_mean(kind, known)} "
            f"Choose one of {', '.join(dict.fromkeys(known))}."
        )


def _unknown_key(path: Path, key: str) -> str:
    return f"{path}: nobody reads the key `{key}`.{did_you_mean(key, KNOWN_KEYS)}"


def _is_misspelt(key: str, contents: Mapping[str, Any]) -> bool:
    """Return whether a key is a typo, and not a key of another version: it nearly equals an option."""
    import difflib

    section, _, inner = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in BY_YAML_KEY if each.rpartition(".")[0] == section]
    close = difflib.get_close_matches(inner, known, n=1, cutoff=0.9)
    there = contents.get(section) if section else contents
    return bool(close) and abs(len(close[0]) - len(inner)) <= 2 and close[0] not in (there or {})


def engine_of_kind(kind: str) -> str | None:
    """Return the engine that a file's `compute_environment` needs."""
    return AWS if kind.upper().endswith("SAGEMAKER") else None
