"""A real Slurm on the machines of machines.py: munge, slurmctld and one slurmd on each. Nothing of it is in /etc."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from .machines import Machine, Running, until

# cgroups and accounting are left out: they are the host's. `pgid` finds the fewest processes of a job, so that what
# our launcher starts must end by itself.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName={names} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


def why_not() -> str | None:
    """Say why Slurm cannot be started here, or None."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if _find(name) is None]
    return f"{', '.join(missing)} not installed: see .ci/install_clusters" if missing else None


class Slurm:
    """A running cluster; commands are typed on its first machine."""

    def __init__(self, nodes: Sequence[Machine], folder: Path) -> None:
        self.nodes = nodes
        self._folder = folder

    def start(self, *command: object) -> Running:
        """Start a command such as srun."""
        return self.nodes[0].start(*command, SLURM_CONF=str(self._folder / "slurm.conf"))

    def run(self, *command: object) -> str:
        """Run a command to its good end, and return what it printed."""
        return self.nodes[0].run(*command, SLURM_CONF=str(self._folder / "slurm.conf"))

    def submit(self, body: str, *options: object) -> str:
        """Submit a script and return the number of the job."""
        script = self._folder / "job.sh"
        script.write_text(f"#!/bin/sh\n{body}\n")
        return self.run("sbatch", "--parsable", f"--output={self._folder}/job-%j.out", *options, script).strip()

    def printed_by(self, job: str) -> str:
        """Return what a job has printed so far."""
        output = self._folder / f"job-{job}.out"
        return output.read_text() if output.exists() else ""

    def state_of(self, job: str) -> tuple[str, str]:
        """Return the state and the exit code of a job, as Slurm says them."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return re.findall(r" JobState=(\w+)", shown)[0], re.findall(r" ExitCode=(\d+):", shown)[0]

    def wait_for(self, job: str, seconds: float = 60.0) -> tuple[str, str]:
        """Wait until a job has ended, and return its state and exit code."""
        unfinished = ("PENDING", "RUNNING", "COMPLETING")
        assert until(lambda: self.state_of(job)[0] not in unfinished, seconds, interval=0.3), self.printed_by(job)
        return self.state_of(job)

    def processes(self) -> list[psutil.Process]:
        """Return what runs on the nodes beside Slurm itself."""
        found = [process for node in self.nodes for process in node.processes()]
        return [process for process in found if not process.name().startswith(("slurm", "munge"))]


@contextmanager
def slurm(nodes: Sequence[Machine], folder: Path, seconds: float = 60.0) -> Iterator[Slurm]:
    """Start Slurm on machines; raise TimeoutError if it is not up in time."""
    folder.mkdir()
    (folder / "state").mkdir()
    names = ",".join(node.name for node in nodes)
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(controller=nodes[0].name, names=names, folder=folder))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}"
        for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    cluster = Slurm(nodes, folder)
    deadline = time.monotonic() + seconds
    daemons: list[Running] = []
    try:
        daemons.append(nodes[0].start(_find("munged"), "--foreground", "--force", *munge))
        until((folder / "munge.socket").exists, 10)
        daemons.append(nodes[0].start(_find("slurmctld"), "-D", "-c", "-f", configuration))
        daemons += [node.start(_find("slurmd"), "-D", "-N", node.name, "-f", configuration) for node in nodes]
        while cluster.start("sinfo", "--noheader", "--format=%D %t").finished() != f"{len(nodes)} idle\n":
            if time.monotonic() > deadline:
                raise TimeoutError(f"Slurm did not start within {seconds:.0f} s")
            time.sleep(0.2)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.end()


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.defpath + ":/usr/sbin:/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
