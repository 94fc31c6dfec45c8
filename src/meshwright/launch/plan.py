"""Make the plan of a launch: how many processes, on which machines, with which environment variables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import environment
from ..config.launch.copies import refuse_copies
from ..config.launch.on_ray import refuse_on_ray
from ..config.launch.settings import FLAG, LaunchSettings
from ..config.launch.survival import refuse_survival
from ..config.origins import ORIGINS_VARIABLE
from ..runtime.devices import nvidia
from ..runtime.group.network import get_free_port, interface_towards, loopback
from .devices import count_accelerators, count_cores
from .machines.cluster import TASKS_PER_MACHINE, Cluster

DEFAULT_MASTER_PORT = 29500
"""The published default port of the rendezvous of several machines."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What one launcher will do."""

    method: str
    """exec, elastic, srun, mpirun or ray."""
    script: tuple[str, ...]
    """The script and its arguments, as given."""
    processes_here: int
    num_machines: int
    machine_rank: int
    min_machines: int
    address: str
    port: int
    port_is_free: bool
    """The port was chosen by the launcher, so that another free one can replace it."""
    backend: str
    device: str
    threads: int | None
    """Threads per process; None leaves it to torch."""
    variables: dict[str, str]
    origins: dict[str, str]
    """Origins of the values that the plan has chosen itself."""
    notes: tuple[str, ...] = ()
    """Messages for the user, printed before the start."""
    hosts: str | None = None
    comes_up_late: bool = False
    """The other machines may start minutes later."""

    @property
    def num_processes(self) -> int:
        """Processes on all machines together."""
        return self.processes_here * self.num_machines

    def on_another_port(self) -> LaunchPlan:
        """Return the same plan with another free port."""
        return replace(self, port=get_free_port())


def make_plan(settings: LaunchSettings, script: Sequence[str], cluster: Cluster | None) -> LaunchPlan:
    """Resolve everything that the settings leave open."""
    if settings.ray:
        return _plan_on_ray(settings, script)
    origins: dict[str, str] = {}
    notes: list[str] = []
    accelerators = 0 if settings.cpu else count_accelerators()
    is_rank = cluster is not None and cluster.is_rank  # the batch system has chosen hosts and number
    min_machines, machines = (1, 1) if is_rank else _machines(settings, cluster, origins)
    here = 1 if is_rank else _processes_here(settings, cluster, machines, accelerators, origins, notes)
    method = _method(settings, cluster, here, machines)
    refuse_copies(settings, method)
    if settings.survive:
        refuse_survival(settings, method, here * machines)
    machine_rank = 0 if is_rank or method == "mpirun" else _machine_rank(settings, cluster, machines, origins)
    address, port, port_is_free = _rendezvous_address(settings, cluster, machines, origins, method)
    threads = _threads(settings, here, method, origins)
    variables = settings.child_variables()
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    variables |= _device_variables(settings, accelerators)
    variables |= _topology_variables(method, here, machines, accelerators, origins)
    variables |= _xla_variables(settings)
    variables |= _network_variables(method, machines, address, origins)
    variables |= _head_variables(cluster)
    variables |= _nccl_variables(method, accelerators, cluster, origins, notes)
    variables[ORIGINS_VARIABLE] = _origins_of_settings(settings)
    notes += _notes_on_debug_rank(settings, method, here * machines) + _notes_on_num_processes(settings, cluster)
    is_head = cluster is not None and cluster.is_head
    return LaunchPlan(
        method=method,
        script=tuple(script),
        processes_here=here,
        num_machines=machines,
        machine_rank=machine_rank,
        min_machines=min_machines,
        address=address,
        port=port,
        port_is_free=port_is_free,
        backend="c10d" if _is_elastic(settings, cluster) else settings.rdzv_backend,
        device=_device(settings, accelerators),
        threads=threads,
        variables=variables,
        origins=origins,
        notes=() if is_head else tuple(notes),  # the launcher on each machine knows which devices it has
        hosts=cluster.hosts if cluster is not None else None,
        comes_up_late=cluster is not None and cluster.is_pods,
    )


def _is_elastic(settings: LaunchSettings, cluster: Cluster | None) -> bool:
    if settings.nnodes is not None:
        return True
    in_cluster = cluster is not None and cluster.min_machines is not None
    return in_cluster and not _is_explicit(settings, "num_machines")


def _plan_on_ray(settings: LaunchSettings, script: Sequence[str]) -> LaunchPlan:
    """Return the plan of a launch on a Ray cluster, which chooses nodes, devices and ports."""
    refuse_on_ray(settings)
    variables = settings.child_variables()
    if settings.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(settings.num_cpu_threads_per_process)
    variables[ORIGINS_VARIABLE] = _origins_of_settings(settings)
    given = settings.num_processes is not None
    return LaunchPlan(
        method="ray",
        script=tuple(script),
        processes_here=settings.num_processes or 1,
        num_machines=1,
        machine_rank=0,
        min_machines=1,
        address="(rank 0's node)",
        port=0,
        port_is_free=False,
        backend="static",
        device="CPU" if settings.cpu else "the cluster's GPUs, else CPU",
        threads=settings.num_cpu_threads_per_process,
        variables=variables,
        origins={} if given else {"num_processes": "one per GPU of the cluster, else one per node; not known here"},
    )


def _origins_of_settings(settings: LaunchSettings) -> str:
    return json.dumps(
        {name: settings.origin(name) for name in environment.SETTING_VARIABLES if name in settings.resolved}
    )


def _threads(settings: LaunchSettings, processes_here: int, method: str, origins: dict[str, str]) -> int | None:
    asked = settings.num_cpu_threads_per_process
    if asked is not None or processes_here == 1 or method != "elastic":
        return asked
    cores = count_cores()
    origins["num_cpu_threads_per_process"] = f"{cores} cores shared by {processes_here} processes"
    return max(1, cores // processes_here)


def _device_variables(settings: LaunchSettings, accelerators: int) -> dict[str, str]:
    if settings.gpu_ids in (None, "all"):
        return {}
    variable = _visible_devices_variable() if accelerators else environment.VISIBLE_DEVICES["cuda"][0]
    return {variable: str(settings.gpu_ids)}


def _topology_variables(
    method: str, here: int, machines: int, accelerators: int, origins: dict[str, str]
) -> dict[str, str]:
    if method != "elastic" or not accelerators:
        return {}
    from ..runtime.devices.device import launch_variables

    found = launch_variables(machines, here)
    origins.update(dict.fromkeys(found, "torch_tpu, for the chips of this launch"))
    return found


def _network_variables(method: str, machines: int, address: str, origins: dict[str, str]) -> dict[str, str]:
    if method != "elastic":  # srun and mpirun would export the name to machines that have others
        return {}
    interface = None if environment.read("GLOO_SOCKET_IFNAME") else interface_towards(address)
    if not interface:
        return {}
    origins["GLOO_SOCKET_IFNAME"] = f"the interface that leads to {address}"
    return {"GLOO_SOCKET_IFNAME": interface}


def _nccl_variables(
    method: str, accelerators: int, cluster: Cluster | None, origins: dict[str, str], notes: list[str]
) -> dict[str, str]:
    """Return the variables that keep NCCL from direct access between GPUs which the driver wrongly reports."""
    if method == "srun" or not accelerators:  # the launcher on each machine knows which driver it has
        return {}
    fault = nvidia.p2p_fault()
    names = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if environment.read(name) is None]
    if fault is None or not names:
        return {}
    origins.update(dict.fromkeys(names, fault))
    if cluster is None or not cluster.is_rank or cluster.machine_rank == 0:
        notes.append(
            f"{fault}: this driver wrongly reports direct access between the GPUs, so {' and '.join(names)} are set to "
            "1. With driver 550 or newer they are not needed; set them yourself to choose otherwise."
        )
    return dict.fromkeys(names, "1")


def _head_variables(cluster: Cluster | None) -> dict[str, str]:
    """Return the variables that the head of a job exports to the launchers it starts."""
    if cluster is None or not cluster.is_head or not cluster.tasks_per_machine:
        return {}
    return {TASKS_PER_MACHINE: str(cluster.tasks_per_machine)}


def _notes_on_debug_rank(settings: LaunchSettings, method: str, num_processes: int) -> list[str]:
    rank = settings.debug_rank
    if rank is None:
        return []
    if method != "elastic":
        found = f"debug_rank = {rank} ({settings.origin('debug_rank')}) has no effect: "
        one = "with one process, breakpoint() and `python -m pdb` work as they are"
        return [found + (one if num_processes == 1 else f"{method} starts the processes and keeps the terminal") + "."]
    if not 0 <= rank < num_processes:
        raise ValueError(
            f"debug_rank is {rank} ({settings.origin('debug_rank')}), but there are {num_processes} processes: "
            f"use 0 to {num_processes - 1}."
        )
    return []


def _notes_on_num_processes(settings: LaunchSettings, cluster: Cluster | None) -> list[str]:
    if cluster is None or not cluster.is_rank or cluster.machine_rank != 0:
        return []
    asked = settings.num_processes
    if asked in (None, cluster.num_processes) or not _is_explicit(settings, "num_processes"):
        return []
    return [
        f"num_processes = {asked} ({settings.origin('num_processes')}) has no effect: {cluster.name} has started "
        f"{cluster.num_processes} processes, with a launch in each."
    ]


def _method(settings: LaunchSettings, cluster: Cluster | None, processes_here: int, machines: int) -> str:
    if settings.mpirun_hostfile is not None:
        return "mpirun"
    if cluster is not None and cluster.is_head:
        return "srun"
    if cluster is not None and cluster.is_rank:
        return "exec"
    return "exec" if processes_here == 1 and machines == 1 and settings.max_restarts == 0 else "elastic"


def _machines(settings: LaunchSettings, cluster: Cluster | None, origins: dict[str, str]) -> tuple[int, int]:
    if settings.nnodes is not None:
        low, _, high = settings.nnodes.partition(":")
        if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
            raise ValueError(f"--nnodes {settings.nnodes!r} cannot be read: write MIN:MAX, such as 2:3.")
        origins["num_machines"] = settings.origin("nnodes")
        return int(low), int(high or low)
    machines = settings.num_machines
    if cluster is not None and cluster.num_machines > 1 and not _is_explicit(settings, "num_machines"):
        machines = cluster.num_machines
        origins["num_machines"] = f"{cluster.name} ({cluster.hosts})" if cluster.hosts else cluster.name
        if cluster.min_machines is not None:
            return cluster.min_machines, machines
    machines = 1 if machines is None else machines
    if machines < 1:
        raise ValueError(f"num_machines is {machines} ({settings.origin('num_machines')}): it must be 1 or more.")
    return machines, machines


def _machine_rank(settings: LaunchSettings, cluster: Cluster | None, machines: int, origins: dict[str, str]) -> int:
    if cluster is not None and cluster.num_machines > 1 and not _is_explicit(settings, "machine_rank"):
        origins["machine_rank"] = cluster.name
        return cluster.machine_rank
    rank = settings.machine_rank
    if rank is None:
        if machines > 1 and settings.nnodes is None:
            raise ValueError(
                f"This launch spans {machines} machines, but nothing says which one this is: "
                f"give --machine_rank, from 0 (the machine of --main_process_ip) to {machines - 1}."
            )
        return 0
    if not 0 <= rank < machines:
        raise ValueError(
            f"machine_rank is {rank} ({settings.origin('machine_rank')}), but there are {machines} machines: "
            f"use 0 to {machines - 1}, and --num_machines for their number."
        )
    return rank


def _processes_here(
    settings: LaunchSettings,
    cluster: Cluster | None,
    machines: int,
    accelerators: int,
    origins: dict[str, str],
    notes: list[str],
) -> int:
    if settings.resolved["tpu"].value:
        if (settings.num_processes or 1) > 1 and not settings.resolved["main_training_function"].value:
            notes.append(
                f"num_processes = {settings.num_processes} ({settings.origin('num_processes')}) has no effect: one "
                "process uses all XLA devices. --main_training_function FUNCTION starts one for every device."
            )
        origins["num_processes"] = "one for all XLA devices, or what torch_xla starts"
        return 1
    ids = _gpu_ids(settings)
    if (settings.multi_gpu or ids) and accelerators == 0:
        asked = settings.origin("multi_gpu") if settings.multi_gpu else settings.origin("gpu_ids")
        notes.append(f"no GPU or other accelerator is there ({asked} needs one): the processes run on the CPU.")
    if settings.num_processes is not None:
        return _share_of_machine(settings, settings.num_processes, machines, accelerators)
    if cluster is not None and cluster.processes_per_machine:
        origins["num_processes"] = f"{cluster.name}: processes per machine"
        return _share_of_machine(settings, cluster.processes_per_machine * machines, machines, accelerators)
    if ids:
        origins["num_processes"] = f"the {len(ids)} ids of {settings.origin('gpu_ids')}"
        return len(ids)
    if accelerators:
        origins["num_processes"] = "one per accelerator"
        return accelerators
    if cluster is not None and cluster.tasks_per_machine:
        origins["num_processes"] = f"{cluster.name}: tasks per machine"
        return cluster.tasks_per_machine
    origins["num_processes"] = "default: one per machine without accelerators"
    return 1


def _device(settings: LaunchSettings, accelerators: int) -> str:
    if settings.resolved["tpu"].value:
        return "XLA devices"
    return "CPU" if accelerators == 0 else f"{accelerators} accelerators"


def _xla_variables(settings: LaunchSettings) -> dict[str, str]:
    """Return the variables of torch_xla."""
    if not settings.resolved["tpu"].value:
        return {}
    downcasts = settings.resolved["downcast_bf16"].value and settings.mixed_precision == "bf16"
    return {"USE_TORCH_XLA": "1", **({"XLA_DOWNCAST_BF16": "1"} if downcasts else {})}


def _gpu_ids(settings: LaunchSettings) -> list[str]:
    return [] if settings.gpu_ids in (None, "all") else [word for word in str(settings.gpu_ids).split(",") if word]


def _share_of_machine(settings: LaunchSettings, total: int, machines: int, accelerators: int) -> int:
    """Return the number of processes per machine; refuse a total that cannot be divided."""
    if total < 1:
        raise ValueError(f"num_processes is {total} ({settings.origin('num_processes')}): it must be 1 or more.")
    if total % machines:
        raise ValueError(
            f"num_processes is {total} ({settings.origin('num_processes')}), but it counts the processes of all "
            f"{machines} machines together: use a multiple of {machines}."
        )
    here = total // machines
    if accelerators and here > accelerators:
        raise ValueError(
            f"{here} processes on this machine need {here} accelerators, but there are {accelerators}: use "
            f"--num_processes {accelerators * machines}, or --cpu."
        )
    return here


def _rendezvous_address(
    settings: LaunchSettings, cluster: Cluster | None, machines: int, origins: dict[str, str], method: str
) -> tuple[str, int, bool]:
    address, port = settings.main_process_ip, settings.main_process_port
    if machines == 1 or method == "mpirun":
        if port or method != "elastic":
            return loopback(), port or 0, False
        origins["main_process_port"] = "a free port"
        return loopback(), get_free_port(), True
    if cluster is not None and (told := _address_in_cluster(settings, cluster)) is not None:
        address = told
        origins["main_process_ip"] = f"{cluster.name}: first machine"
        if port is None and cluster.port is not None:
            port = cluster.port
            origins["main_process_port"] = cluster.name
    if cluster is not None and cluster.is_head:
        address = address or "(found by srun)"
    if address is None:
        raise ValueError(
            f"This launch spans {machines} machines, but has no rendezvous address: give --main_process_ip, the "
            "address of machine 0 as the others see it."
        )
    if port is None:
        port = DEFAULT_MASTER_PORT
        origins["main_process_port"] = "default for several machines"
    return address, port, False


def _address_in_cluster(settings: LaunchSettings, cluster: Cluster) -> str | None:
    """Return the address of machine 0 as the cluster says it, or None where the launch was given another one."""
    by_flag = settings.origin("main_process_ip").startswith(FLAG)
    given = by_flag if cluster.is_pods else _is_explicit(settings, "main_process_ip")
    return None if given else cluster.address


def _is_explicit(settings: LaunchSettings, name: str) -> bool:
    """Return whether the value was given for this launch. Only such values override a batch system."""
    return settings.origin(name).startswith((FLAG, "environment"))


def _visible_devices_variable() -> str:
    """Return the name of the variable that restricts the visible devices of this kind of accelerator."""
    from ..runtime.devices.device import accelerator_type

    return environment.VISIBLE_DEVICES.get(accelerator_type() or "cuda", environment.VISIBLE_DEVICES["cuda"])[0]


def worker_command(settings: LaunchSettings, script: Sequence[str], *, recorded: bool) -> list[str]:
    """Return the command of one process; with `recorded`, it runs under `worker.py`, which writes how it ended."""
    if settings.no_python:
        return list(script)
    function = settings.resolved["main_training_function"].value
    if settings.resolved["tpu"].value and function:
        starter = ["-m", "meshwright.launch.processes.on_xla", function, str(settings.num_processes or 0)]
        return [sys.executable, *starter, *(["-m"] if settings.module else []), *script]
    recorder = [str(Path(__file__).parent / "processes" / "worker.py")] if recorded else []
    return [sys.executable, *recorder, *(["-m"] if settings.module else []), *script]
