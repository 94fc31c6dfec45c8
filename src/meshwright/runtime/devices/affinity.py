"""Pin a process to its share of the cores: whole physical cores, near its device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...config import environment
from ..process import ProcessInfo
from . import device as devices, machine, nvidia

_NO_NODE = -1


def set_numa_affinity(
    local_process_index: int,
    verbose: bool | None = None,
    *,
    local_processes: int | None = None,
    near_devices: bool = True,
) -> list[int]:
    """Pin this process to its share of the cores that it may use, and return the share.

    A process gets whole physical cores of the NUMA node that its device is attached to, which it shares with the other
    processes of that node. Where that is not known, or not wanted (`near_devices`), all cores are divided in order,
    node by node. A task that Slurm has bound to its own cores keeps these. torch uses no more threads than cores.
    """
    if not hasattr(os, "sched_setaffinity"):  # not on macOS
        return []
    process = ProcessInfo.from_environment()
    if _is_bound_by_slurm(process):
        return machine.usable_cores()
    processes = local_processes or process.local_world_size
    nodes = nodes_of_devices(processes) if near_devices else []
    share = share_of_cores(local_process_index, processes, nodes)
    os.sched_setaffinity(0, share)
    if torch.get_num_threads() > len(share):
        torch.set_num_threads(len(share))
    if verbose:
        print(f"Local rank {local_process_index} runs on the cores {', '.join(map(str, share))}.", flush=True)
    return share


def _is_bound_by_slurm(process: ProcessInfo) -> bool:
    binding = (environment.read(environment.SLURM_CPU_BIND_TYPE) or "none").rstrip(",")
    return process.launcher == "Slurm" and binding != "none"


def share_of_cores(index: int, processes: int, nodes: Sequence[int | None]) -> list[int]:
    """Return the cores of one of the processes of this machine.

    `nodes` has the NUMA node of every process's device, as far as it is known.
    """
    cores = _physical_cores_by_node()
    if len(nodes) >= processes and all(node in cores for node in nodes[:processes]):
        node = nodes[index]
        near = [rank for rank in range(processes) if nodes[rank] == node]
        return _part(cores[node], near.index(index), len(near))  # type: ignore[index]  # a key, as just checked
    return _part([core for node in cores for core in cores[node]], index, processes)


def _physical_cores_by_node() -> dict[int, list[list[int]]]:
    """Return the usable physical cores of each NUMA node, each as the list of its usable threads."""
    usable = set(machine.usable_cores())
    node_of = {core: node for node, members in machine.numa_nodes().items() for core in members}
    cores: dict[int, list[list[int]]] = {}
    seen: set[int] = set()
    for first in sorted(usable, key=lambda core: (node_of.get(core, _NO_NODE), core)):
        if first not in seen:
            threads = [thread for thread in machine.threads_of_core(first) if thread in usable] or [first]
            seen.update(threads)
            cores.setdefault(node_of.get(first, _NO_NODE), []).append(threads)
    return cores


def _part(cores: list[list[int]], index: int, parts: int) -> list[int]:
    """Return one of several equal parts of physical cores; the threads are divided only where cores do not suffice."""
    if parts > len(cores):
        cores = [[thread] for core in cores for thread in core]
    if parts > len(cores):  # not enough threads either: one each, in turn
        return cores[index % len(cores)]
    mine = cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]
    return sorted(thread for core in mine for thread in core)


def nodes_of_devices(processes: int) -> list[int | None]:
    """Return the NUMA node of every local rank's device, None where it is unknown; [] if the devices are unknown."""
    return [machine.numa_node_of(address) for address in _addresses_by_rank(processes)]


def _addresses_by_rank(processes: int) -> list[str]:
    """Return the PCI address of the device of every local rank; [] where it is not known which device is which."""
    visible = devices.count()
    everything = _addresses_in_order()
    of_job = _at(everything, _slurm_gpus()) or everything
    names = environment.read_visible_devices(devices.accelerator_type() or "")
    if names is None:
        return _repeated(of_job, visible)
    if visible == 1 and processes > 1:  # a device for each process, in order: see [Note: a device for each process]
        return of_job
    found = _by_uuid(names) or _at(of_job, names) or _at(everything, names)
    return found if len(found) == visible else []


def _addresses_in_order() -> list[str]:
    """Return the PCI addresses of this machine's devices in torch's order, that of the addresses; [] if unknown."""
    vendor = devices.pci_vendor()
    if vendor is None:
        return []
    gpus = nvidia.gpus() if vendor == nvidia.PCI_VENDOR else []
    if len({gpu.model for gpu in gpus}) > 1 and environment.read("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return []  # CUDA puts the fastest first
    # In a container, sysfs shows the devices of the whole machine; the driver's files show those of the container.
    return [gpu.address for gpu in gpus] or machine.pci_devices(vendor)


def _repeated(addresses: list[str], visible: int) -> list[str]:
    """Repeat the address of a card that is several devices: the tiles of Intel's Max, the partitions of AMD's MI300."""
    if not addresses or visible % len(addresses):
        return []
    return [address for address in addresses for _ in range(visible // len(addresses))]


def _by_uuid(names: Sequence[str]) -> list[str]:
    return [gpu.address for name in names for gpu in nvidia.gpus() if gpu.uuid.startswith(name)]


def _slurm_gpus() -> list[str]:
    listed = (environment.read(name) for name in environment.SLURM_GPUS)
    return next((value for value in listed if value), "").split(",")


def _at(addresses: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """Return the addresses at these numbers; [] where one is not a number of them."""
    if not all(number.isdigit() and int(number) < len(addresses) for number in numbers):
        return []
    return [addresses[int(number)] for number in numbers]
