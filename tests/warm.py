"""Start Python programs from a process that has imported torch already: in milliseconds instead of seconds.

A *zygote* is a Python process that has imported what most programs import and waits. Asked to run a program, it
forks; the child takes over the arguments, the environment, the folder and the file descriptors of the request and
runs the program as `python` would. It is a child of the process that asked, so that waiting, signals and process
groups are what they are without a zygote. A program that starts others, `meshwright launch` or torchrun, gets a
zygote of its own, and its ranks are started the same way; where it replaces itself by one (exec), it runs that one.

`Popen` and `run` are used like those of `subprocess`. What a zygote cannot stand for is started as usual: other
programs than Python scripts and modules, and interpreters with options. Tests of the start itself use `subprocess`.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.data",
    "safetensors.torch",
    "psutil",
    "pytest",
    "tabulate",
    "accelerate",
    "meshwright.accelerator",
    "meshwright.checkpoint.checkpointer",
    "meshwright",
    "meshwright.commands.launch",
    "meshwright.launch.processes.supervise",
    "meshwright.parallel.pipeline.strategy",
    "meshwright.watch.hangs.watcher",
    "transformers.trainer",
)
COLD = "MESHWRIGHT_TEST_COLD_STARTS"
"""Set it to start everything as usual."""

LAUNCHING_MODULES = ("meshwright", "torch.distributed.run")
LAUNCHERS = ("meshwright", "accelerate", "torchrun", "trl")
MOST_ZYGOTES = 5

_CHECKOUT = str(Path(__file__).parents[1])
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "MKL_", "TORCH_", "KMP_", "ATEN_")
_NOT_READ_AT_START = ("PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


class Program(NamedTuple):
    """A Python program: its arguments, the first of which is its name, and whether that is a module's."""

    interpreter: str
    is_module: bool
    words: list[str]
    machine: int = 0
    """The process whose namespaces it is to enter, as `nsenter` says it."""

    @classmethod
    def of(cls, command: Sequence[str]) -> Program | None:
        """Return the program that a command starts; None if it is another one, or needs an interpreter of its own."""
        words = [os.fspath(word) for word in command]
        if Path(words[0]).name == "nsenter":
            options = [word for word in words if word.startswith(("--target=", "--wdns="))]
            inner = cls.of(words[1 + words.index(options[-1]) :])
            return inner and inner._replace(machine=int(options[0].removeprefix("--target=")))
        if Path(words[0]).name in LAUNCHERS:
            return cls(str(Path(words[0]).with_name("python")), False, words)
        if not Path(words[0]).name.startswith("python"):
            return None
        interpreter, *words = words
        words = words[1:] if words[:1] == ["-u"] else words
        if words[:1] == ["-m"]:
            return cls(interpreter, True, words[1:])
        return None if not words or words[0].startswith("-") else cls(interpreter, False, words)

    def starts_programs(self) -> bool:
        """Tell whether it is a launcher."""
        if self.is_module:
            return self.words[0] in LAUNCHING_MODULES or self.words[0].startswith("meshwright.commands.")
        return Path(self.words[0]).name in LAUNCHERS


class Zygote:
    """The side of the process that asks."""

    def __init__(self, link: socket.socket) -> None:
        self.connection = Connection(link.detach())

    @classmethod
    def start(cls, interpreter: str, environment: Mapping[str, str]) -> Zygote:
        """Start a zygote as a process of its own."""
        ours, theirs = socket.socketpair()
        unmeasured = {name: value for name, value in environment.items() if not name.startswith("COVERAGE_PROCESS")}
        subprocess.Popen(
            [interpreter, __file__, str(theirs.fileno())],
            env=unmeasured,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        return cls(ours)

    def run(self, program: Program, descriptors: Mapping[int, int], **request: Any) -> int:
        """Start a program and return its process id; it is a child of this process."""
        _set_subreaper(True)
        try:
            self.connection.send({"program": tuple(program), "descriptors": list(descriptors), **request})
            with socket.socket(fileno=os.dup(self.connection.fileno())) as link:
                socket.send_fds(link, [b"+"], list(descriptors.values()))
            pid: int = self.connection.recv()
            return pid
        finally:
            _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(on), 0, 0, 0)


_zygotes: dict[Any, Zygote] = {}
_may_start_zygotes = True
_base_path: list[str] = []
_subprocess_popen = subprocess.Popen
_os_execvpe = os.execvpe


def _key(interpreter: str, environment: Mapping[str, str]) -> Any:
    """Return what a zygote is made for: an interpreter, and what it reads from the environment when it starts."""
    return interpreter, frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _NOT_READ_AT_START
        if name != "PYTHONPATH" or not _has_only_tests(value)
    )


def _has_only_tests(path: str) -> bool:
    """Return whether a PYTHONPATH has nothing that a zygote imports before it knows its program."""
    return all(folder == _CHECKOUT or folder.startswith(f"{_CHECKOUT}/tests/") for folder in path.split(os.pathsep))


def _zygote_for(program: Program, environment: Mapping[str, str]) -> Zygote | None:
    """Return the zygote for a program, started when it is first needed."""
    if sys.platform != "linux" or environment.get(COLD):
        return None
    key = _key(program.interpreter, environment)
    if key not in _zygotes and _may_start_zygotes:
        if len(_zygotes) >= MOST_ZYGOTES:
            _zygotes.pop(next(iter(_zygotes))).connection.close()
        _zygotes[key] = Zygote.start(program.interpreter, environment)
    if key in _zygotes:
        _zygotes[key] = _zygotes.pop(key)  # the one that was used last is given up last
    return _zygotes.get(key)


class Popen(_subprocess_popen):  # type: ignore[type-arg,misc,valid-type]
    """A `subprocess.Popen` whose Python programs start from a zygote."""

    def __init__(self, args: Any, **options: Any) -> None:
        self._options = options
        super().__init__(args, **options)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
    ) -> None:  # fmt: skip
        pipes = rest[
            :6
        ]  # the child's end and ours of the input, then ours and the child's of the output and the errors
        plain = not shell and preexec_fn is None and executable is None and not isinstance(args, (str, bytes))
        if not plain or not self._start_warm(list(args), os.environ if env is None else env, cwd, pass_fds, pipes):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                                   creationflags, shell, *rest)  # fmt: skip

    def _start_warm(self, args: list[str], env: Mapping[str, str], cwd: Any, pass_fds: Any, pipes: Any) -> bool:
        program = Program.of([shutil.which(args[0], path=env.get("PATH")) or args[0], *args[1:]])
        zygote = None if program is None else _zygote_for(program, env)
        if program is None or zygote is None:
            return False
        given = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
        descriptors = {number: number if source == -1 else source for number, source in given.items()}
        try:
            self.pid = zygote.run(
                program,
                descriptors | {number: number for number in pass_fds},
                environment=dict(env),
                unbuffered="-u" in args[1:2] or bool(env.get("PYTHONUNBUFFERED")),
                directory=os.fspath(cwd or os.getcwd()),
                new_session=bool(self._options.get("start_new_session")),
            )
        except (OSError, EOFError):  # it was ended together with others
            _zygotes.pop(_key(program.interpreter, env), None)
            return False
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return True


def run(
    command: Sequence[Any], *, input: Any = None, timeout: float | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command like `subprocess.run`."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            printed, complaints = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(process.args, process.returncode, printed, complaints)
    if check:
        ended.check_returncode()
    return ended


# --- the zygote's side -------------------------------------------------------------------------------------------


def main() -> None:
    """Import what programs need, and become every program that is asked for."""
    global _may_start_zygotes
    _may_start_zygotes = False
    del sys.path[0]  # this folder, whose modules must not stand for others of the same name
    _remember_path()
    preload(PRELOADED)
    gc.freeze()  # what all children share is not looked at, and so not copied, by their collections
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch unregisters operators, which takes a child 0.1 s
    be_programs(Connection(int(sys.argv[1])))


def preload(names: Sequence[str]) -> None:
    """Import what programs need, as far as it is installed."""
    with without_mlflow():
        for name in names:
            with suppress(ImportError):
                import_module(name)


def _remember_path() -> None:
    global _base_path
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _base_path = _base_path or [folder for folder in sys.path if folder not in given]


def be_programs(connection: Connection) -> NoReturn:
    """Run every program that is asked for, in a child of its own."""
    program = serve(connection)
    if program.starts_programs():
        fork_zygote()
        start_programs_warm()
    run_program(program)
    raise AssertionError("a program that has ended goes on")


def fork_zygote() -> None:
    """Fork a zygote from this process, which starts programs from it."""
    global _may_start_zygotes
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _zygotes[_key(sys.executable, os.environ)] = Zygote(ours)
        return
    _may_start_zygotes = False
    _remember_path()
    _zygotes.clear()
    ours.close()
    be_programs(Connection(theirs.detach()))


@contextmanager
def without_mlflow() -> Iterator[None]:
    """Let DeepSpeed be imported without MLflow, which its autotuner imports where it is installed: 2 of 3 seconds."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def serve(connection: Connection) -> Program:
    """Return in every child, with what it has become; end when nobody can ask any more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "r+b") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    while True:
        try:
            request: dict[str, Any] = connection.recv()
            received = _receive_descriptors(connection, len(request["descriptors"]))
        except (OSError, EOFError):
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)  # its child becomes a child of the process that asks
            while os.getppid() == middle:
                time.sleep(0.0005)
            connection.send(os.getpid())
            connection.close()
            become(request, received)
            return Program(*request["program"])
        os.waitpid(middle, 0)
        for descriptor in received:
            os.close(descriptor)


def _receive_descriptors(connection: Connection, count: int) -> list[int]:
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        _, received, _, _ = socket.recv_fds(link, 1, count)
    return received


def become(request: dict[str, Any], received: list[int]) -> None:
    """Take over what a new process would be given."""
    if request["new_session"]:
        os.setsid()
    above = 1 + max(request["descriptors"])
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
    for number, descriptor in zip(request["descriptors"], moved, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in request["descriptors"]:
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    enter(Program(*request["program"]).machine)
    os.chdir(request["directory"])
    take_environment(request["environment"])
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = _standard_streams(
        request["unbuffered"]
    )


def take_environment(environment: Mapping[str, str]) -> None:
    """Have the variables, signal handlers and random numbers of a new process."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is of TMPDIR, and was read before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for seed in (import_module("torch").default_generator.seed, import_module("numpy").random.seed):
        seed()


def enter(machine: int) -> None:
    """Enter the namespaces of a process."""
    folders = [f"/proc/{machine}/ns/{kind}" for kind in ("net", "uts", "mnt")] if machine else []
    descriptors = [os.open(folder, os.O_RDONLY) for folder in folders]
    for descriptor in descriptors:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _standard_streams(unbuffered: bool) -> tuple[TextIO, TextIO, TextIO]:
    streams = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", closefd=False, errors="backslashreplace"),
    )
    for stream in streams[1:]:
        stream.reconfigure(line_buffering=stream is streams[2] or stream.isatty(), write_through=unbuffered)
    return streams


def subprocess_handler() -> Any:
    """Return torchelastic's module that starts processes."""
    return import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")


def start_programs_warm() -> None:
    """Let this process start Python programs from its zygote."""
    subprocess.Popen = subprocess_handler().Popen = Popen  # type: ignore[misc]
    os.execvpe = execvpe


def execvpe(file: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as another program, like `os.execvpe`; this process has imported what it needs."""
    program = Program.of(words)
    if program is None or environment.get(COLD) or _key(program.interpreter, environment) not in _zygotes:
        _os_execvpe(file, words, environment)
    for zygote in _zygotes.values():
        zygote.connection.close()
    _zygotes.clear()
    subprocess.Popen = subprocess_handler().Popen = _subprocess_popen  # type: ignore[misc]
    os.execvpe = _os_execvpe
    take_environment(environment)
    run_program(program)
    raise AssertionError("a program that has ended goes on")


def run_program(program: Program) -> None:
    """Run a program as `python` would."""
    if any(name.startswith("COVERAGE_PROCESS") for name in os.environ):
        with suppress(ImportError):  # another interpreter's packages are not measured
            import_module("coverage").process_startup()
    sys.modules["zygote"] = sys.modules["__main__"]  # its functions are still needed
    sys.argv = words = program.words
    given = os.environ.get("PYTHONPATH", "")
    beside = os.getcwd() if program.is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path[:] = [beside, *(given.split(os.pathsep) if given else []), *_base_path]
    leave(ended(lambda: run_module(words[0]) if program.is_module else run_file(words[0])))


def run_module(name: str) -> None:
    """Run a module as `python -m` would."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_file(path: str) -> None:
    """Run a script as `python` would."""
    path = os.path.abspath(path)
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = program
    exec(compile(Path(path).read_bytes(), path, "exec"), program.__dict__)


def ended(program: Callable[[], None]) -> int:
    """Run a program and return its exit code."""
    try:
        program()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_value = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(code: int) -> None:
    """End as an interpreter does, but for taking every module down: that would copy most of the shared memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
