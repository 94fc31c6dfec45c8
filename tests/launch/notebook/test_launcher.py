"""Launching from Python: notebooks executed headless, scripts and debuggers, with real processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pexpect
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from meshwright import Accelerator, PartialState, debug_launcher, notebook_launcher
from meshwright.config.environment import read
from meshwright.errors import RuntimeConflictError, UnsupportedSettingError
from meshwright.launch.notebook import launcher as notebook
from meshwright.launch.notebook.failures import WorkerFailedError
from tests import warm
from tests.launching import run_script
from tests.ranks.pool import free_port
from tests.sizes import at_night
from tests.timing import limit

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread per process, and leave the process as it was: variables, signal handlers, children."""
    for name, value in _ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    before = process_facts()
    yield
    assert process_facts() == before


def process_facts() -> tuple[Any, ...]:
    of_others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # torch sets this one when it imports dynamo
    variables = {name: value for name, value in os.environ.items() if name not in of_others}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    return variables, handlers, sys.excepthook, multiprocessing.active_children()


# --- a notebook -------------------------------------------------------------------------------------------------------

CELLS = {
    "setup": """
        import torch
        from meshwright import notebook_launcher

        class Score:
            def __init__(self, value):
                self.value = value

        data = torch.arange(10.0)

        def total(scale):
            from meshwright import Accelerator
            accelerator = Accelerator()
            print("rank", accelerator.process_index, "of", accelerator.num_processes)
            with accelerator.split_between_processes(data) as mine:
                return Score(accelerator.reduce(mine.sum() * scale, "sum").item())
    """,
    "launch": "score = notebook_launcher(total, (2,), num_processes=2)",
    "result": "type(score) is Score, score.value",
    "again": "notebook_launcher(total, (3,), num_processes=2).value",
    "spawned": """
        score = notebook_launcher(total, (5,), num_processes=2, start_method="spawn")
        type(score) is Score, score.value
    """,
    "failing": """
        def lose():
            from meshwright import PartialState
            state = PartialState()
            if state.process_index == 1:
                raise LookupError("rank one lost its keys")
            state.wait_for_everyone()

        notebook_launcher(lose, num_processes=2)
    """,
    "nested": "notebook_launcher(lambda: notebook_launcher(total, (1,), num_processes=2), num_processes=2)",
    "captured": """
        from meshwright import Accelerator
        accelerator = Accelerator()
        notebook_launcher(total, (1,), num_processes=2)
    """,
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Execute a notebook, errors included, and return the outputs of its cells by name."""
    sources = [nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in CELLS.values()]
    book = nbformat.v4.new_notebook(cells=sources)
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3", allow_errors=True, resources=resources)
    client.execute(env={**os.environ, **_ENVIRONMENT})
    return {name: cell.outputs for name, cell in zip(CELLS, book.cells, strict=True)}


def shown(outputs: Any) -> str:
    return "".join(output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result")


def printed(outputs: Any) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def error_of(outputs: Any) -> tuple[str, str, str]:
    (error,) = (output for output in outputs if output["output_type"] == "error")
    return error["ename"], error["evalue"], re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))


def test_a_notebook_gets_the_result_of_two_processes(cells: dict[str, Any]) -> None:
    assert shown(cells["result"]) == "(True, 90.0)", "the notebook's own class comes back as itself"
    assert shown(cells["again"]) == "135.0", "and launching again is no problem"


def test_a_notebook_shows_the_lines_of_its_workers_whole(cells: dict[str, Any]) -> None:
    lines = printed(cells["launch"]).splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_notebook_can_spawn(cells: dict[str, Any]) -> None:
    assert shown(cells["spawned"]) == "(True, 225.0)"


def test_a_notebook_shows_who_failed_and_where(cells: dict[str, Any]) -> None:
    name, message, traceback = error_of(cells["failing"])
    assert name == "WorkerFailedError"
    assert message.startswith("Rank 1 failed with LookupError: rank one lost its keys")
    assert 'raise LookupError("rank one lost its keys")' in traceback, "the line of the cell"
    assert "in lose" in traceback
    assert "ChildFailedError" not in traceback, "torch's box names the victim as often as the culprit"
    assert "Traceback" not in printed(cells["failing"]), "torch's log says nothing that the error does not"


def test_a_notebook_is_told_why_nesting_is_refused(cells: dict[str, Any]) -> None:
    name, message, _ = error_of(cells["nested"])
    assert name == "WorkerFailedError"
    assert "notebook_launcher() was called in rank 0 of 2 processes" in message or "in rank 1 of 2" in message
    assert "Call the function itself here" in message


def test_a_notebook_is_told_that_its_accelerator_would_be_captured(cells: dict[str, Any]) -> None:
    name, message, _ = error_of(cells["captured"])
    assert name == "RuntimeConflictError"
    assert "An Accelerator or a PartialState exists in this process" in message
    assert "inside your training function" in message


# --- what the workers are ---------------------------------------------------------------------------------------------


def describe(*args: Any) -> dict[str, Any]:
    accelerator = Accelerator()
    return {
        "args": args,
        "world": accelerator.num_processes,
        "device": str(accelerator.device),
        "precision": accelerator.mixed_precision,
        "forked": accelerator.state.fork_launched,
        "threads": torch.get_num_threads(),
        "sum": accelerator.reduce(torch.tensor(accelerator.process_index + 1), "sum"),
        "pid": os.getpid(),
    }


@pytest.mark.parametrize("start_method", ["fork", at_night("spawn")])
def test_workers_form_a_group_on_the_cpu(start_method: str) -> None:
    found = notebook_launcher(describe, ("a", 1), num_processes=2, mixed_precision="bf16", start_method=start_method)
    assert found.pop("pid") != os.getpid()
    assert found.pop("sum") == 3
    assert found == {
        "args": ("a", 1),
        "world": 2,
        "device": "cpu",
        "precision": "bf16",
        "forked": start_method == "fork",
        "threads": 1,
    }
    assert PartialState._shared_state == {}


def test_one_process_is_this_one() -> None:
    found = notebook_launcher(describe, num_processes=1, mixed_precision="bf16")
    assert (found["pid"], found["world"], found["precision"]) == (os.getpid(), 1, "bf16")
    assert PartialState._shared_state == {}, "so that two processes can be launched next"
    assert notebook_launcher(describe)["pid"] == os.getpid(), "no accelerator: one process"


def test_one_process_may_use_the_accelerator_that_exists() -> None:
    accelerator = Accelerator()
    assert notebook_launcher(lambda: accelerator.num_processes, num_processes=1) == 1
    assert PartialState._shared_state != {}, "what was there before stays"


def test_the_variables_are_put_back_after_an_error() -> None:
    def lose() -> None:
        assert read("ACCELERATE_MIXED_PRECISION") == "fp16"
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        notebook_launcher(lose, num_processes=1, mixed_precision="fp16")
    with pytest.raises(WorkerFailedError, match="LookupError: lost"):
        notebook_launcher(lose, num_processes=2, mixed_precision="fp16")


def test_a_taken_port_is_no_reason_to_fail() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert notebook_launcher(describe, num_processes=2, use_port=str(port))["world"] == 2


def collect_and_describe() -> int:
    gc.collect()
    return Accelerator().num_processes


@pytest.mark.nightly  # tests/runtime/group/test_leaving.py has the same for data workers
def test_workers_do_not_collect_the_parents_garbage() -> None:
    """The store of a failed launch waits, when it is destroyed, for a thread that only the parent has."""
    gc.disable()
    try:
        with pytest.raises(WorkerFailedError):
            notebook_launcher(fail_on, (1, "raise"), num_processes=2)
        assert notebook_launcher(collect_and_describe, num_processes=2) == 2
        assert debug_launcher(collect_and_describe, debug_rank=1) == 2
    finally:
        gc.enable()


def test_the_published_port_means_a_free_one() -> None:
    assert notebook._port("29500", num_nodes=1) == 0
    assert notebook._port("29500", num_nodes=2) == 29500
    port = free_port()
    assert notebook._port(port, num_nodes=1) == port


def test_several_hosts_meet_at_the_port_they_were_given(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from meshwright import Accelerator
            from meshwright import notebook_launcher

            def ranks():
                import torch
                accelerator = Accelerator()
                return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()

            node, port = sys.argv[1:]
            print("result", notebook_launcher(ranks, num_processes=1, num_nodes=2, node_rank=int(node), use_port=port))
        """)
    )
    port = str(free_port())
    nodes = [
        warm.Popen([sys.executable, str(script), node, port], stdout=subprocess.PIPE, text=True) for node in ("0", "1")
    ]
    answers = [node.communicate(timeout=300)[0].strip() for node in nodes]
    assert answers == ["result [0, 1]", "result None"]


def test_lines_can_be_marked_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(lambda: print("hello"), num_processes=2, log_line_prefix_template="[${rank}/${local_rank}] ")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0/0] hello", "[1/1] hello"]


def test_forked_workers_compute_although_the_parent_has_used_all_its_threads(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(
        textwrap.dedent("""
            import torch
            from meshwright import notebook_launcher

            def compute():
                weights = torch.ones(600, 600, requires_grad=True)
                loss = (weights @ weights).sum() / 600**3
                loss.backward()
                return loss.item(), torch.get_num_threads()

            torch.set_num_threads(4)
            parent = compute()
            torch.ones(4_000_000).add_(1).sum()
            print(parent, notebook_launcher(compute, num_processes=2, start_method="fork"))
        """)
    )
    printed = run_script(script, world_size=1, directory=tmp_path)
    assert printed.strip() == "(1.0, 4) (1.0, 1)"


# --- how launches end -------------------------------------------------------------------------------------------------


def fail_on(rank: int, how: str) -> str:
    state = PartialState()
    if state.process_index == rank:
        if how == "raise":
            raise ValueError("a wrong number")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        os._exit(5)
    state.wait_for_everyone()
    return "all is well"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "ValueError: a wrong number"),
        ("kill", "SIGKILL, as when memory runs out"),
        at_night("exit", "SystemExit: 3"),
        ("_exit", "exit code 5 and no exception"),
    ],
)
def test_the_error_names_the_rank_that_failed_first(how: str, reason: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        notebook_launcher(fail_on, (1, how), num_processes=2)
    assert isinstance(caught.value, ChildFailedError)
    assert caught.value.get_first_failure()[1].exitcode != 0
    assert (caught.value.rank, caught.value.reason) == (1, reason), "and not the rank that lost it"
    if how in ("raise", "exit"):
        assert f"in {fail_on.__name__}" in caught.value.details
        assert caught.value.details.count("File ") == 1, "the launcher's own frames are left out"
    chained = caught.value.__cause__ or caught.value.__context__
    assert type(chained).__name__ == "ChildFailedError"


def die_while_another_waits() -> None:
    state = PartialState()
    if state.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    state.wait_for_everyone()


def test_the_error_names_the_rank_that_was_killed_also_if_torch_looks_after_another_has_lost_it() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        notebook_launcher(die_while_another_waits, num_processes=2, monitor_interval=4)
    assert list(caught.value.failures) == [0], "torch looks at one of them"
    assert (caught.value.rank, caught.value.reason) == (1, "SIGKILL, as when memory runs out")


def leave_before_the_others() -> None:
    """Call backward once more on rank 0, while rank 1 has returned."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for _ in range(3 - accelerator.process_index):
        accelerator.backward(model(torch.ones(2, 2)).sum())


def gather_on_one_rank() -> None:
    accelerator = Accelerator()
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (leave_before_the_others, "Rank 1 has left: its script has ended, and rank 0 waits for it in backward()"),
        at_night(gather_on_one_rank, "gather() was called on rank 0 only"),
    ],
)
def test_the_error_begins_with_what_the_watcher_knows(
    function: Callable[[], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MESHWRIGHT_HANG_SECONDS", "2")
        with pytest.raises(WorkerFailedError) as caught:
            notebook_launcher(function, num_processes=2)
    assert str(caught.value).startswith(told)
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.startswith(told)
    assert f"in {function.__name__}" in caught.value.details


def test_the_debugged_rank_is_told_why_it_lost_its_peer() -> None:
    with pytest.raises(RuntimeError) as caught:
        debug_launcher(leave_before_the_others, debug_rank=0)
    [note] = caught.value.__notes__
    assert note.startswith("Rank 0: Rank 1 has left: its script has ended")


def wait_where_python_sees_no_signals() -> None:
    if PartialState().process_index == 1:
        time.sleep(0.5)
        raise ValueError("a wrong number")
    dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60)).get("what nobody sets")


def test_a_worker_that_waits_in_c_plus_plus_is_ended_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match="Rank 1 failed with ValueError"):
        notebook_launcher(wait_where_python_sees_no_signals, num_processes=2)
    assert time.monotonic() - start < limit(15)


def die_alone(number: signal.Signals) -> None:
    if PartialState().process_index == 1:
        os.kill(os.getpid(), number)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "SIGKILL, as when memory runs out"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_worker_that_is_killed_is_named(number: signal.Signals, reason: str) -> None:
    with pytest.raises(WorkerFailedError, match=f"Rank 1 failed with {reason}") as caught:
        notebook_launcher(die_alone, (number,), num_processes=2)
    assert caught.value.rank == 1


def test_leaving_with_sys_exit_is_no_failure() -> None:
    assert notebook_launcher(sys.exit, num_processes=2) is None


def test_a_result_that_cannot_travel_says_so() -> None:
    with pytest.raises(WorkerFailedError, match=r"Rank 0 .*of type function, cannot be sent back"):
        notebook_launcher(lambda: lambda: 1, num_processes=2)


def fail_at_first(marks: Path) -> int:
    state = PartialState()
    mark = marks / f"{state.process_index}"
    started_before = mark.exists()
    mark.touch()
    state.wait_for_everyone()
    if not started_before:
        raise ConnectionError("the first attempt always fails")
    return state.num_processes


def test_workers_are_restarted_as_often_as_asked(tmp_path: Path) -> None:
    assert notebook_launcher(fail_at_first, (tmp_path,), num_processes=2, max_restarts=1) == 2


@pytest.mark.parametrize("stubborn", [False, True])
def test_ctrl_c_ends_the_workers(stubborn: bool, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, time
            from meshwright import PartialState
            from meshwright import notebook_launcher

            def endless():
                state = PartialState()
                print("worker", os.getpid(), flush=True)
                if state.process_index == 0 and not {stubborn}:
                    state.wait_for_everyone()  # inside a collective, where Python sees no signals
                try:
                    time.sleep(600)
                except KeyboardInterrupt:
                    print("saving", flush=True)
                    time.sleep(600 * {stubborn})

            try:
                notebook_launcher(endless, num_processes=2)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """)
    )
    process = warm.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    time.sleep(0.5)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "saving", "a worker may save something"
    if stubborn:
        assert process.stdout.readline().strip() == "saving"
        process.send_signal(signal.SIGINT)  # and is not asked a second time
    assert process.communicate(timeout=limit(25))[0].strip() == "interrupted"
    assert time.monotonic() - start < limit(10)
    assert process.returncode == 0
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_a_launched_process_launches_nothing(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeConflictError, match="rank 1 of 2 processes that torchrun has started"):
            launcher(describe, num_processes=2)


def test_a_kernel_that_slurm_started_alone_may_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    with monkeypatch.context() as patch:
        for name, value in alone.items():
            patch.setenv(name, value)
        assert notebook_launcher(describe, num_processes=2)["world"] == 2


def test_an_open_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(RuntimeConflictError, match="A process group is open in this process"):
            notebook_launcher(describe, num_processes=2)


def test_arguments_are_checked_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="mixed_precision mode: fp7"):
        notebook_launcher(describe, num_processes=2, mixed_precision="fp7")
    with pytest.raises(TypeError, match=r"args as a tuple, such as args=\(5,\)"):
        notebook_launcher(describe, 5, num_processes=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 or more, not 0"):
        notebook_launcher(describe, num_processes=0)
    with pytest.raises(ValueError, match="start_method='thread' is unknown"):
        notebook_launcher(describe, num_processes=2, start_method="thread")
    with pytest.raises(ValueError, match="debug_rank=2 is none of the ranks 0 to 1"):
        debug_launcher(describe, debug_rank=2)


def test_an_accelerator_in_use_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = False
    monkeypatch.setattr("meshwright.runtime.devices.device.accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    assert notebook._start_method(None, notebook._accelerator_in_use()) == "fork"
    in_use = True
    assert notebook._start_method(None, notebook._accelerator_in_use()) == "spawn"
    with pytest.raises(RuntimeConflictError, match=r"cuda is in use in this process.*Restart the kernel"):
        notebook_launcher(describe, num_processes=2, start_method="fork")


def test_spawning_without_cloudpickle_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedSettingError, match="pip install cloudpickle"):
        notebook_launcher(describe, num_processes=2, start_method="spawn")
    assert notebook_launcher(describe, num_processes=2)["world"] == 2, "forking needs nothing"


# --- debug_launcher ---------------------------------------------------------------------------------------------------


def test_the_debug_launcher_stays_on_the_cpu() -> None:
    assert debug_launcher(lambda: (read("ACCELERATE_USE_CPU"), Accelerator().num_processes), num_processes=3) == (
        "True",
        3,
    )
    assert debug_launcher(describe, num_processes=1)["pid"] == os.getpid()


def stop_and_sum() -> tuple[int, int, list[int]]:
    accelerator = Accelerator()
    mine = torch.tensor([accelerator.process_index * 10])
    breakpoint()
    return accelerator.process_index, os.getpid(), accelerator.gather(mine).tolist()


@pytest.mark.parametrize("debug_rank", [0, 1, 2])
def test_one_rank_stops_at_breakpoints_while_the_others_wait(debug_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = []

    def stop() -> None:
        time.sleep(0.3)  # the others are in `gather` by now
        caller = sys._getframe(1)
        caller.f_locals["mine"].add_(1)  # as one would at the prompt
        stops.append((os.getpid(), PartialState().process_index))

    monkeypatch.setattr(sys, "breakpointhook", stop)
    rank, pid, gathered = debug_launcher(stop_and_sum, num_processes=3, debug_rank=debug_rank)
    assert stops == [(os.getpid(), debug_rank)]
    assert rank == 0, "rank 0's result, whoever was debugged"
    assert (pid == os.getpid()) == (debug_rank == 0)
    assert gathered == [10 * rank + (rank == debug_rank) for rank in range(3)]
    assert PartialState._shared_state == {}
    assert not dist.is_initialized()


def timeout_of_the_group() -> float:
    Accelerator()
    group: Any = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_the_others_wait_for_a_day() -> None:
    assert debug_launcher(timeout_of_the_group, debug_rank=1) == 24 * 60 * 60


def test_the_debugged_ranks_own_error_comes_as_it_is() -> None:
    with pytest.raises(ValueError, match="a wrong number") as caught:
        debug_launcher(fail_on, (1, "raise"), debug_rank=1)
    assert caught.value.__cause__ is None
    assert PartialState._shared_state == {}


def test_a_failing_peer_is_the_cause_of_what_the_debugged_rank_sees() -> None:
    with pytest.raises(RuntimeError) as caught:
        debug_launcher(fail_on, (1, "raise"), debug_rank=0)
    assert isinstance(caught.value.__cause__, WorkerFailedError)
    assert caught.value.__cause__.rank == 1
    assert caught.value.__cause__.reason == "ValueError: a wrong number"


def fail_late() -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 1:
        raise ValueError("at the very end")


def test_a_peer_that_fails_after_the_debugged_rank_has_ended_is_reported() -> None:
    with pytest.raises(WorkerFailedError, match="Rank 1 failed with ValueError: at the very end"):
        debug_launcher(fail_late, debug_rank=0)


DEBUGGED = """
    from meshwright import Accelerator
    from meshwright import debug_launcher

    def train(factor):
        import torch
        accelerator = Accelerator()
        mine = torch.tensor([float(accelerator.process_index)])
        {stop}
        total = accelerator.reduce(mine * factor, "sum")
        return total.item()

    print("trained", debug_launcher(train, (2,), debug_rank=1))
"""


@pytest.mark.parametrize("debugger", ["breakpoint()", at_night("python -m pdb")])
def test_a_real_debugger_steps_through_one_rank(debugger: str, tmp_path: Path) -> None:
    script = tmp_path / "debugged.py"
    in_script = debugger == "breakpoint()"
    script.write_text(textwrap.dedent(DEBUGGED).format(stop="breakpoint()" if in_script else "pass"))
    arguments = [str(script)] if in_script else ["-m", "pdb", str(script)]
    session = pexpect.spawn(sys.executable, arguments, timeout=limit(40), encoding="utf-8", echo=False)
    prompt = re.escape("(Pdb) ")

    def say(command: str) -> str:
        session.expect(prompt)
        session.sendline(command)
        return session.before or ""

    try:
        if not in_script:
            for command in ("break train", "continue", "next", "next", "next", "next"):
                say(command)
        say("mine += 41")
        session.expect(prompt)
        time.sleep(1)  # rank 0 waits in `reduce`
        session.sendintr()  # Ctrl-C at the prompt is not meant for it
        session.expect("KeyboardInterrupt")
        say("p accelerator.process_index, accelerator.num_processes")
        assert "(1, 2)" in say("next")
        say("p total")
        assert "tensor([84.])" in say("continue")
        session.expect(r"trained 84\.0")
    finally:
        session.close(force=True)
