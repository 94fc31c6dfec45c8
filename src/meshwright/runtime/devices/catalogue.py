"""Read what accelerators and nodes can do: `cluster("64xH100")`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...untrusted import parse_yaml, read_text
from .device import device_module, is_cpu

DEVICES = Path(__file__).with_name("catalogue.yaml")

_GIB = 1 << 30
_WORDS_BESIDE_NAMES = re.compile(r"(geforce|tesla|instinct|oam|sxm\d?|pcie|hbm\d?e?|\d+gb|virtual|serveredition)*")
"""What drivers write beside the name of a device, such as `NVIDIA H100 80GB HBM3`."""
_FORMATS = {"float64": "fp64", "float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}
_NEXT_WIDER = {
    "fp8": ("bf16", "fp16"),
    "bf16": ("fp16", "tf32"),
    "fp16": ("bf16",),
    "tf32": ("fp32",),
    "fp32": ("tf32", "bf16"),
}


@dataclass(frozen=True)
class Efficiency:
    """Which part of its peak a family of devices reaches; `catalogue.yaml` says what each factor is."""

    matmul: float
    matmul_fp8: float
    half_size: float
    attention: float
    memory: float
    fusion: float
    kernel_us: float
    host_us: float
    link: float
    network: float
    contention: float
    fitted: bool
    """Whether published runs on such devices were used; otherwise the factors are those of a relative."""


@dataclass(frozen=True)
class Device:
    """What one process sees as one accelerator."""

    name: str
    memory: int
    """Bytes that a process can allocate, beside those that the driver takes for it (`context`)."""
    peaks: dict[str, float]
    """Number format, such as `bf16` -> FLOP per second of dense products."""
    bandwidth: float
    """Bytes per second of its memory."""
    efficiency: Efficiency
    source: str
    context: int = 0

    def peak(self, dtype: str) -> float:
        """Return the FLOP per second of a torch dtype, that of a wider format if the device lacks it."""
        return self._peak(format_of(dtype))

    def _peak(self, name: str) -> float:
        if name in self.peaks:
            return self.peaks[name]
        if name == "fp64":
            return self._peak("fp32") / 2
        for wider in _NEXT_WIDER.get(name, ()):
            if wider in self.peaks:
                return self.peaks[wider]
        return min(self.peaks.values())


@dataclass(frozen=True)
class Node:
    """How the devices of a machine are connected. Bandwidths are bytes per second of one device in one direction."""

    devices: int
    link: float
    link_latency: float
    network: float
    network_latency: float


@dataclass(frozen=True)
class Interval:
    """Factors on predicted seconds: nine of ten measured ones lie between them, or are assumed to."""

    low: float
    high: float


@dataclass(frozen=True)
class DeviceCluster:
    """The devices of a run. Ranks fill one node after the other."""

    device: Device
    node: Node
    size: int
    interval: Interval

    def nodes_of(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Return the nodes of a group of ranks, and how many of the ranks each has."""
        found: dict[int, int] = {}
        for rank in ranks:
            found[rank // self.node.devices] = found.get(rank // self.node.devices, 0) + 1
        return found

    def with_memory(self, memory: int) -> DeviceCluster:
        """Return the same devices with another memory in bytes, all of which a process can allocate."""
        return replace(self, device=replace(self.device, memory=memory, context=0))


class UnknownDeviceError(ValueError):
    """Report a kind of device that is not known.

    Take one of the names that the message lists, or describe the device in a file: `--devices_file`.
    """


@dataclass(frozen=True)
class Catalogue:
    """All devices of a file."""

    devices: dict[str, Device]
    nodes: dict[str, Node]
    aliases: dict[str, str]
    intervals: dict[str, Interval]

    def cluster(self, text: str) -> DeviceCluster:
        """Return the cluster of a text such as `64xH100`, `2x8xH100` (nodes, devices on each) or `H100`."""
        found = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", text, re.IGNORECASE)
        if found is None:
            raise UnknownDeviceError(f"{text!r} does not name devices. Write for example 64xH100 or 2x8xH100.")
        first, second, kind = found.groups()
        name = self._name(kind)
        node = self.nodes[name]
        size = int(first or 1) * int(second or 1)
        if size < 1:
            raise UnknownDeviceError(f"{text!r} are no devices: the numbers must be 1 or more.")
        if second:
            node = replace(node, devices=int(second))
        interval = self.intervals["fitted" if self.devices[name].efficiency.fitted else "assumed"]
        return DeviceCluster(self.devices[name], node, size, interval)

    def recognised(self, name: str) -> Device | None:
        """Return the device that a driver calls so, such as `Tesla V100-SXM2-32GB`; None if none has this name."""
        plain = _plain(name)
        for alias in sorted(self.aliases, key=len, reverse=True):
            before, found, after = plain.partition(alias)
            if found and _WORDS_BESIDE_NAMES.fullmatch(before) and _WORDS_BESIDE_NAMES.fullmatch(after):
                return self.devices[self.aliases[alias]]
        return None

    def _name(self, kind: str) -> str:
        name = self.aliases.get(_plain(kind))
        if name is None:
            near = self._near(kind)
            raise UnknownDeviceError(
                f"No accelerator is called {kind!r}. "
                f"{'Close names' if near else 'Known names'}: {', '.join(near or sorted(self.devices))}. "
                f"Another one can be described in a file of the form of {DEVICES}: --devices_file FILE."
            )
        return name

    def _near(self, kind: str) -> list[str]:
        """Return the devices whose names are similar, with the other variants of the same device: H100-PCIe too."""
        close = difflib.get_close_matches(_plain(kind), self.aliases, n=5, cutoff=0.6)
        products = dict.fromkeys(self.aliases[alias].partition("-")[0] for alias in close)
        return [name for product in products for name in self.devices if name.partition("-")[0] == product]


def cluster(text: str, path: Path | None = None) -> DeviceCluster:
    """Return the cluster of a text such as `64xH100`, by the devices of this package or of a file."""
    return load(path or DEVICES).cluster(text)


@lru_cache(maxsize=8)
def load(path: Path = DEVICES) -> Catalogue:
    """Read a file of devices. A user's is laid over this package's: it adds entries and changes single values."""
    import yaml

    data = yaml.safe_load(DEVICES.read_text(encoding="utf-8"))
    if path != DEVICES:
        own = parse_yaml(read_text(path, str(path)), str(path)) or {}
    try:
        data = data if path == DEVICES else _merged(data, own)
        return _catalogue(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of devices in the form of {DEVICES}: {error!r}") from error


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the FLOP per second of a device of this process: measured on a CPU, else by its name; None if unknown."""
    if is_cpu(device):
        return measured_flops(getattr(torch, dtype, torch.float32))
    try:
        name = str(device_module(device).get_device_name(device))
    except (AttributeError, RuntimeError):
        return None
    found = load().recognised(name)
    return None if found is None else found.peak(dtype)


def measured_flops(dtype: torch.dtype, size: int = 512, repeat: int = 9) -> float:
    """Return the FLOP per second of this process's threads on a CPU, by the fastest of some products of matrices."""
    matrix, seconds = torch.ones(size, size, dtype=dtype), []
    for _ in range(repeat):
        start = perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(perf_counter() - start)
    return 2 * size**3 / min(seconds)


def format_of(dtype: str) -> str:
    """Return the number format of a torch dtype as datasheets name it: `bfloat16` -> `bf16`."""
    return "fp8" if dtype.startswith("float8") else _FORMATS.get(dtype, dtype)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(base[name], own[name]) for name in own if isinstance(base.get(name), dict)}
    return {**base, **own, **both}


def _catalogue(data: dict[str, Any]) -> Catalogue:
    families = {name: Efficiency(**factors) for name, factors in data["families"].items()}
    kinds = {name: _node(entry) for name, entry in data["nodes"].items()}
    devices, nodes, aliases = {}, {}, {}
    for name, entry in data["devices"].items():
        devices[name] = Device(
            name,
            memory=int((entry["total_gib"] - data["context_gib"]) * _GIB),
            peaks={kind: tera * 1e12 for kind, tera in entry["tflops"].items()},
            bandwidth=entry["gb_s"] * 1e9,
            efficiency=families[entry["family"]],
            source=entry["source"],
            context=int(data["context_gib"] * _GIB),
        )
        nodes[name] = kinds[entry["node"]]
        for alias in (name, *entry.get("names", ())):
            aliases[_plain(str(alias))] = name
    intervals = {name: Interval(**entry) for name, entry in data["intervals"].items()}
    return Catalogue(devices, nodes, aliases, intervals)


def _node(entry: dict[str, Any]) -> Node:
    return Node(
        entry["devices"],
        link=entry["link_gb_s"] * 1e9,
        link_latency=entry["link_us"] * 1e-6,
        network=entry["network_gb_s"] * 1e9,
        network_latency=entry["network_us"] * 1e-6,
    )


def _plain(name: str) -> str:
    """Return a name without the marks that people write differently."""
    return re.sub(r"[\s_\-]|nvidia|amd|intel", "", name.lower())
