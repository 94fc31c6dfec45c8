"""Find the place of this machine among others from the variables of Kubernetes, Kubeflow and SkyPilot.

Kubernetes gives a pod its index. The number of pods is given by Kubeflow, LeaderWorkerSet and SkyPilot; in other jobs
the manifest sets torchrun's variable `PET_NNODES`.
"""

from __future__ import annotations

import re
import socket

from ...config import environment
from ...config.environment import MachineVariables
from ...config.launch.settings import FLAG, LaunchSettings
from ...errors import LaunchError
from ...runtime.group.network import is_loopback
from ...runtime.process import ProcessInfo, port_of_this_job
from ..devices import count_cores
from .cluster import Cluster

_HOW = "in the `env` of the container (docs/kubernetes.md)"


def find_pod(settings: LaunchSettings) -> Cluster | None:
    """Return the place of this pod, or None where nothing says that there are several."""
    if environment.read("LOCAL_RANK") is not None:  # a process of another launch
        return None
    kind = next((kind for kind in environment.MACHINES if kind.are_set()), None)
    least: int | None = None
    machines = settings.num_machines if settings.origin("num_machines").startswith(FLAG) else None
    if kind is None:
        machines = _machines_of_settings(settings)
    elif machines is None:
        least, machines = _number_of_machines(kind)
    if machines is None:
        return None
    name = kind.name if kind is not None else "Kubernetes"
    is_pods = name != "SkyPilot"
    processes = _processes_per_machine(kind)
    if machines == 1:
        return Cluster(name=name, processes_per_machine=processes, is_pods=is_pods)
    rank = _rank(kind, settings, machines)
    if rank is None and least is None:
        raise LaunchError(
            f"There are {machines} pods ({name}), but nothing says which one this is ({socket.gethostname()}): set "
            f"PET_NODE_RANK {_HOW}, or give --machine_rank."
        )
    address, port = _address(kind, settings, rank)
    return Cluster(
        name=name,
        num_machines=machines,
        min_machines=least,
        machine_rank=rank or 0,
        address=address,
        port=port,
        processes_per_machine=processes,
        hosts=_names_of_pods(rank, machines),
        is_pods=is_pods,
    )


def _number_of_machines(kind: MachineVariables) -> tuple[int | None, int]:
    """Return the least number of machines, where it may change, and the number."""
    word = str(environment.read(kind.num_machines))
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", word.strip())
    if found is None or not 1 <= int(found[1] or 1) <= int(found[2]):
        raise LaunchError(f"{kind.num_machines}={word!r} is not a number of machines: write 2, or 2:4.")
    least = int(found[1]) if found[1] and found[1] != found[2] else None
    return least, int(found[2])


def _machines_of_settings(settings: LaunchSettings) -> int | None:
    """Return the number that the launch was given for pods which cannot know it; refuse to train apart by mistake."""
    if environment.read(environment.KUBERNETES) is None:
        return None
    if (settings.num_machines or 1) > 1:
        return settings.num_machines
    index = _number(environment.JOB_COMPLETION_INDEX)
    host, domain = _own_name()
    if index is None or not domain or settings.origin("num_machines").startswith(FLAG):
        return None  # pods without a headless service cannot connect: each works alone
    if index > 0 or _is_known(f"{host.removesuffix('-0')}-1.{domain}"):
        raise LaunchError(
            f"This is pod {index} ({host}) of an indexed Job with a headless service, but nothing says how many pods "
            f"train together: set PET_NNODES {_HOW}, or give --num_machines; --num_machines 1 trains in each pod alone."
        )
    return None


def _processes_per_machine(kind: MachineVariables | None) -> int | None:
    """Return the number that the job sets; None for one per accelerator."""
    name = kind.processes_per_machine if kind is not None else None
    word = environment.read(name) if name is not None else None
    if word in (None, "", "auto", "gpu"):
        return None
    if word == "cpu":
        return count_cores()
    if not str(word).isdigit() or int(str(word)) < 1:
        raise LaunchError(f"{name}={word!r} is not a number of processes: write a number, auto, cpu or gpu.")
    return int(str(word))


def _rank(kind: MachineVariables | None, settings: LaunchSettings, machines: int) -> int | None:
    """Return the number of this pod: as given, else its index in the Job, else the ordinal of its name."""
    names = [kind.machine_rank] if kind is not None else []
    names += ["RANK"] if kind is not None and environment.read("MASTER_ADDR") else []
    told = {name: number for name in names if (number := _number(name)) is not None}
    if len(set(told.values())) > 1:
        raise LaunchError(f"The variables of this pod contradict each other: {told}. Remove those set by hand.")
    if settings.machine_rank is not None and settings.origin("machine_rank").startswith((FLAG, "environment")):
        rank, origin = settings.machine_rank, settings.origin("machine_rank")
    elif told:
        origin, rank = next(iter(told.items()))
    else:
        found = _index()
        if found is None:
            return None
        origin, rank = found
    if not 0 <= rank < machines:
        raise LaunchError(
            f"This pod ({socket.gethostname()}) is number {rank} ({origin}), but there are {machines}, from 0 to "
            f"{machines - 1}. Check PET_NNODES, or the number of pods in the manifest."
        )
    return rank


def _index() -> tuple[str, int] | None:
    """Return the index that Kubernetes gives a pod of an indexed Job or of a StatefulSet, with its origin."""
    host, domain = _own_name()
    index = _number(environment.JOB_COMPLETION_INDEX)
    if index is not None:
        # A JobSet names its pods NAME-JOBS-JOB-INDEX.NAME; each of its Jobs counts from 0.
        service = re.escape(domain.partition(".")[0])
        of_jobset = re.fullmatch(rf"{service}-.+-(\d+)-{index}", host) if service else None
        if of_jobset is not None and int(of_jobset[1]) > 0:
            raise LaunchError(
                f"{host} is pod {index} of job {of_jobset[1]} of a JobSet, and every job counts its pods from 0: set "
                f"PET_NODE_RANK and PET_MASTER_ADDR {_HOW}, or use one job with `parallelism: N`."
            )
        return environment.JOB_COMPLETION_INDEX, index
    ordinal = re.search(r"-(\d+)$", host) if environment.read(environment.KUBERNETES) else None
    return None if ordinal is None else (f"the name {host}", int(ordinal[1]))


def _address(
    kind: MachineVariables | None, settings: LaunchSettings, rank: int | None
) -> tuple[str | None, int | None]:
    """Return the address and the port of machine 0, as all machines can reach them."""
    if settings.origin("main_process_ip").startswith(FLAG):
        return None, None  # the plan takes it
    told, port = _told_address(kind)
    if not told:
        return _first_pod(rank), port
    name, address = next(iter(told.items()))
    if not is_loopback(address):
        return address, port
    if rank == 0:  # older operators tell the first pod that it is localhost; the others know its name
        return socket.gethostname(), port
    raise LaunchError(
        f"{name}={address} in pod {rank} ({socket.gethostname()}) is this pod itself, and not the first one: set it to "
        "a name that every pod can resolve, such as NAME-0.SERVICE for a headless service."
    )


def _told_address(kind: MachineVariables | None) -> tuple[dict[str, str], int | None]:
    """Return the variables that name the first machine, with their values, and the port."""
    names = [*([kind.address] if kind is not None else []), "MASTER_ADDR"]
    told = {name: value.split()[0] for name in names if (value := environment.read(name))}
    if kind is not None and kind.name == "SkyPilot":
        return told, port_of_this_job(ProcessInfo())
    port = _number(kind.port) if kind is not None and kind.port is not None else None
    endpoint = environment.read(environment.TORCHRUN_ENDPOINT)
    if told or not endpoint:
        return told, port
    found = re.fullmatch(r"\[?(.+?)\]?:(\d+)", endpoint)
    if found is None:
        return {environment.TORCHRUN_ENDPOINT: endpoint}, port
    return {environment.TORCHRUN_ENDPOINT: found[1]}, int(found[2])


def _first_pod(rank: int | None) -> str:
    """Return the name of the first pod, made from the name of this one."""
    host, domain = _own_name()
    if not domain or rank is None or not host.endswith(f"-{rank}"):
        raise LaunchError(
            f"This pod ({host}) does not know the name of the first one: give the pods a headless service (`subdomain` "
            f"in a Job, `serviceName` in a StatefulSet), or set PET_MASTER_ADDR {_HOW}."
        )
    return f"{host.removesuffix(str(rank))}0.{domain}"


def _names_of_pods(rank: int | None, machines: int) -> str | None:
    """Return the names of all pods as a node list, where this pod's name ends with its number."""
    host, _ = _own_name()
    return f"{host.removesuffix(str(rank))}[0-{machines - 1}]" if host.endswith(f"-{rank}") else None


def _own_name() -> tuple[str, str]:
    """Return the name of this pod, and the domain of its headless service: Kubernetes writes it to /etc/hosts."""
    host = socket.gethostname()
    full = host if "." in host else socket.getfqdn(host)
    name, _, domain = full.partition(".")
    return (name, domain) if name == host.partition(".")[0] else (host, "")


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _number(name: str) -> int | None:
    word = environment.read(name)
    if not word:
        return None
    if not word.isdigit():
        raise LaunchError(f"The environment variable {name}={word!r} is not a number.")
    return int(word)
