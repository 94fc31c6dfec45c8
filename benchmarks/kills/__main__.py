"""Kill the same ranks at the same steps under ours, torchft and torchelastic, and count what is lost.

    python -m benchmarks.kills                        all three; torchft is installed into `.benchmarks/` if it can be
    python -m benchmarks.kills ours torchelastic --steps 240 --kills 100:1

Every contender trains twice: without kills, and with them. Kills are at steps, or as soon after as all replicas train.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..venvs import REPOSITORY, VENVS, interpreters
from .counting import Run, row
from .task import REPLICAS

CONTENDERS = ("ours", "torchft", "torchelastic")
KILLS = ((100, 1), (200, 3), (300, 0), (400, 2), (500, 1))
"""The step, and the rank that is killed then."""
HEADER = (
    "| who | training stood still (without kills) | seconds lost of | samples lost | computed twice | "
    "parameters at the end, largest difference to the run without kills | between replicas |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
HEARTBEAT = "KILLS_HEARTBEAT_MS"
"""After how long torchft's lighthouse takes a silent group for lost; its default if unset."""
SECONDS_TO_END = 600


class Training:
    """One training: the launchers of a contender, and the folder of its logs."""

    def __init__(self, contender: str, python: Path, folder: Path, steps: int) -> None:
        self.folder = folder
        self._output = open(folder / "output.txt", "w")  # noqa: SIM115
        self._variables = os.environ | {
            "KILLS_FOLDER": str(folder),
            "KILLS_STEPS": str(steps),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._launchers: list[subprocess.Popen[bytes]] = []
        getattr(self, f"_start_{contender}")(python, Path(__file__).parent / f"train_{contender}.py")

    def _start(self, *command: object, **variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(map(str, command)),
            env=self._variables | variables,
            cwd=self.folder,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _start_ours(self, python: Path, script: Path) -> None:
        launch = ("-m", "meshwright", "launch", "--cpu", "--survive")
        self._launchers = [self._start(python, *launch, "--num_processes", REPLICAS, script)]

    def _start_torchelastic(self, python: Path, script: Path) -> None:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", 100)
        # With the shared store, processes that are started again find the gloo addresses of those before (torch 2.13).
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._launchers = [self._start(python, *torchrun, "--nproc-per-node", REPLICAS, script, **apart)]

    def _start_torchft(self, python: Path, script: Path) -> None:
        """Start the lighthouse, with the options of torchft's guide, and a torchrun per replica group."""
        with socket.create_server(("", 0)) as found:
            port = found.getsockname()[1]
        options = ("--min_replicas", 1, "--quorum_tick_ms", 100, "--join_timeout_ms", 10000)
        options += ("--heartbeat_timeout_ms", os.environ.get(HEARTBEAT, "5000"))
        lighthouse = python.parent / "torchft_lighthouse"
        self._helpers = [self._start(python, lighthouse, *options, "--bind", f"[::]:{port}")]
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", 100, "--nproc-per-node", 1)
        self._launchers = [
            self._start(
                python,
                *torchrun,
                script,
                REPLICA_GROUP_ID=str(replica),
                NUM_REPLICA_GROUPS=str(REPLICAS),
                TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
            )
            for replica in range(REPLICAS)
        ]

    def kill(self, kills: Sequence[tuple[int, int]]) -> None:
        """Kill ranks at steps, or as soon after as all replicas train."""
        for number, (step, replica) in enumerate(kills):
            while True:
                if all(launcher.poll() is not None for launcher in self._launchers):
                    print(f"training ended before kill {number + 1} of {len(kills)}", file=sys.stderr)
                    return
                run = Run.read(self.folder)
                pids = run.training()
                if run.newest_step >= step and len(pids) == REPLICAS and _kill(pids[replica]):
                    break
                time.sleep(0.05)

    def wait(self) -> None:
        """Wait for the end of training."""
        until = time.monotonic() + SECONDS_TO_END
        for launcher in self._launchers:
            if launcher.wait(max(1.0, until - time.monotonic())) != 0:
                raise RuntimeError(f"training failed: {(self.folder / 'output.txt').read_text()[-2000:]}")

    def end(self) -> None:
        """End what is still there."""
        for process in [*self._launchers, *self._helpers]:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in Run.read(self.folder).pids():
            _kill(pid)
        self._output.close()


def _kill(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def train(contender: str, python: Path, folder: Path, steps: int, kills: Sequence[tuple[int, int]]) -> Run:
    """Let a contender train, and kill some of its processes."""
    folder.mkdir(parents=True)
    training = Training(contender, python, folder, steps)
    try:
        training.kill(kills)
        training.wait()
    finally:
        training.end()
    return Run.read(folder)


def python_of(contender: str, venvs: Path) -> Path | None:
    """Return the interpreter of a contender; None if it cannot be installed."""
    if contender != "torchft":
        return Path(sys.executable)
    try:
        return interpreters([contender], venvs, base=Path(sys.executable))[contender]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{contender} is left out: {error}", file=sys.stderr)
        return None


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contenders", nargs="*", metavar="contender", help=f"any of {', '.join(CONTENDERS)}")
    parser.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--kills", nargs="*", metavar="STEP:RANK", help="default: one every 100 steps")
    parser.add_argument("--venvs", type=Path, default=VENVS, metavar="DIR", help="where torchft is installed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    chosen = [tuple(map(int, kill.split(":"))) for kill in options.kills] if options.kills else KILLS
    kills = [(step, rank) for step, rank in chosen if step < options.steps]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        rows = []
        for contender in options.contenders or CONTENDERS:
            python = python_of(contender, options.venvs)
            if python is None:
                continue
            print(f"{contender}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            healthy = train(contender, python, folder / contender / "healthy", options.steps, [])
            killed = train(contender, python, folder / contender / "killed", options.steps, kills)
            rows.append(row(contender, healthy, killed, options.steps))
            print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
