"""One function per fault, on 4 processes each: `python faults.py FOLDER NAME...`.

torch is imported once; the processes of every world are forked from there and end as any script does. What rank r
printed is in `FOLDER/NAME.r`, with its exit code as the last line.

With FAULTS_ON_SIMULATED_ACCELERATORS=1 every rank has a device, whose collectives complete after Python has gone on.
"""

from __future__ import annotations

import ctypes
import os
import pdb
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer step imports it: once here instead of in every process
import torch.distributed as dist
from torch import nn

from meshwright import Accelerator, InitProcessGroupKwargs, PartialState
from meshwright.errors import StuckError

WORLD_SIZE = 4
WORLDS_AT_ONCE = 3
THRESHOLD = float(os.environ.get("MESHWRIGHT_HANG_SECONDS", "3"))
SECONDS_PER_WORLD = 300.0
ON_DEVICES = os.environ.get("FAULTS_ON_SIMULATED_ACCELERATORS") == "1"
WITH_BARRIERS_OF_THE_HOST = ("late_for_main_process_first", "busy_first_rank")
"""Faults whose barrier is gloo's also on devices, as in a process group that is not bound to one."""
OUTPUT = Path()
"""What this rank prints; beside it, with another suffix, what the other ranks of its world print."""


class Training:
    """The training in which the faults happen."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=not ON_DEVICES)
        self.rank = self.accelerator.process_index
        torch.manual_seed(0)
        self.model, self.optimizer = self.accelerator.prepare(*_model())
        self.accelerator.wait_for_everyone()
        self.begun = time.monotonic()

    def step(self) -> torch.Tensor:
        loss = self.model(self.ones(2, 4)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=self.accelerator.device)

    def bind_to_device(self) -> None:
        """Let barriers be the device's."""
        dist.distributed_c10d._get_default_group().bound_device_id = self.accelerator.device

    def finish(self) -> None:
        """Wait for the device, as any script does that reads its results."""
        if ON_DEVICES:
            torch.accelerator.synchronize()


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def gather_on_one_rank(training: Training) -> None:
    for _ in range(4):
        loss = training.step()
        if training.accelerator.is_main_process:
            training.accelerator.gather(loss)  # CULPRIT


def different_order(training: Training) -> None:
    ones = training.ones(3)
    if training.rank == 2:
        training.accelerator.gather(ones)  # CULPRIT
        training.accelerator.reduce(ones)
    else:
        training.accelerator.reduce(ones)  # WAITS
        training.accelerator.gather(ones)


def ragged_shapes(training: Training) -> None:
    training.accelerator.gather(training.ones(3 + (training.rank == 1)))  # CULPRIT WAITS


def early_break(training: Training) -> None:
    for index in range(4):
        if training.rank == 3 and index == 2:
            break
        training.step()
    training.accelerator.wait_for_everyone()  # CULPRIT


def unequal_loaders(training: Training) -> None:
    for _ in torch.utils.data.DataLoader(range(2 if training.rank == 3 else 4)):  # type: ignore[arg-type]
        loss = training.step()
    training.accelerator.gather(loss)  # CULPRIT


def swallowed_exception(training: Training) -> None:
    for index in range(4):
        try:
            if training.rank == 2 and index == 1:
                raise ValueError("bad sample")
            training.step()
        except ValueError:
            continue
    training.accelerator.wait_for_everyone()  # CULPRIT


def handled_exception(training: Training) -> None:
    try:
        if training.rank == 2:
            raise ValueError("bad sample")  # CULPRIT
        training.step()
    except ValueError:
        training.accelerator.wait_for_everyone()


def stopped(training: Training) -> None:
    if training.rank == 1:
        _stop_until(lambda: _printed("is stopped"))
    training.accelerator.wait_for_everyone()  # WAITS


def late_and_exited(training: Training) -> None:
    """Rank 1 arrives while the others collect reports, and has left before they judge: nothing is wrong."""
    if training.rank == 1:
        end = time.monotonic() + THRESHOLD + 1.2
        _stop_until(lambda: time.monotonic() > end)
    training.accelerator.wait_for_everyone()
    if training.rank != 1:
        time.sleep(THRESHOLD + 2)


def _stop_until(condition: Callable[[], bool]) -> None:
    stopped = os.getpid()
    if os.fork() == 0:
        while os.getppid() == stopped and not condition():  # it may be killed meanwhile
            time.sleep(0.1)
        if os.getppid() == stopped:
            os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(training: Training) -> None:
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    training.accelerator.wait_for_everyone()  # WAITS


def first_rank_killed(training: Training) -> None:
    if training.rank == 0:
        time.sleep(1.5)  # until the others know its process
        os.kill(os.getpid(), signal.SIGKILL)
    training.accelerator.wait_for_everyone()  # WAITS


def sys_exit(training: Training) -> None:
    if training.rank == 1:
        sys.exit(0)  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def last_call_on_one_rank(training: Training) -> None:
    if training.accelerator.is_main_process:
        _evaluate(training)


def _evaluate(training: Training) -> None:
    training.accelerator.gather(training.ones(2))  # WAITS CULPRIT


def first_rank_exits(training: Training) -> None:
    if training.rank == 0:
        sys.exit(0)  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def busy_first_rank(training: Training) -> None:
    if training.accelerator.is_main_process:
        looking = threading.Thread(target=_wait_for, args=["Rank 0 is busy"], daemon=True)
        looking.start()  # so that the main thread is always found at the line below
        while looking.is_alive():
            time.sleep(0.5)  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def lock_and_collective(training: Training) -> None:
    lock = threading.Lock()
    if training.rank == 1:
        lock.acquire()
        lock.acquire()  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def unused_parameters(training: Training) -> None:
    model = training.accelerator.prepare(nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}))
    model.module.forward = lambda x: model.module["a"](x) + (0 if training.rank == 1 else model.module["b"](x))
    for _ in range(2):
        loss = model(training.ones(2, 4)).sum()  # CULPRIT
        training.accelerator.backward(loss)  # WAITS


def debugged(training: Training) -> None:
    if training.rank == 1:
        reading, writing = os.pipe()
        threading.Thread(target=lambda: _wait_for("in a debugger") or os.write(writing, b"continue\n")).start()
        debugger = pdb.Pdb(stdin=os.fdopen(reading), stdout=sys.stdout, nosigint=True)
        debugger.use_rawinput = False
        debugger.set_trace()
    training.accelerator.wait_for_everyone()  # CULPRIT WAITS


def upload_in_a_thread(training: Training) -> None:
    """Rank 0 waits at a lock for a thread that waits for the network: it is busy, and nothing is wrong."""
    if training.accelerator.is_main_process:
        upload = threading.Thread(target=_wait_for, args=("is busy",))
        upload.start()
        upload.join()  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def download_in_native_code(training: Training) -> None:
    """Rank 0 waits for a thread that waits inside a library, for threads that Python does not know."""
    if training.accelerator.is_main_process:
        libc, semaphore = _semaphore_until("is busy")
        download = threading.Thread(target=libc.sem_wait, args=(semaphore,))
        download.start()
        download.join()  # CULPRIT
    training.accelerator.wait_for_everyone()  # WAITS


def _semaphore_until(notice: str) -> tuple[ctypes.CDLL, ctypes.Array[ctypes.c_char]]:
    """Return a semaphore that is free once the notice was printed."""
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    threading.Thread(target=lambda: _wait_for(notice) or libc.sem_post(semaphore)).start()
    return libc, semaphore


def compiling_in_forward(training: Training) -> None:
    """Rank 2 is in native code of its forward pass, and the others read a loss that depends on it."""

    def compile_once(*_: object) -> None:
        libc, semaphore = _semaphore_until("Rank 2 is busy")
        libc.sem_wait(semaphore)  # CULPRIT
        hook.remove()

    training.step()
    training.step()
    if training.rank == 2:
        hook = training.model.module.register_forward_pre_hook(compile_once)
    loss = training.step()
    loss.item()  # WAITS


def busy_between_steps(training: Training) -> None:
    """Rank 3 validates in Python, and the others have started all of their steps."""
    for index in range(4):
        training.step()
        while training.rank == 3 and index == 2 and not _printed("Rank 3 is busy"):
            time.sleep(0.5)  # CULPRIT
    training.ones(1).item()  # WAITS


def gather_beside_values(training: Training) -> None:
    """Rank 2 gathers, and the others read a loss."""
    for index in range(4):
        if training.rank == 2 and index == 2:
            training.accelerator.gather(training.ones(2))  # CULPRIT
        loss = training.step()
        loss.item()  # WAITS


def killed_beside_values(training: Training) -> None:
    """Rank 1 is dead, and the others read a loss."""
    for index in range(4):
        if training.rank == 1 and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = training.step()
        loss.item()  # WAITS


def failed_beside_values(training: Training) -> None:
    """Rank 1 fails, and the others read a loss."""
    for index in range(4):
        if training.rank == 1 and index == 2:
            raise ValueError("bad sample")  # CULPRIT
        loss = training.step()
        loss.item()  # WAITS


def different_calls_in_a_subgroup(training: Training) -> None:
    """Ranks 2 and 3 disagree, and ranks 0 and 1 wait for them."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][training.rank // 2]
    if training.rank == 3:
        dist.all_gather_into_tensor(training.ones(4), training.ones(2), group=group)  # CULPRIT
    dist.all_reduce(training.ones(2), group=group)
    training.accelerator.wait_for_everyone()


def late_for_main_process_first(training: Training) -> None:
    """Rank 0 has run its block and is ahead of those that wait at the store until rank 3 has arrived."""
    if training.rank == 3:
        while not _printed("is busy"):
            time.sleep(0.5)  # CULPRIT
    with training.accelerator.main_process_first():
        pass
    training.accelerator.wait_for_everyone()  # WAITS


def healthy(training: Training) -> None:
    """1,000 steps, or 60 on devices; a few of them are slow on one rank, by less than the threshold."""
    delays = random.Random(1)
    steps, share_of_slow_ones = (60, 0.05) if ON_DEVICES else (1_000, 0.01)
    for _ in range(steps):
        if delays.random() < share_of_slow_ones:
            seconds, rank = delays.uniform(0.1, 0.8) * THRESHOLD, delays.randrange(WORLD_SIZE)
            time.sleep(seconds * (rank == training.rank))
        training.step()
    training.accelerator.end_training()


def slow_main_process_first(training: Training) -> None:
    """Rank 0 goes first, for longer than the backend's timeout."""
    assert dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.seconds == 5
    with training.accelerator.main_process_first():
        if training.accelerator.is_main_process:
            time.sleep(12)
    print("continued after", round(time.monotonic() - training.begun))
    training.accelerator.wait_for_everyone()


def failing_main_process_first(training: Training) -> None:
    with training.accelerator.main_process_first():
        if training.accelerator.is_main_process:
            raise ValueError("no such file")


def first_rank_killed_in_main_process_first(training: Training) -> None:
    with training.accelerator.local_main_process_first():  # WAITS
        if training.accelerator.is_main_process:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_thread(training: Training) -> None:
    """The Accelerator belongs to another thread than the main one, and trains there, traced as in a debugger."""
    training.accelerator.end_training()
    PartialState._reset_state()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    threading.settrace(lambda *_: None)
    thread = threading.Thread(target=_train_in_a_thread)
    thread.start()
    thread.join()


def _train_in_a_thread() -> None:
    accelerator = Accelerator(cpu=not ON_DEVICES)
    try:
        if accelerator.process_index == 2:
            accelerator.gather(torch.ones(1, device=accelerator.device))  # CULPRIT
        accelerator.wait_for_everyone()
    except StuckError as error:
        print("raised in its thread:", error)


def _wait_for(notice: str) -> None:
    while not _printed(notice):
        time.sleep(0.1)


def _printed(notice: str) -> bool:
    """Return whether any rank of this world has printed the notice."""
    return any(notice in output.read_text() for output in OUTPUT.parent.glob(f"{OUTPUT.stem}.?"))


def group_closed_by_its_user(training: Training) -> None:
    dist.destroy_process_group()
    time.sleep(2 * THRESHOLD)


# --- the processes ----------------------------------------------------------------------------------------------------


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if ON_DEVICES:
        _add_devices()
    running: dict[int, tuple[str, int, float]] = {}
    while names or running:
        while names and len({name for name, _, _ in running.values()}) < WORLDS_AT_ONCE:
            name, ports = names.pop(0), (_free_port(), _free_port())
            for rank in range(WORLD_SIZE):
                process = os.fork()
                if process == 0:
                    _set_up_rank(rank, ports, folder / f"{name}.{rank}")
                    _run(globals()[name])
                    return
                running[process] = name, rank, time.monotonic()
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            name, rank, _ = running.pop(process)
            with (folder / f"{name}.{rank}").open("a") as output:
                output.write(f"\nexit code {os.waitstatus_to_exitcode(status)}")
        for late, (_, _, begun) in running.items():
            if time.monotonic() > begun + SECONDS_PER_WORLD:
                os.kill(late, signal.SIGKILL)
        time.sleep(0.05)


def _add_devices() -> None:
    """Make this process and those forked from it ones that have devices, before any uses torch.distributed."""
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.simulated_accelerator.build import extension
    from tests.simulated_accelerator.faults import let_failures_be_silent
    from tests.simulated_accelerator.registration import register

    register()
    let_failures_be_silent()
    extension().move_in_place(True)


def _set_up_rank(rank: int, ports: tuple[int, int], output: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "SECOND_PORT": str(ports[1]),
    }
    global OUTPUT
    OUTPUT = output
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(fault: Callable[[Training], None]) -> None:
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=5))] if fault is slow_main_process_first else []
    if handlers:
        Accelerator(cpu=True, kwargs_handlers=handlers)
    training = Training()
    if ON_DEVICES and fault.__name__ not in WITH_BARRIERS_OF_THE_HOST:
        training.bind_to_device()
    explain = sys.excepthook

    def explain_and_print_time(*error: object) -> None:
        explain(*error)  # type: ignore[arg-type]
        print(f"reported after {time.monotonic() - training.begun:.1f} s", flush=True)

    sys.excepthook = explain_and_print_time
    fault(training)
    training.finish()
    print("finished", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
