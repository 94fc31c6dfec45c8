"""The check of all machines before a launch, on the loopback of this one. Real machines: test_machines.py."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.machines import preflight
from meshwright.launch.machines.preflight import MachineReport, check_port, check_reachable, wait_for_all_machines
from meshwright.runtime.group import network
from tests.clusters.machines import until
from tests.ranks.pool import free_port
from tests.timing import limit

Call = Callable[..., "Future[None]"]
WaitForOutput = Callable[[str], str]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SECONDS_UNTIL_UNREACHABLE", 0.3)
    monkeypatch.setattr(preflight, "SECONDS_PER_ATTEMPT", 0.2)
    monkeypatch.setattr(preflight, "SECONDS_BETWEEN_NOTICES", 0.3)
    monkeypatch.setattr(preflight, "SECONDS_TO_WAIT", 20.0)


@pytest.fixture
def gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SECONDS_TO_WAIT", 1.0)


@pytest.fixture
def wait_for_output(capsys: pytest.CaptureFixture[str]) -> WaitForOutput:
    """Wait until the launcher has printed a text, and return its output since."""

    def listen(text: str) -> str:
        output = ""

        def appeared() -> bool:
            nonlocal output
            output += capsys.readouterr().err
            return text in output

        assert until(appeared, 10), output
        return output

    return listen


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def call(port: int) -> Iterator[Call]:
    """Run the check of one machine in a thread."""
    with ThreadPoolExecutor() as threads:

        def check(
            rank: int, machines: int = 2, processes: int = 1, hosts: str | None = None, secret: str = ""
        ) -> Future[None]:
            report = MachineReport(
                machine_rank=rank, num_machines=machines, processes_here=processes, host=f"host{rank}"
            )
            return threads.submit(wait_for_all_machines, report, "127.0.0.1", port, hosts, secret=secret)

        yield check


def line_of(report: MachineReport) -> bytes:
    return json.dumps(asdict(report)).encode() + b"\n"


def send_line(port: int, line: bytes) -> socket.socket:
    """Connect to machine 0 and send a line."""
    deadline = time.monotonic() + 60
    while True:
        try:
            link = socket.create_connection(("127.0.0.1", port))
        except ConnectionError:  # nobody listens yet, or it was the check of the port
            assert time.monotonic() < deadline
            time.sleep(0.02)
            continue
        link.sendall(line)
        return link


def test_machines_that_agree_go_on_in_any_order(call: Call) -> None:
    calls = [call(rank, machines=3) for rank in (2, 0, 1)]
    assert [answered.result(60) for answered in calls] == [None] * 3


@pytest.mark.parametrize(
    ("other", "output"),
    [
        ({"rank": 0}, "two machines say they are machine 0: host0 and host0. Check --machine_rank."),
        ({"rank": 1}, "two machines say they are machine 1: host1 and host1."),
        ({"rank": 2, "machines": 4}, "machine 0 (host0) was started for 3 machines, machine 2 (host2) for 4."),
        ({"rank": 2, "processes": 8}, "machine 0 (host0) was started for 1 processes per machine, machine 2 (host2)"),
    ],
)
def test_a_disagreement_ends_all_machines(
    port: int, other: dict[str, int], output: str, call: Call, wait_for_output: WaitForOutput
) -> None:
    first, second = call(0, machines=3), call(1, machines=3)
    wait_for_output("present: 0 (host0), 1 (host1).")
    third = MachineReport(
        machine_rank=other["rank"],
        num_machines=other.get("machines", 3),
        processes_here=other.get("processes", 1),
        host=f"host{other['rank']}",
    )
    with send_line(port, line_of(third)) as link:
        assert output in link.recv(4096).decode()
    for answered in (first, second):
        with pytest.raises(LaunchError) as raised:
            answered.result(60)
        assert str(raised.value).startswith("The machines do not agree: ")
        assert output in str(raised.value)


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n\r\n", b'{"machine_rank": 1}\n', b"7\n", b"\xff\n", b""])
def test_connections_of_other_programs_are_closed(call: Call, port: int, line: bytes) -> None:
    first = call(0)
    link = send_line(port, line)
    second = call(1)
    assert first.result(60) is second.result(60) is None
    link.close()


GOOD = {"machine_rank": 1, "num_machines": 2, "processes_here": 1, "host": "evil"}
FORGED = {
    "an infinite rank": (json.dumps(GOOD | {"machine_rank": float("inf")}), "Infinity is no number"),
    "brackets": ("[" * 4000, "nested too deeply"),
    "digits": ('{"machine_rank": ' + "9" * 4000 + "}", "a number has 4000 digits"),
    "no rank": (json.dumps(GOOD | {"machine_rank": -1}), "machine -1 of 2"),
    "a rank beyond": (json.dumps(GOOD | {"machine_rank": 99}), "machine 99 of 2"),
    "a rank as text": (json.dumps(GOOD | {"machine_rank": "1"}), "machine_rank is a text, expected int"),
    "another field": (json.dumps(GOOD | {"go": True}), "unknown field 'go'"),
    "escapes": (json.dumps(GOOD | {"host": "\x1b]0;pwn\x07\x1b[2J"}), "the name of the host cannot be printed"),
    "a list": ("[1]", "expected an object, found a list"),
    "without end": ("x" * 9000, "it said more than a line"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_report_is_refused_by_name(what: str, call: Call, port: int, wait_for_output: WaitForOutput) -> None:
    line, reason = FORGED[what]
    first = call(0)
    with send_line(port, line.encode() + (b"" if what == "without end" else b"\n")) as link:
        with suppress(ConnectionResetError):
            assert link.recv(100) == b"", "it is closed"
        output = wait_for_output("Connections refused: 1, the last from ")
    assert reason in output
    assert output.isascii()
    assert "\x1b" not in output
    second = call(1)
    assert first.result(60) is second.result(60) is None


def test_strangers_delay_no_machine(call: Call, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SECONDS_PER_ATTEMPT", 60.0)
    monkeypatch.setattr(preflight, "MOST_SILENT_CONNECTIONS", 16)
    first = call(0)
    silent = [send_line(port, b"") for _ in range(200)]
    slow = send_line(port, b"{")
    began = time.monotonic()
    second = call(1)
    while not second.done():
        with suppress(OSError):
            slow.send(b"x")
        time.sleep(0.05)
    assert first.result(60) is second.result(60) is None
    assert time.monotonic() - began < limit(5)
    for link in (*silent, slow):
        link.close()


def test_a_stranger_that_says_a_byte_now_and_then_is_closed(
    call: Call, port: int, wait_for_output: WaitForOutput
) -> None:
    first = call(0)
    with send_line(port, b"{") as slow, suppress(OSError):
        while True:
            slow.sendall(b"x")
            time.sleep(0.05)
    wait_for_output("127.0.0.1: it said nothing that is a line")
    second = call(1)
    assert first.result(60) is second.result(60) is None


def test_machines_that_know_the_secret_go_on_and_a_stranger_cannot_end_them(
    call: Call, port: int, wait_for_output: WaitForOutput
) -> None:
    first = call(0, machines=3, secret="s3cret")
    second = call(1, machines=3, secret="s3cret")
    conflict = MachineReport(machine_rank=1, num_machines=4, processes_here=1, host="evil")
    with send_line(port, line_of(conflict)) as link:
        assert "Machine 0 was started with MESHWRIGHT_LAUNCH_SECRET" in link.recv(4096).decode()
    with send_line(port, line_of(replace(conflict, nonce="00"))) as link:
        assert '"challenge": "' in link.recv(4096).decode()
        link.sendall('{"proof": "é"}\n'.encode())
        assert link.recv(4096) == b""
    output = wait_for_output("Connections refused: 2")
    assert "machine 1 (evil) does not know the secret of MESHWRIGHT_LAUNCH_SECRET" in output
    third = call(2, machines=3, secret="s3cret")
    assert first.result(60) is second.result(60) is third.result(60) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "told", "named"),
    [
        ("a", "", "Machine 0 was started with MESHWRIGHT_LAUNCH_SECRET", "machine 1 (host1) was not started with"),
        (
            "",
            "b",
            "Machine 0 was started without MESHWRIGHT_LAUNCH_SECRET",
            "machine 1 (host1) was not started without",
        ),
        ("a", "b", "Machine 0 does not know the secret", "machine 1 (host1) left when the secret was requested"),
    ],
)
def test_a_machine_with_another_secret_is_told(
    ours: str, theirs: str, told: str, named: str, call: Call, wait_for_output: WaitForOutput, gives_up: None
) -> None:
    first = call(0, secret=ours)
    with pytest.raises(LaunchError, match=told):
        call(1, secret=theirs).result(60)
    assert named in wait_for_output("Connections refused: 1")
    with pytest.raises(LaunchError, match="The rendezvous failed"):
        first.result(60)


def test_a_machine_that_disconnected_is_missing_and_may_reconnect(
    call: Call, port: int, wait_for_output: WaitForOutput
) -> None:
    first = call(0, machines=3)
    send_line(port, line_of(MachineReport(machine_rank=1, num_machines=3, processes_here=1, host="gone"))).close()
    third = call(2, machines=3)
    wait_for_output("no connection from machine 1; present: 0 (host0), 2 (host2).")
    second = call(1, machines=3)
    assert first.result(60) is second.result(60) is third.result(60) is None


def test_a_missing_machine_is_named_as_the_batch_system_names_it(
    call: Call, wait_for_output: WaitForOutput, gives_up: None
) -> None:
    first = call(0, hosts="n[1-2]")
    wait_for_output("meshwright launch: after 0 s no connection from machine 1 (n2); present: 0 (host0).")
    with pytest.raises(LaunchError, match=r"The rendezvous failed: after 1 s no connection from machine 1 \(n2\)"):
        first.result(60)


def test_machine_0_with_a_foreign_address_is_reported(port: int, gives_up: None) -> None:
    own = MachineReport(machine_rank=0, num_machines=2, processes_here=1, host="host0")
    with pytest.raises(LaunchError, match=rf"Note that 192.0.2.7:{port} is not an address of this machine"):
        wait_for_all_machines(own, "192.0.2.7", port, None)


def test_a_machine_waits_for_machine_0_to_be_started(call: Call, port: int, wait_for_output: WaitForOutput) -> None:
    second = call(1)
    wait_for_output(
        f"127.0.0.1 answers, but nobody listens on port {port} yet (0 s): is the launch running on machine 0"
    )
    assert call(0).result(60) is second.result(60) is None


def test_nobody_listens(call: Call, port: int, gives_up: None) -> None:
    with pytest.raises(LaunchError, match=rf"Nobody listened on 127.0.0.1:{port} for 1 s."):
        call(1).result(60)


def test_a_run_that_has_begun_accepts_no_machine(
    call: Call, port: int, wait_for_output: WaitForOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SECONDS_TO_WAIT", 1.5)
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.1)
        second = call(1)
        while not second.done():
            with suppress(TimeoutError):
                server.accept()[0].close()
    wait_for_output("does not accept machine 1 (host1): the run there has begun without it")
    with pytest.raises(
        LaunchError, match=rf"The program at 127.0.0.1:{port} never accepted this machine \(1 \(host1\)\)"
    ):
        second.result()


def test_an_unknown_host_name() -> None:
    with pytest.raises(
        LaunchError, match=r"cannot reach nowhere.invalid:29500, .*: the name is unknown\. Check --main_p"
    ):
        check_reachable("nowhere.invalid", 29500)


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: object, **kwargs: object) -> socket.socket:
        time.sleep(0.1)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=rf"This machine \({socket.gethostname()}\) cannot reach 10.0.0.9:29500, .*: no an"
    ):
        check_reachable("10.0.0.9", 29500)
    assert time.monotonic() - began < limit(1)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_something_listens(port: int, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family):
        check_reachable(address, port)
        with pytest.raises(
            LaunchError, match=rf"Port {port} on this machine .* cannot be used: Address already in use"
        ):
            check_port(address, port)
    check_port(address, port)


def test_machines_connect_by_ipv6(port: int) -> None:
    reports = [MachineReport(machine_rank=rank, num_machines=2, processes_here=1, host="here") for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(wait_for_all_machines, report, "::1", port, None) for report in reports]
        assert [answered.result(60) for answered in calls] == [None, None]


def test_the_addresses_of_this_machine() -> None:
    assert network.is_local_address("127.0.0.1")
    assert network.is_local_address("localhost")
    assert network.is_local_address(socket.gethostname())
    assert not network.is_local_address("192.0.2.1")
    assert not network.is_local_address("nowhere.invalid")
    assert network.local_address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == "lo"
    assert network.local_address_towards("nowhere.invalid") is network.interface_towards("nowhere.invalid") is None


def test_a_name_that_appears_late_is_waited_for_in_pods_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts: list[str] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.append(address[0])
        if len(attempts) < 8:
            raise socket.gaierror(-2, "Name or service not known")
        return socket.socket()

    monkeypatch.setattr(preflight.socket, "create_connection", connect)
    monkeypatch.setattr(preflight, "SECONDS_UNTIL_UNREACHABLE", 0.1)
    monkeypatch.setattr(preflight, "SECONDS_BETWEEN_NOTICES", 0.3)
    with pytest.raises(LaunchError, match="cannot reach train-0:29500, the address of machine 0: the name is unknown"):
        preflight.check_reachable("train-0", 29500)
    preflight.check_reachable("train-0", 29500, comes_up_late=True)
    assert len(attempts) == 8
    assert "train-0:29500, the address of machine 0, cannot be reached yet" in capsys.readouterr().err
