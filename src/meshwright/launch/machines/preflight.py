"""Check, before torch is imported, that every machine reaches machine 0 and that their settings agree.

Machine 0 coordinates: it listens on the rendezvous port, and the other machines report there. A machine that cannot be
reached is reported within seconds, instead of after the fifteen minutes of the rendezvous timeout.

[Note: strangers at the port] Anybody who reaches the port can connect. One thread looks after all connections and waits
for none of them: each has a few seconds and a few kilobytes to say one line, at most so many are open that have not
said it, and what is no report is counted and refused. Whoever writes a report of other settings ends the launch of all
machines, as one that was started by mistake does. With MESHWRIGHT_LAUNCH_SECRET, the same on all machines, only those
that know it count: each proves to the other that it does, by an HMAC of two random numbers. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn, TypeVar

from ...errors import InvalidDataError, LaunchError
from ...runtime.group.network import is_local_address, is_loopback, listen
from ...untrusted import build, parse_object, printable
from ..console import notify
from .cluster import expand_node_list

T = TypeVar("T")
SECRET_VARIABLE = "MESHWRIGHT_LAUNCH_SECRET"
SECONDS_UNTIL_UNREACHABLE = 15.0
SECONDS_UNTIL_A_POD_IS_UNREACHABLE = 600.0
"""A pod may wait for its node or its image, and its name is unknown until it starts."""
SECONDS_PER_ATTEMPT = 5.0
SECONDS_BETWEEN_NOTICES = 20.0
SECONDS_TO_WAIT = 900.0
"""The timeout of torchelastic's own rendezvous."""


MOST_BYTES_OF_A_LINE = 4096
MOST_SILENT_CONNECTIONS = 256
"""How many may be open that have not reported; a newer one replaces the oldest."""
_MOST_MACHINES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """The settings that one machine sends to machine 0."""

    machine_rank: int
    num_machines: int
    processes_here: int
    host: str
    nonce: str = ""
    """A random number, of a machine that knows the secret."""

    def __post_init__(self) -> None:
        if not 0 <= self.machine_rank < self.num_machines <= _MOST_MACHINES:
            raise ValueError(f"machine {self.machine_rank} of {self.num_machines}")
        if not 0 < self.processes_here <= _MOST_MACHINES:
            raise ValueError(f"{self.processes_here} processes per machine")
        if self.host != printable(self.host, 255):
            raise ValueError("the name of the host cannot be printed")

    def __str__(self) -> str:
        return f"{self.machine_rank} ({self.host})"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a machine answers to a challenge: it knows the secret."""

    proof: str


@dataclass(frozen=True, kw_only=True)
class PreflightReply:
    """What machine 0 sends: a challenge, if there is a secret, and at the end whether the machine may go on."""

    go: bool = False
    objection: str = ""
    challenge: str = ""
    proof: str = ""


def check_port(address: str, port: int) -> None:
    """Raise if the port cannot be bound on this machine."""
    try:
        listen(address, port).close()
    except OSError as error:
        raise LaunchError(
            f"Port {port} on this machine ({socket.gethostname()}) cannot be used: {error.strerror}. Another run may "
            f"hold it (`ss -ltnp 'sport = :{port}'` says who). Choose another --main_process_port; on a single machine "
            "leave it out, and a free one is chosen."
        ) from error


def wait_for_all_machines(
    own: MachineReport, address: str, port: int, hosts: str | None, *, comes_up_late: bool = False, secret: str = ""
) -> None:
    """Return when all machines are connected; raise when one cannot connect or disagrees."""
    if own.machine_rank == 0:
        check_port(address, port)
        _Coordinator(own, address, port, hosts, secret).wait_for_machines()
    else:
        _report_to_coordinator(own, address, port, comes_up_late, secret)


def check_reachable(address: str, port: int, *, comes_up_late: bool = False) -> None:
    """Return when the port is open; raise if the machine cannot be reached."""
    _connect(address, port, time.monotonic(), comes_up_late).close()


@dataclass(kw_only=True, eq=False)
class _Link:
    """One connection to machine 0."""

    connection: socket.socket
    peer: str
    until: float
    """When it has to have said its line."""
    received: bytes = b""
    report: MachineReport | None = None
    challenge: str = ""
    is_accepted: bool = False


class _Refused(Exception):
    """A connection is closed, for the reason that the message names."""


class _Coordinator:
    """The side of machine 0: collects the reports and answers all machines; see [Note: strangers at the port]."""

    def __init__(self, own: MachineReport, address: str, port: int, hosts: str | None, secret: str) -> None:
        self._own = own
        self._address, self._port = address, port
        self._secret = secret
        self._hosts = expand_node_list(hosts) if hosts else []
        self._is_local = is_local_address(address)
        self._silent: dict[_Link, None] = {}  # in the order in which they connected
        self._connected: dict[int, _Link] = {}
        self._refused, self._last_refusal = 0, ""

    def wait_for_machines(self) -> None:
        started = time.monotonic()
        next_notice = started + SECONDS_BETWEEN_NOTICES
        with self._listening():
            while self._missing():
                seconds = time.monotonic() - started
                if seconds > SECONDS_TO_WAIT:
                    self._abort(f"The rendezvous failed: {self._missing_text(seconds)}")
                if started + seconds > next_notice:
                    next_notice += SECONDS_BETWEEN_NOTICES
                    notify(self._missing_text(seconds))
                self._look()
            self._reply(PreflightReply(go=True))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Listen inside the block, and close every connection after it."""
        with listen(self._address, self._port) as server, selectors.DefaultSelector() as self._selector:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
            try:
                yield
            finally:
                for link in (*self._silent, *self._connected.values()):
                    link.connection.close()

    def _look(self) -> None:
        """Take note of what has come, for a moment at most, and close what has been silent for long."""
        for key, _ in self._selector.select(0.2):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
                continue
            if key.data.connection.fileno() < 0:  # it had to give way to another one just now
                continue
            try:
                self._hear(key.data)
            except _Refused as refused:
                self._refuse(key.data, str(refused))
            except OSError:  # it has disconnected
                self._drop(key.data)
        now = time.monotonic()
        for link in [link for link in self._silent if link.until < now]:
            self._refuse(link, "it said nothing that is a line")

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # it has disconnected, or this process has too many files open: it tries again
            connection, peer = server.accept()
            connection.setblocking(False)
            link = _Link(connection=connection, peer=str(peer[0]), until=time.monotonic() + SECONDS_PER_ATTEMPT)
            self._silent[link] = None
            self._selector.register(connection, selectors.EVENT_READ, link)
        if len(self._silent) > MOST_SILENT_CONNECTIONS:
            self._refuse(next(iter(self._silent)), "it said nothing, and newer connections came")

    def _refuse(self, link: _Link, reason: str) -> None:
        self._refused, self._last_refusal = self._refused + 1, f"{link.peer}: {reason}"
        self._drop(link)

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        self._silent.pop(link, None)
        if link.is_accepted and link.report is not None:
            del self._connected[link.report.machine_rank]

    def _hear(self, link: _Link) -> None:
        part = link.connection.recv(MOST_BYTES_OF_A_LINE)
        if not part and link.challenge and not link.is_accepted:
            raise _Refused(f"machine {link.report} left when the secret was requested ({SECRET_VARIABLE})")
        if not part or link.is_accepted:  # one that has reported has nothing more to say
            raise ConnectionResetError
        link.received += part
        line, end, rest = link.received.partition(b"\n")
        if not end and len(line) < MOST_BYTES_OF_A_LINE:
            return
        link.received = b""
        if rest or not end:
            raise _Refused("it said more than a line")
        if link.report is None:
            self._hear_report(link, _decode(MachineReport, line))
        elif not _is_equal(_decode(Proof, line).proof, _proof(self._secret, link.report, link.challenge)):
            raise _Refused(f"machine {link.report} does not know the secret of {SECRET_VARIABLE}")
        else:
            self._add(link, link.report)

    def _hear_report(self, link: _Link, report: MachineReport) -> None:
        link.report = report
        if bool(report.nonce) != bool(self._secret):
            words = "with" if self._secret else "without"
            reason = (
                f"Machine 0 was started {words} {SECRET_VARIABLE}, unlike machine {report}: start all with the same."
            )
            _send(link.connection, PreflightReply(objection=reason))
            raise _Refused(f"machine {report} was not started {words} {SECRET_VARIABLE}")
        if not self._secret:
            self._add(link, report)
        else:
            link.challenge = secrets.token_hex(16)
            _send(
                link.connection,
                PreflightReply(
                    challenge=link.challenge, proof=_proof(self._secret, self._own, link.challenge + report.nonce)
                ),
            )

    def _add(self, link: _Link, report: MachineReport) -> None:
        conflict = self._conflict_with(report)
        if conflict is not None:
            self._abort(f"The machines do not agree: {conflict}", link)
        del self._silent[link]
        link.is_accepted = True
        self._connected[report.machine_rank] = link

    def _missing(self) -> list[int]:
        """Return the machines that are not connected."""
        return [rank for rank in range(1, self._own.num_machines) if rank not in self._connected]

    def _conflict_with(self, report: MachineReport) -> str | None:
        connected = self._connected.get(report.machine_rank)
        if connected is not None and not _is_open(connected.connection):
            self._drop(connected)  # it has gone, and this is the same machine again
            connected = None
        other = connected.report if connected is not None else None
        if report.machine_rank == 0:
            other = self._own
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

    def _abort(self, reason: str, *more: _Link) -> NoReturn:
        """Send the reason to all connected machines, and raise it here."""
        self._reply(PreflightReply(objection=reason), *more)
        raise LaunchError(reason)

    def _reply(self, answer: PreflightReply, *more: _Link) -> None:
        for link in (*self._connected.values(), *more):
            with suppress(OSError):  # just disconnected: torch's rendezvous will report it
                _send(link.connection, answer)

    def _missing_text(self, seconds: float) -> str:
        named = dict(enumerate(self._hosts))
        missing = [f"{rank} ({printable(named[rank])})" if rank in named else str(rank) for rank in self._missing()]
        present = [str(self._own), *(str(link.report) for _, link in sorted(self._connected.items()))]
        endpoint = f"{self._address}:{self._port}"
        note = ""
        if not self._is_local:
            note = f" Note that {endpoint} is not an address of this machine."
        elif is_loopback(self._address):
            note = f" Note that {endpoint} can be reached from this machine only."
        if self._refused:
            note += f" Connections refused: {self._refused}, the last from {printable(self._last_refusal)}."
        return (
            f"after {seconds:.0f} s no connection from machine {', '.join(missing)}; present: "
            f"{', '.join(present)}. It must reach {endpoint}, and run the same launch with its own "
            f"--machine_rank.{note}"
        )


def _report_to_coordinator(own: MachineReport, address: str, port: int, comes_up_late: bool, secret: str) -> None:
    """Report to machine 0 and wait for its answer; report again if it was restarted meanwhile."""
    started = time.monotonic()
    next_notice = started + SECONDS_BETWEEN_NOTICES
    while True:
        with _connect(address, port, started, comes_up_late) as connection:
            try:
                answer = _ask(connection, own, secret)
            except (OSError, _Refused):
                answer = PreflightReply()
        if answer.objection:
            raise LaunchError(printable(answer.objection, 1000))
        if answer.go:
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


def _ask(connection: socket.socket, own: MachineReport, secret: str) -> PreflightReply:
    """Report to machine 0, and return its last word."""
    until = time.monotonic() + SECONDS_TO_WAIT
    if secret:
        own = replace(own, nonce=secrets.token_hex(16))
    _send(connection, own)
    answer = _decode(PreflightReply, _read_line(connection, until))
    if not secret or answer.objection:
        return answer
    machine_0 = replace(own, machine_rank=0, host="", nonce="")
    if not _is_equal(answer.proof, _proof(secret, machine_0, answer.challenge + own.nonce)):
        return PreflightReply(
            objection=f"Machine 0 does not know the secret of {SECRET_VARIABLE} that machine {own} has: start all "
            "machines with the same."
        )
    _send(connection, Proof(proof=_proof(secret, own, answer.challenge)))
    return _decode(PreflightReply, _read_line(connection, until))


def _proof(secret: str, of: MachineReport, numbers: str) -> str:
    """Return what only a machine can compute that knows the secret."""
    settings = "" if of.machine_rank == 0 else json.dumps(asdict(of))
    return hmac.new(secret.encode(), f"{of.machine_rank} {numbers} {settings}".encode(), hashlib.sha256).hexdigest()


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


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _send(connection: socket.socket, message: MachineReport | Proof | PreflightReply) -> None:
    connection.sendall(json.dumps(asdict(message)).encode() + b"\n")


def _decode(kind: type[T], line: bytes) -> T:
    try:
        return build(kind, parse_object(line, "the line"), "the line")
    except InvalidDataError as error:
        raise _Refused(str(error)) from None


def _read_line(connection: socket.socket, until: float) -> bytes:
    received = b""
    while b"\n" not in received and len(received) < MOST_BYTES_OF_A_LINE:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        part = connection.recv(MOST_BYTES_OF_A_LINE)
        if not part:
            break
        received += part
    return received.partition(b"\n")[0]


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
