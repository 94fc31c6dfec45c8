"""Read a hostfile of DeepSpeed. Its machines use torchelastic's rendezvous, with one launch on each machine."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from ...config.launch.settings import LaunchSettings
from ...errors import InvalidDataError, LaunchError
from ...program import program_name
from ...untrusted import printable, read_text
from .cluster import Cluster

_LINE = re.compile(r"(?P<host>[^\s-]\S*)\s+slots=(?P<slots>[0-9]{1,6})")


def cluster_from_hostfile(settings: LaunchSettings) -> Cluster | None:
    """Return the position of this machine in `--deepspeed_hostfile`, or None without such a file."""
    path = settings.resolved["deepspeed_hostfile"].value
    if path is None:
        return None
    chosen, left_out = (settings.resolved[f"deepspeed_{name}_filter"].value for name in ("inclusion", "exclusion"))
    machines = _filtered(read_hostfile(Path(path)), chosen, left_out)
    if len(set(machines.values())) > 1:
        raise LaunchError(f"{path} gives its machines different slots ({machines}): give each of them the same.")
    hosts = list(machines)
    rank = settings.machine_rank if settings.machine_rank is not None else _own_rank(hosts)
    if rank is None and len(hosts) > 1:
        raise LaunchError(
            f"{socket.gethostname()} is not among the machines of {path} ({', '.join(hosts)}): give --machine_rank."
        )
    return Cluster(
        name=f"the hostfile {path}",
        num_machines=len(hosts),
        machine_rank=rank or 0,
        address=hosts[0] if len(hosts) > 1 else None,
        tasks_per_machine=machines[hosts[0]],
        hosts=", ".join(hosts),
    )


def remarks_on_machines(settings: LaunchSettings) -> list[str]:
    """Return a message for a launcher that has no effect: this library starts no programs on other machines."""
    launcher = settings.resolved["deepspeed_multinode_launcher"]
    if launcher.value in (None, "standard"):
        return []
    return [
        f"deepspeed_multinode_launcher = {launcher.value} ({launcher.origin}) has no effect: run {program_name()} "
        "launch once on every machine, by srun, mpirun or hand, and they connect through torchelastic."
    ]


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the machines of a hostfile with their slots, in order."""
    if not path.is_file():
        raise LaunchError(f"There is no hostfile {path}.")
    try:
        content = read_text(path, f"The hostfile {path}")
    except InvalidDataError as error:
        raise LaunchError(f"{error}.") from None
    machines: dict[str, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None or not text.isprintable() or found["host"] in machines:
            why = (
                "is named twice" if found is not None and text.isprintable() else "cannot be read: write `name slots=8`"
            )
            raise LaunchError(f"{path}, line {number}: {printable(text)!r} {why}.")
        machines[found["host"]] = int(found["slots"])
    if not machines:
        raise LaunchError(f"The hostfile {path} names no machine.")
    return machines


def _filtered(machines: dict[str, int], chosen: str | None, left_out: str | None) -> dict[str, int]:
    """Keep or leave out machines: `worker-0@worker-1`. Devices of a machine are chosen by `--gpu_ids`."""
    if chosen and left_out:
        raise LaunchError("Give --deepspeed_inclusion_filter or --deepspeed_exclusion_filter, not both.")
    named = [host for host in (chosen or left_out or "").split("@") if host]
    for host in named:
        if ":" in host:
            raise LaunchError(f"{host!r} chooses devices: leave them out of the filter, and give --gpu_ids.")
        if host not in machines:
            raise LaunchError(
                f"The filter names {host!r}, which is not in the hostfile: there are {', '.join(machines)}."
            )
    kept = {host: slots for host, slots in machines.items() if not named or (host in named) == bool(chosen)}
    if not kept:
        raise LaunchError("The filter leaves no machine.")
    return kept


def _own_rank(hosts: list[str]) -> int | None:
    own = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    return next((rank for rank, host in enumerate(hosts) if host in own), None)
