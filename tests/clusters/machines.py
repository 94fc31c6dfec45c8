"""Machines of a cluster on one host: network namespaces on a bridge, each with its own name and /etc/hosts.

Nothing has a name outside and nothing is left behind: a namespace lives as long as the process that holds it, and its
holder ends with the test process, however that ends. Ports are free in each of them, and no traffic leaves the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import warm

ACCELERATE = (sys.executable, "-m", "meshwright")
# What the host of the tests says about itself must not reach the machines: a launch finds out by itself.
_NOT_INHERITED = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")


def why_not() -> str | None:
    """Say why machines cannot be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: see .ci/install_clusters"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(kw_only=True)
class Running:
    """A command on a machine, with what it has printed so far."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float = 300.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {seconds:.0f} s:\n{self.printed}") from None

    def finished(self, seconds: float = 300.0) -> str:
        """Wait for the end, good or bad, and return what it printed."""
        self.wait(seconds)
        return self.printed

    def end(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> None:
        """Ask it to end, and make it."""
        self.process.send_signal(number)
        if not until(lambda: self.process.poll() is not None, seconds):
            self.process.kill()
            self.process.wait()

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        """Wait until the command has printed a text."""
        until(lambda: text in self.printed or self.process.poll() is not None, seconds)
        assert text in self.printed, f"{text!r} is not in:\n{self.printed}"


class Machine:
    """One machine; everything that is started on it can be seen and ended by it."""

    def __init__(self, name: str, address: str, holder: subprocess.Popen[bytes], folder: Path) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.variables: dict[str, str] = {}
        self._holder = holder
        self._started = 0

    def start(self, *command: object, **variables: str) -> Running:
        """Start a command in the folder that the machines share."""
        self._started += 1
        output = self.folder / f"{self.name}.{self._started}.out"
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with output.open("wb") as stream:
            process = warm.Popen(
                [*self.enter(), *map(str, command)],
                cwd=self.folder,
                env=environment | {"OMP_NUM_THREADS": "1", "HF_HOME": str(self.folder)} | self.variables | variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process=process, output=output)

    def run(self, *command: object, seconds: float = 300.0, **variables: str) -> str:
        """Run a command to its end and return what it printed; fail unless it succeeds."""
        running = self.start(*command, **variables)
        code = running.wait(seconds)
        assert code == 0, f"{command} ended with {code} on {self.name}:\n{running.printed}"
        return running.printed

    def unplug(self) -> None:
        """Take the network away."""
        _ip(self._holder.pid, "link set eth0 down")

    def plug_in(self) -> None:
        """Give the network back."""
        _ip(self._holder.pid, "link set eth0 up")

    def processes(self) -> list[psutil.Process]:
        """Return what runs on this machine, the holder left out."""
        here = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/net") == here and process.pid != self._holder.pid:
                    found.append(process)
        return found

    def kill_everything(self) -> None:
        """End what is left on this machine."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def enter(self) -> list[str]:
        """Return the words before a command that runs it on this machine."""
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--uts", "--mount", f"--wdns={self.folder}"]


def until(condition: Callable[[], object], seconds: float, interval: float = 0.05) -> bool:
    """Wait for a condition; tell whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


@contextmanager
def machines(
    names: Sequence[str], folder: Path, *, own_name_is_loopback: bool = False, domain: str | None = None
) -> Iterator[list[Machine]]:
    """Make machines that reach each other by name and address.

    Debian and others give a machine's own name the address 127.0.1.1 on that machine: `own_name_is_loopback`.
    Kubernetes gives a pod with a headless service a full name, under which the others know it: `domain`.
    """
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
    holders: list[subprocess.Popen[bytes]] = []
    made: list[Machine] = []
    try:
        switch = _hold(["--net"], "ip link add bridge type bridge && ip link set bridge up", holders)
        for name, address in addresses.items():
            known = addresses | ({name: "127.0.1.1"} if own_name_is_loopback else {})
            hosts = folder / f"hosts.{name}"
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(_entry(other, where, domain) for other, where in known.items())
            )
            holder = _hold(
                ["--net", "--uts", "--mount"], f"hostname {name} && mount --bind {hosts} /etc/hosts", holders
            )
            _ip(switch.pid, f"link add {name} type veth peer name eth0 netns {holder.pid}")
            _ip(switch.pid, f"link set {name} master bridge up")
            for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip(holder.pid, command)
            made.append(Machine(name, address, holder, folder))
        yield made
    finally:
        for machine in made:
            machine.kill_everything()
        for holder in holders:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdin and holder.stdin.close()
            holder.stdout and holder.stdout.close()


def _entry(name: str, address: str, domain: str | None) -> str:
    if domain is None:
        return f"{address} {name}\n"
    service = domain.partition(".")[0]  # a resolver in the same Kubernetes namespace completes the rest
    return f"{address} {name}.{domain} {name} {name}.{service}\n"


def _hold(namespaces: Sequence[str], prepare: str, holders: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start the process that keeps new namespaces: it reads its standard input, which ends with the test process."""
    holder = subprocess.Popen(
        ["unshare", *namespaces, "sh", "-ec", f"{prepare} && echo ready && exec cat > /dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holders.append(holder)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n", f"could not make a namespace: {prepare}"
    return holder


def _ip(holder: int, command: str) -> None:
    subprocess.run(["nsenter", f"--target={holder}", "--net", "ip", *command.split()], check=True)
