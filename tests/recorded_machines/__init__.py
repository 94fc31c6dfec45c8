"""Machines that we do not have, as data: what each of them shows, and what the library must make of it.

    with on_machine("dgx_a100", local_rank=3):
        ...  # here the library reads that machine, in the process with local rank 3

A file of `machines/` describes one machine. `on_machine` writes its device files, sysfs and procfs below a folder that
takes the place of `/`, sets its environment variables, puts its `nvidia-smi` on the PATH, and answers for torch. This
project captured none of it: the topologies are written down from published ones, and `source` says from where.

`failures.yaml` has the endings of runs, with the texts and exit codes of NCCL.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from meshwright.runtime.devices import device, machine

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in (FOLDER / "machines").glob("*.yaml"))
_KEPT_VARIABLES = ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "PYTEST_CURRENT_TEST")


@dataclass(frozen=True)
class RecordedMachine:
    """The contents of one file."""

    name: str
    facts: dict[str, Any]

    @classmethod
    @functools.cache
    def load(cls, name: str) -> RecordedMachine:
        return cls(name, yaml.safe_load((FOLDER / "machines" / f"{name}.yaml").read_text()))

    @property
    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = self.facts["expected"]
        return found

    @property
    def local_ranks(self) -> range:
        return range(len(self.expected["devices"]))

    def variables(self, local_rank: int | None) -> dict[str, str]:
        """Return the environment of the launcher, or of one rank."""
        variables = dict(self.facts.get("environment", {}))
        if "ranks" in self.facts:  # the batch system has started each rank, and with it a launcher if there is one
            variables |= self.facts["ranks"][local_rank or 0]
        elif local_rank is not None:
            world = str(len(self.local_ranks))
            variables |= {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}
            variables |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        return {name: str(value) for name, value in variables.items()}

    def write(self, root: Path) -> None:
        """Write the files of this machine below a folder."""
        for name in expand_braces(self.facts.get("dev", "")):
            _write(root / "dev" / name, "")
        _write_cores(root, self.facts.get("cores", {}))
        for group in self.facts.get("pci", ()):
            _write_pci_devices(root, group, self.facts["cores"]["nodes"])
        _write_nvidia_files(root, self.facts.get("nvidia", {}))
        for name, text in self.facts.get("cgroup", {}).items():
            _write(root / "sys/fs/cgroup" / name, f"{text}\n")
        if "nvidia_smi" in self.facts:
            _write_nvidia_smi(root, self.facts["nvidia_smi"])
        package = self.facts.get("torch", {}).get("package")
        if package is not None:
            _write(root / "packages" / package.replace(".", "/") / "__init__.py", "")


@dataclass
class RecordedDevice:
    """What `torch.device` gives, also of kinds that this torch does not know."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass
class RecordedTorch:
    """In the place of torch: the answers of the machine's torch about its devices; all else is torch's own."""

    kind: str | None = None
    count: int = 0
    name: str | None = None
    capability: list[int] = field(default_factory=list)
    architecture: str | None = None
    """AMD's name for a generation of devices; torch is built for AMD where there is one."""
    package: str | None = None
    """The package that adds the device to torch when it is imported."""

    device = RecordedDevice

    @property
    def is_loaded(self) -> bool:
        return self.kind is not None and (self.package is None or self.package in sys.modules)

    @property
    def accelerator(self) -> Any:
        return SimpleNamespace(
            is_available=lambda: self.is_loaded,
            current_accelerator=lambda: RecordedDevice(str(self.kind)) if self.is_loaded else None,
            device_count=lambda: self.count if self.is_loaded else 0,
        )

    @property
    def version(self) -> Any:
        return SimpleNamespace(hip="6.3" if self.architecture else None)

    def __getattr__(self, name: str) -> Any:
        if name == self.kind and self.is_loaded:
            return self._device_module()
        return getattr(torch, name)

    def _device_module(self) -> Any:
        module = SimpleNamespace(
            get_device_capability=lambda index=None: tuple(self.capability),
            get_device_properties=lambda index=None: SimpleNamespace(gcnArchName=self.architecture),
        )
        if self.name is not None:
            module.get_device_name = lambda index=None: self.name
        return module


@functools.cache
def _root_of(name: str) -> Path:
    """Write a machine once for all tests of this process."""
    root = Path(tempfile.mkdtemp(prefix=f"{name}_"))
    atexit.register(_remove, root, os.getpid())
    RecordedMachine.load(name).write(root)
    return root


def _remove(root: Path, made_by: int) -> None:
    """Remove the files of a machine at the end of the process that wrote them, not at the end of its forks."""
    if os.getpid() == made_by:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def on_machine(name: str, *, local_rank: int | None = None, root: Path | None = None) -> Iterator[RecordedMachine]:
    """Let the library see a recorded machine: as a launcher does, or as one rank.

    `root` has the machine's files already, changed by a test.
    """
    recorded = RecordedMachine.load(name)
    root = root or _root_of(name)
    packages = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for variable in set(os.environ).difference(_KEPT_VARIABLES):
            patch.delenv(variable)
        for variable, value in recorded.variables(local_rank).items():
            patch.setenv(variable, value)
        patch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("HF_HOME", str(root / "home"))
        patch.syspath_prepend(str(root / "packages"))
        patch.setattr(machine, "ROOT", root)
        patch.setattr(machine, "PLATFORM", recorded.facts.get("platform", "linux"))
        patch.setattr(device, "torch", RecordedTorch(**recorded.facts.get("torch", {})))
        device._import_gaudi.cache_clear()
        try:
            yield recorded
        finally:
            device._import_gaudi.cache_clear()
            for module in set(sys.modules) - packages:
                if module.startswith("habana_frameworks"):
                    del sys.modules[module]


def expand_braces(words: str) -> list[str]:
    """Return the words of a line, in which `a{0..2}` stands for a0, a1 and a2, and `a{0..6..2}` for every second."""
    names: list[str] = []
    for word in words.split():
        found = re.search(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}", word)
        if found is None:
            names.append(word)
            continue
        numbers = range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))
        names += [f"{word[: found.start()]}{number}{word[found.end() :]}" for number in numbers]
    return names


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _write_cores(root: Path, cores: dict[str, Any]) -> None:
    if not cores:
        return
    for node, members in cores["nodes"].items():
        _write(root / f"sys/devices/system/node/node{node}/cpulist", f"{members}\n")
        for core in machine.parse_cpu_list(members):
            threads = ",".join(map(str, _threads_of(core, cores.get("threads_apart"))))
            _write(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{threads}\n")
    usable = cores.get("usable", ",".join(cores["nodes"].values()))
    _write(root / "proc/thread-self/status", f"Name:\tpython\nCpus_allowed_list:\t{usable}\nMems_allowed_list:\t0\n")


def _threads_of(core: int, apart: int | None) -> list[int]:
    """Return the two threads of a physical core, whose numbers are `apart`; without hyperthreads, one."""
    if apart is None:
        return [core]
    first = core - core % (2 * apart) + core % apart
    return [first, first + apart]


def _write_pci_devices(root: Path, group: dict[str, Any], nodes: dict[int, str]) -> None:
    for address, node in group["devices"].items():
        folder = root / "sys/bus/pci/devices" / address
        _write(folder / "vendor", f"{group['vendor']}\n")
        _write(folder / "class", f"{group['class']}\n")
        _write(folder / "numa_node", f"{node}\n")
        _write(folder / "local_cpulist", f"{nodes.get(node, ','.join(nodes.values()))}\n")


def _write_nvidia_files(root: Path, nvidia: dict[str, Any]) -> None:
    if not nvidia:
        return
    _write(
        root / "proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX {nvidia['module']}  {nvidia['driver']}  Release Build  (builder@host)\n"
        "GCC version:  gcc version 12.3.0\n",
    )
    for minor, address in nvidia["gpus"].items():
        _write(
            root / "proc/driver/nvidia/gpus" / address / "information",
            f"Model: \t\t {nvidia['model']}\nIRQ:   \t\t {100 + minor}\nGPU UUID: \t {uuid_of(minor)}\n"
            f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\n",
        )


def uuid_of(minor: int) -> str:
    """Return the UUID that a recorded GPU has."""
    return f"GPU-{minor:08x}-aaaa-bbbb-cccc-0123456789ab"


def _write_nvidia_smi(root: Path, answers: dict[str, list[str]]) -> None:
    cases = "".join(f"--query-gpu={fact}) printf '%s\\n' {_quoted(lines)} ;;\n" for fact, lines in answers.items())
    program = root / "bin/nvidia-smi"
    _write(program, f'#!/bin/sh\ncase "$1" in\n{cases}*) exit 2 ;;\nesac\n')
    program.chmod(0o755)


def _quoted(lines: list[str]) -> str:
    return " ".join(f"'{line}'" for line in lines)
