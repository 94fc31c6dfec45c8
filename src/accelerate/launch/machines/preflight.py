"""Check, before torch is imported, that every machine reaches machine 0 and that their settings agree.

Machine 0 coordinates: it listens on the rendezvous port, and the other machines report there. A machine that cannot be
reached is reported within seconds, instead of after the fifteen minutes of the rendezvous timeout.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

from ...errors import LaunchError
from ...runtime.group.network import is_local_address
from ..console import notify
from .cluster import expand_node_list

SECONDS_UNTIL_UNREACHABLE = 15.0
SECONDS_UNTIL_A_POD_IS_UNREACHABLE = 600.0
"""A pod may wait for its node or its image, and its name is unknown until it starts."""
SECONDS_PER_ATTEMPT = 5.0
SECONDS_BETWEEN_NOTICES = 20.0
SECONDS_TO_WAIT = 900.0
"""The timeout of torchelastic's own rendezvous."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The settings that one machine sends to machine 0."""

    machine_rank: int
    num_machines: int
    processes_here: int
    host: str

    def __str__(self) -> str:
        return f"{self.machine_rank} ({self.host})"

    def encode(self) -> bytes:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: str) -> Report:
        """Parse a line of `encode`; raise ValueError for anything else."""
        try:
            values = json.loads(line)
            numbers = {name: int(values[name]) for name in ("machine_rank", "num_machines", "processes_here")}
            return cls(host=str(values["host"]), **numbers)
        except (KeyError, TypeError) as error:
            raise ValueError(line) from error


def check_port(port: int) -> None:
    """Raise if the port cannot be bound on this machine."""
    try:
        _listen(port).close()
    except OSError as error:
        raise LaunchError(
            f"Port {port} on this machine ({socket.gethostname()}) cannot be used: {error.strerror}. Another run may "
            f"hold it (`ss -ltnp 'sport = :{port}'` says who). Choose another --main_process_port; on a single machine "
            "leave it out, and a free one is chosen."
        ) from error


def wait_for_all_machines(
    own: Report, address: str, port: int, hosts: str | None, *, comes_up_late: bool = False
) -> None:
    """Return when all machines are connected; raise when one cannot connect or disagrees."""
    if own.machine_rank == 0:
        check_port(port)
        _Coordinator(own, address, port, hosts).wait_for_machines()
    else:
        _report_to_coordinator(own, address, port, comes_up_late)


def check_reachable(address: str, port: int, *, comes_up_late: bool = False) -> None:
    """Return when the port is open; raise if the machine cannot be reached."""
    _connect(address, port, time.monotonic(), comes_up_late).close()


class _Coordinator:
    """The side of machine 0: collects the reports and answers all machines."""

    def __init__(self, own: Report, address: str, port: int, hosts: str | None) -> None:
        self._own = own
        self._endpoint = f"{address}:{port}"
        self._hosts = expand_node_list(hosts) if hosts else []
        self._port = port
        self._is_local = is_local_address(address)
        self._connected: dict[int, tuple[socket.socket, Report]] = {}

    def wait_for_machines(self) -> None:
        started = time.monotonic()
        next_notice = started + SECONDS_BETWEEN_NOTICES
        with _listen(self._port) as server:
            server.settimeout(0.2)
            while self._missing():
                seconds = time.monotonic() - started
                if seconds > SECONDS_TO_WAIT:
                    self._abort(f"The rendezvous failed: {self._missing_text(seconds)}")
                if started + seconds > next_notice:
                    next_notice += SECONDS_BETWEEN_NOTICES
                    notify(self._missing_text(seconds))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                self._accept(connection)
            self._reply({"go": True})

    def _missing(self) -> list[int]:
        """Return the machines that are not connected, after dropping closed connections."""
        self._connected = {
            rank: (connection, report) for rank, (connection, report) in self._connected.items() if _is_open(connection)
        }
        return [rank for rank in range(1, self._own.num_machines) if rank not in self._connected]

    def _accept(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS_PER_ATTEMPT)
        try:
            report = Report.decode(_read_line(connection))
        except (OSError, ValueError):  # not a launcher
            connection.close()
            return
        conflict = self._conflict_with(report)
        if conflict is not None:
            self._abort(f"The machines do not agree: {conflict}", connection)
        self._connected[report.machine_rank] = (connection, report)

    def _conflict_with(self, report: Report) -> str | None:
        self._missing()
        other = self._own if report.machine_rank == 0 else self._connected.get(report.machine_rank, (None, None))[1]
        if other is not None:
            both = f"{other.host} and {report.host}"
            return f"two machines say they are machine {report.machine_rank}: {both}. Check --machine_rank."
        for field, name in {"num_machines": "machines", "processes_here": "processes per machine"}.items():
            ours, theirs = getattr(self._own, field), getattr(report, field)
            if ours != theirs:
                return (
                    f"machine {self._own} was started for {ours} {name}, machine {report} for {theirs}. Check "
                    "--num_machines and --num_processes (of all machines together)."
                )
        return None

    def _abort(self, reason: str, *more: socket.socket) -> NoReturn:
        """Send the reason to all connected machines, and raise it here."""
        self._reply({"objection": reason}, *more)
        raise LaunchError(reason)

    def _reply(self, answer: dict[str, object], *more: socket.socket) -> None:
        for connection in (*(connection for connection, _ in self._connected.values()), *more):
            with connection:
                try:
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:  # just disconnected: torch's rendezvous will report it
                    continue

    def _missing_text(self, seconds: float) -> str:
        missing = [f"{rank} ({self._hosts[rank]})" if self._hosts else str(rank) for rank in self._missing()]
        present = [str(self._own), *(str(report) for _, (_, report) in sorted(self._connected.items()))]
        wrong = "" if self._is_local else f" Note that {self._endpoint} is not an address of this machine."
        return (
            f"after {seconds:.0f} s no connection from machine {', '.join(missing)}; present: "
            f"{', '.join(present)}. It must reach {self._endpoint}, and run the same launch with its own "
            f"--machine_rank.{wrong}"
        )


def _report_to_coordinator(own: Report, address: str, port: int, comes_up_late: bool) -> None:
    """Report to machine 0 and wait for its answer; report again if it was restarted meanwhile."""
    started = time.monotonic()
    next_notice = started + SECONDS_BETWEEN_NOTICES
    while True:
        with _connect(address, port, started, comes_up_late) as connection:
            connection.settimeout(SECONDS_TO_WAIT)
            try:
                connection.sendall(own.encode())
                answer = json.loads(_read_line(connection))
            except (OSError, ValueError):
                answer = {}
        if "objection" in answer:
            raise LaunchError(str(answer["objection"]))
        if "go" in answer:
            return
        now = time.monotonic()
        if now - started > SECONDS_TO_WAIT:
            raise LaunchError(f"The program at {address}:{port} never accepted this machine ({own}).")
        if now > next_notice:
            next_notice = now + SECONDS_BETWEEN_NOTICES
            notify(
                f"a program listens at {address}:{port}, but it does not accept machine {own}: the run there has "
                "begun without it, or the port belongs to another program (choose another --main_process_port)."
            )
        time.sleep(1.0)


def _connect(address: str, port: int, started: float, comes_up_late: bool) -> socket.socket:
    """Connect; retry while the connection is refused, and give up when the machine does not answer."""
    patience = SECONDS_UNTIL_A_POD_IS_UNREACHABLE if comes_up_late else SECONDS_UNTIL_UNREACHABLE
    next_notice = started + SECONDS_BETWEEN_NOTICES
    silent_since: float | None = None
    while True:
        before = time.monotonic()
        try:
            return socket.create_connection((address, port), timeout=SECONDS_PER_ATTEMPT)
        except OSError as error:
            now = time.monotonic()
            refused = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
            silent_since = None if refused else (silent_since or before)
            if silent_since is not None and now - silent_since > patience:
                raise LaunchError(
                    f"This machine ({socket.gethostname()}) cannot reach {address}:{port}, the address of machine "
                    f"0: {_reason(error)}. Check --main_process_ip, the network between the two and firewalls."
                ) from error
            if now - started > SECONDS_TO_WAIT:
                raise LaunchError(f"Nobody listened on {address}:{port} for {SECONDS_TO_WAIT:.0f} s.") from error
            if now > next_notice:
                next_notice = now + SECONDS_BETWEEN_NOTICES
                notify(_notice(error, refused, address, port, now - started))
            time.sleep(0.2)


def _notice(error: OSError, refused: bool, address: str, port: int, seconds: float) -> str:
    if refused:
        return (
            f"{address} answers, but nobody listens on port {port} yet ({seconds:.0f} s): is the launch running on "
            "machine 0, with this --main_process_port?"
        )
    return f"{address}:{port}, the address of machine 0, cannot be reached yet ({seconds:.0f} s): {_reason(error)}."


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name is unknown"
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()


def _listen(port: int) -> socket.socket:
    """Listen on every address of this machine, IPv4 and IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def _read_line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n") and len(received) < 65536:
        part = connection.recv(4096)
        if not part:
            break
        received += part
    return received.decode()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(SECONDS_PER_ATTEMPT)
