"""Find the rank that ended a run, and the cause: one short panel, printed last."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...program import program_name
from ...runtime.collectives.last_calls import read_calls
from ...untrusted import build, parse_object, printable_lines, read_bytes
from .worker import CRASH_FILE_NAME, is_user_file

# Errors of a healthy rank that lost a peer, as Gloo, NCCL, the store and torch word them.
LOST_PEER_ERRORS = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|connection refused|broken pipe|socket (closed|timeout)"
    r"|remote process exited|network error|peer closed|recvvalue failed|failed to recv|sendbytes failed"
    r"|nccl communicator was aborted|watchdog caught collective operation timeout|unhandled system error"
    r"|ncclsystemerror|ncclremoteerror|aborted by.*another|closed the connection"
    r"|timed out waiting .* (recv|send)|gloo.*timed? ?out",
    re.IGNORECASE,
)
# What NCCL reports under the same names where the machine of the rank itself is at fault.
_OWN_NCCL_ERRORS = re.compile(r"shared memory segment|no space left|no socket interface found", re.IGNORECASE)
# Errors that are about several processes: one process has no such error, or another one.
_ABOUT_PROCESSES = re.compile(
    r"process.?group|\bgloo\b|\bnccl\b|c10d|torch\.distributed|\branks?\b|world.?size|num_processes|DTensor|\bmesh\b"
    r"|DistributedDataParallel|collective",
    re.IGNORECASE,
)
_DEAD_RANK = re.compile(r"\b(is dead|has left|has failed)\b")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one rank of this machine ended."""

    rank: int
    local_rank: int
    exit_code: int
    """As `subprocess` reports it: negative for a signal."""
    ended_by_launcher: bool = False
    """It still ran when another rank had failed, and was terminated."""
    record: dict[str, Any] | None = None
    """The record of an exception or `sys.exit`, written by `worker.py`."""
    crash: str = ""
    """The Python stack that faulthandler wrote on a fatal signal."""
    calls: tuple[tuple[int, str], ...] = ()
    """Its newest collectives, by number."""
    machine: str | None = None
    """The machine, if it is another one."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Ending:
        """Return what another machine has sent; raise InvalidDataError unless it can be shown as it is."""
        what = "the failure that another machine has sent"
        ending = build(cls, message, what)
        if ending.record is not None:
            build(_Record, ending.record, f"{what}, its record,")
        shown: Ending = _printable(ending)
        return shown

    @property
    def failed(self) -> bool:
        """Whether the rank failed."""
        return self.exit_code != 0

    @property
    def lost_a_peer(self) -> bool:
        """Whether its exception is a symptom of a lost peer."""
        if self.record is None or _OWN_NCCL_ERRORS.search(self.record["text"]):
            return False
        return LOST_PEER_ERRORS.search(self.record["text"]) is not None

    @property
    def aborted_in_background(self) -> bool:
        """Whether a thread without Python aborted the process, as NCCL's watchdog does when it gives up waiting."""
        is_abort = self.signal_name == "SIGABRT" and self.record is None
        return is_abort and re.search(r"^Current thread 0x", self.crash, re.MULTILINE) is None

    @property
    def explains_aborts(self) -> bool:
        """Whether ranks that waited for this one may have been aborted: by its exception, or in a deadlock of ranks."""
        return self.record is not None and not _DEAD_RANK.search(self.diagnosis or "")

    @property
    def diagnosis(self) -> str | None:
        """The watcher's diagnosis: why the rank hung, or why its peer was lost."""
        if self.record is None:
            return None
        if self.record["type"] == "StuckError":
            return re.sub(r"^[\w.]+: (Rank \d+: )?", "", self.record["text"])
        return self.record.get("diagnosis")

    @property
    def is_collateral(self) -> bool:
        """Whether it only ended because of another rank."""
        return self.ended_by_launcher or self.lost_a_peer

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    @classmethod
    def read(cls, *, rank: int, local_rank: int, exit_code: int, error_file: str, ended_by_launcher: bool) -> Ending:
        """Read the files that a rank has written."""
        record, crash = None, ""
        with suppress(OSError, ValueError):
            record = _ending_in(read_bytes(error_file, "the record of a rank"))
        with suppress(OSError):
            crash = Path(error_file).with_name(CRASH_FILE_NAME).read_text()
        return cls(
            rank=rank,
            local_rank=local_rank,
            exit_code=exit_code,
            ended_by_launcher=ended_by_launcher,
            record=record,
            crash=crash,
            calls=tuple(read_calls(Path(error_file).parent).items()),
        )


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str
    source: str


@dataclass(frozen=True)
class _Record:
    """The fields of `Ending.record`."""

    type: str
    text: str
    cause: str | None
    diagnosis: str | None
    frames: tuple[_Frame, ...]
    time: float


def _printable(value: Any) -> Any:
    """Return a value whose texts can be shown on a terminal."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, dict):
        return {name: _printable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_printable(item) for item in value)
    if isinstance(value, Ending):
        return Ending(**{field.name: _printable(getattr(value, field.name)) for field in fields(value)})
    return value


def _ending_in(content: bytes) -> dict[str, Any] | None:
    ending = parse_object(content, "the record of a rank").get("ending")
    return None if ending is None else asdict(build(_Record, ending, "the record of a rank"))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank that failed first, the cause, and the collateral."""

    culprit: Ending
    alike: tuple[int, ...]
    """Other ranks that failed in the same way by themselves."""
    other_failures: tuple[Ending, ...]
    """Ranks that failed by themselves, in another way."""
    collateral: tuple[Ending, ...]
    elsewhere: bool
    """Every failure here is a symptom: the cause is on another machine."""
    out_of_memory: bool
    """The kernel killed a process for memory during this run."""
    shapes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> the collective in which the backend aborted the culprit, where the ranks' shapes differ."""

    @property
    def exit_code(self) -> int:
        """The culprit's exit code, as a shell reports it."""
        code = self.culprit.exit_code
        return code if code >= 0 else 128 - code

    @property
    def is_common(self) -> bool:
        """Whether every rank failed in the same way, so that one process would, too."""
        return not (self.other_failures or self.collateral)

    @property
    def names_all_ranks(self) -> bool:
        """Whether the evidence says where every rank was."""
        return self.culprit.diagnosis is not None or bool(self.shapes)

    @property
    def headline(self) -> str:
        """The failure in one line."""
        if self.shapes:
            place = next(iter(_crash_lines(self.culprit.crash)), None)
            call = next(iter(self.shapes.values())).partition("(")[0]
            return f"the ranks brought different shapes to {call}()" + (f" ({place[0]})" if place else "")
        if self.culprit.diagnosis is not None:
            return _split_diagnosis(self.culprit.diagnosis)[0]
        where = f" on {self.culprit.machine}" if self.culprit.machine else ""
        return f"rank {self.culprit.rank}{where} failed{self._first}: {describe(self.culprit, self.out_of_memory)}"

    @property
    def _first(self) -> str:
        return " first" if self.alike or self.other_failures or self.collateral else ""


def judge(endings: Iterable[Ending], *, out_of_memory: bool) -> Verdict:
    """Find the culprit: the earliest rank that failed by itself."""
    endings = list(endings)
    failed = sorted((ending for ending in endings if ending.failed), key=_time)
    own = _own_failures(failed)
    culprit = own[0] if own else _most_informative(failed)
    others = [ending for ending in own if ending is not culprit]
    alike = [ending for ending in others if kind_of_failure(ending) == kind_of_failure(culprit)]
    return Verdict(
        culprit=culprit,
        alike=tuple(sorted(ending.rank for ending in alike)),
        other_failures=tuple(ending for ending in others if ending not in alike),
        collateral=tuple(ending for ending in failed if ending not in own and ending is not culprit),
        elsewhere=not own,
        out_of_memory=out_of_memory and culprit.machine is None,
        shapes=_different_shapes(culprit, endings),
    )


def _own_failures(failed: Sequence[Ending]) -> list[Ending]:
    """Return the failures that are not collateral, in order of time."""
    own = [ending for ending in failed if not ending.is_collateral]
    if any(ending.explains_aborts for ending in own):
        own = [ending for ending in own if not ending.aborted_in_background]
    if own and own[0].diagnosis is None:  # the ranks with a diagnosis waited for one that had failed before
        own = [ending for ending in own if ending.diagnosis is None]
    return own


def _most_informative(collateral: Sequence[Ending]) -> Ending:
    """Return the most informative of collateral endings: with a diagnosis, else with an exception."""
    diagnosed = (ending for ending in collateral if ending.diagnosis is not None)
    by_itself = (ending for ending in collateral if not ending.ended_by_launcher)
    return next(diagnosed, None) or next(by_itself, collateral[0])


def _different_shapes(culprit: Ending, endings: Iterable[Ending]) -> dict[int, str]:
    """Return each rank's shapes in the first collective in which they differ; {} where there is none.

    With NCCL the host has gone on, and the collective that aborted the culprit is not its newest.
    """
    if culprit.signal_name != "SIGABRT" or not culprit.calls:
        return {}
    by_number: dict[int, dict[int, str]] = {}
    for ending in endings:
        for number, call in ending.calls:
            by_number.setdefault(number, {})[ending.rank] = call
    for number in sorted(number for number, _ in culprit.calls):
        if len(set(by_number[number].values())) > 1:
            return dict(sorted(by_number[number].items()))
    return {}


def _time(ending: Ending) -> float:
    # A rank ended by a signal has no record and no time; it sorts first. Its victims are known by their errors.
    return ending.record["time"] if ending.record is not None else 0.0


def kind_of_failure(ending: Ending) -> tuple[object, ...]:
    """Return what two failures of the same kind have in common: the exception with its lines, or the exit code.

    Numbers in the message may differ: those of ranks and devices do.
    """
    if ending.record is None:
        return (ending.exit_code,)
    if ending.diagnosis is not None:
        return (ending.record["type"],)
    places = [(frame["file"], frame["line"]) for frame in ending.record["frames"]]
    return ending.record["type"], re.sub(r"\d+", "0", ending.record["text"]), tuple(places)


def describe(ending: Ending, out_of_memory: bool = False) -> str:
    """Describe in one line how a rank ended."""
    if ending.signal_name is not None:
        if ending.signal_name == "SIGKILL" and out_of_memory:
            return "killed by the kernel, which ran out of memory (SIGKILL)"
        return f"killed by {ending.signal_name}"
    if ending.record is None:
        return f"ended with exit code {ending.exit_code}"
    if ending.record["type"] == "SystemExit":
        return f"called sys.exit with code {ending.exit_code}"
    if (inner := _data_worker_error(ending.record)) is not None:
        return f"{inner} in a data worker"
    return str(ending.record["type"])


def _data_worker_error(record: dict[str, Any]) -> str | None:
    found = re.search(r"Caught (\w+) in DataLoader worker process", record["text"])
    return found[1] if found else None


def panel(verdict: Verdict, *, machine_rank: int, num_machines: int, logs: str | None, attempts: int = 1) -> str:
    """Draw the verdict, between two rules and without a box, so that it can be copied and searched."""
    width = min(100, max(60, shutil.get_terminal_size((100, 24)).columns))
    culprit = verdict.culprit
    here = f" on machine {machine_rank} ({socket.gethostname()})" if num_machines > 1 else ""
    host = "" if culprit.machine else here  # the headline has it
    blamed_elsewhere = verdict.elsewhere and num_machines > 1 and culprit.diagnosis is None
    lines = textwrap.wrap(f" {verdict.headline}{host}", width, subsequent_indent="   ", break_long_words=False)
    lines += _shapes_by_rank(verdict.shapes) if verdict.shapes else _evidence(culprit, width)
    if blamed_elsewhere:
        lost = "it only lost its peers: the cause is on another machine, which has not said why (killed, or gone)"
        lines += _field("but", lost, width)
    lines += _alike_lines(verdict, width)
    for other in verdict.other_failures:
        lines += _field("also", f"rank {other.rank}: {_in_a_line(other, verdict.out_of_memory)}", width)
    if verdict.collateral and not verdict.names_all_ranks:
        lines += _field("collateral", collateral_text(verdict.collateral), width)
    if attempts > 1:
        lines += _field("attempts", f"{attempts}; this is the last one", width)
    above = f"above the panel of {culprit.machine}" if culprit.machine else "above"
    lines += _field("logs", logs or f"{above}; --log_dir DIR keeps each rank's output in a file", width)
    elsewhere = "the output and the kernel's log (dmesg) of the other machines"
    lines += _field("try", elsewhere if blamed_elsewhere else remedy(culprit, verdict), width)
    lines += _field("exit code", str(verdict.exit_code), width)
    title = "── the run failed "
    return "\n".join(["", title + "─" * (width - len(title)), *lines, "─" * width])


def _alike_lines(verdict: Verdict, width: int) -> list[str]:
    """Return the line of the ranks that failed as the culprit did."""
    if not verdict.alike or verdict.names_all_ranks:
        return []
    record = verdict.culprit.record
    place = "place" if record is not None and record["frames"] else "way"
    return _field("the same", f"{_ranks(verdict.alike)} failed in the same {place}", width)


def _in_a_line(ending: Ending, out_of_memory: bool) -> str:
    """Describe how another rank ended, with the message and the line of its exception."""
    if ending.record is None or ending.record["type"] == "SystemExit":
        return describe(ending, out_of_memory)
    text, frames = ending.record["text"].partition("\n")[0], ending.record["frames"]
    return f"{text} ({_relative(frames[-1]['file'])}:{frames[-1]['line']})" if frames else text


def _field(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=f" {name:<11}", subsequent_indent=" " * 12, break_long_words=False)


def _evidence(ending: Ending, width: int) -> list[str]:
    if ending.diagnosis is not None:
        return _diagnosis_lines(ending.diagnosis, width)
    if ending.record is None:
        return [f"   {place}  in {function}" for place, function in reversed(_crash_lines(ending.crash))]
    shown = []
    if ending.record["type"] != "SystemExit" or not ending.record["text"].endswith(str(ending.exit_code)):
        text = ending.record["text"]
        inner = text.splitlines()[-1] if _data_worker_error(ending.record) else text
        for line in inner.splitlines()[:8]:
            shown += _wrapped(line, width) or [""]
        if ending.record["cause"]:
            shown += _wrapped(f"caused by {ending.record['cause'].splitlines()[0]}", width)
    places = [(f"{_relative(frame['file'])}:{frame['line']}", frame) for frame in ending.record["frames"]]
    column = max((len(place) for place, _ in places), default=0)
    for place, frame in places:
        shown.append(f"   {place:<{column}}  in {frame['function']}:  {frame['source']}"[:width].rstrip())
    return shown


def _wrapped(line: str, width: int, indent: int = 3) -> list[str]:
    """Wrap a line at its spaces; a line that fits is not changed."""
    if len(line) <= width - 3:
        return [f"   {line}"]
    return textwrap.wrap(
        line,
        width,
        initial_indent="   ",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _split_diagnosis(diagnosis: str) -> tuple[str, str]:
    """Return the finding and the advice of a diagnosis."""
    happened, *advice = re.split(r"\. (?=[A-Z])", diagnosis.splitlines()[0], maxsplit=1)
    return happened[:1].lower() + happened[1:].removesuffix("."), "".join(advice)


def _diagnosis_lines(diagnosis: str, width: int) -> list[str]:
    """Return the lines of a diagnosis that show where the ranks are."""
    return [line for place in diagnosis.splitlines()[1:] for line in _wrapped(place, width, indent=16)]


def _shapes_by_rank(shapes: Mapping[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, call in shapes.items():
        ranks.setdefault(call, []).append(rank)
    return [f"   {_ranks(there)}: {call}" for call, there in ranks.items()]


def _crash_lines(crash: str) -> list[tuple[str, str]]:
    """Return (line, function) of the thread that crashed, the innermost first: the user's own frames, else the last.

    If a native thread crashed, the frames of the Python threads are searched instead.
    """
    threads = crash.split("\n\n")
    current = [thread for thread in threads if "Current thread" in thread and "File " in thread]
    found: list[tuple[str, str, str]] = []
    for thread in current or reversed(threads):  # the main thread comes last
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
        users = [frame for frame in frames if is_user_file(frame[0])]
        if users:
            found = users
            break
        found = frames if current else []
    return [(f"{_relative(file)}:{line}", function) for file, line, function in found[:4]]


def _relative(file: str) -> str:
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


def collateral_text(endings: Sequence[Ending]) -> str:
    """Say what happened to the ranks that did not fail by themselves."""
    how: dict[str, list[int]] = {
        "lost the connection to it": [],
        "waited for it": [],
        "aborted while waiting for it": [],
        "ended by the launcher": [],
    }
    for ending in endings:
        if ending.lost_a_peer:
            how["lost the connection to it"].append(ending.rank)
        elif ending.aborted_in_background and not ending.ended_by_launcher:
            how["aborted while waiting for it"].append(ending.rank)
        elif ending.diagnosis is not None:
            how["waited for it"].append(ending.rank)
        else:
            how["ended by the launcher"].append(ending.rank)
    return "; ".join(f"{_ranks(sorted(ranks))} {what}" for what, ranks in how.items() if ranks)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]} … {ranks[-1]})"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def remedy(ending: Ending, verdict: Verdict) -> str:
    """Return what to do next."""
    if verdict.shapes:
        return (
            "accelerator.pad_across_processes(tensor, dim=...) before the call makes shapes equal; gather_object() "
            "takes ragged data"
        )
    if ending.diagnosis is not None:
        return _split_diagnosis(ending.diagnosis)[1] or "the lines above"
    if ending.signal_name is not None:
        return _REMEDY_FOR_SIGNALS["OOM" if verdict.out_of_memory and ending.signal_name == "SIGKILL" else ""].get(
            ending.signal_name, f"rank {ending.rank} was ended from outside: who sent {ending.signal_name}?"
        )
    if ending.record is None:
        return f"the output of rank {ending.rank}; it left no Python exception (os._exit, or not a Python program)"
    text = f"{ending.record['type']}: {ending.record['text']}"
    for pattern, advice in _REMEDIES:
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            return advice
    if verdict.alike and verdict.is_common and not _ABOUT_PROCESSES.search(text):
        return f"the same script in one process, where a debugger works: python {_script_of(ending)}"
    if verdict.alike:
        return "the lines above"
    if verdict.collateral or verdict.other_failures:
        return (
            f"what is different on rank {ending.rank}: its part of the data, a file, or code behind is_main_process; "
            "`python script.py` alone may not show it"
        )
    return "the lines above"  # it was one process


def _script_of(ending: Ending) -> str:
    """Return the script, as far as the frames of an exception tell."""
    frames = ending.record["frames"] if ending.record is not None else []
    return _relative(frames[0]["file"]) if frames and frames[0]["function"] == "<module>" else "SCRIPT"


_REMEDY_FOR_SIGNALS = {
    "OOM": {
        "SIGKILL": "a smaller batch, fewer data workers, or fewer processes on this machine; every process holds its "
        "own copy of what the script loads"
    },
    "": {
        "SIGKILL": "the kernel's log (dmesg) and the job's memory limit: SIGKILL comes from an out-of-memory kill, a "
        "batch system or a person; the kernel's own counter shows no out-of-memory kill here",
        "SIGSEGV": "the last frames above: a compiled extension crashed there; reinstall it for this torch version, "
        "and set num_workers=0 to tell whether it happens in a data worker",
        "SIGABRT": "the lines above the panel: a native library gave up and printed why. NCCL's watchdog does after "
        "`collective operation timeout`: some rank did not come to that collective; look for one that was still busy, "
        "or took another branch",
        "SIGBUS": "more shared memory (/dev/shm; docker run --shm-size), or fewer data workers",
        "SIGFPE": "the last frames above: a native integer division by zero",
        "SIGILL": "a build of the package for this processor: an instruction is unknown to it",
    },
}

_REMEDIES = (
    (
        r"AttributeError: '(DistributedDataParallel|OptimizedModule)' object has no attribute",
        "accelerator.unwrap_model(model), which has the attributes of your own model; prepare() has put another module "
        "around it",
    ),
    (
        r"got mixed torch.Tensor and DTensor|must have the same mesh|local_tensor argument only accepts torch.Tensor",
        "accelerator.clip_grad_norm_ and clip_grad_value_ instead of torch's; in a loss, param.full_tensor() of the "
        "parameters that are DTensors; in an AveragedModel, avg_fn, which takes one parameter at a time",
    ),
    (
        r"FSDP does not support deepcopy",
        "a copy made before prepare(), and prepared like the model; an AveragedModel of the plain model: "
        "`averaged.module = accelerator.prepare_model(averaged.module)`",
    ),
    (
        r"its process is gone",
        "that node's kernel log (dmesg) for an out-of-memory kill, the worker's log in Ray's session folder, and "
        "whether the node was taken away",
    ),
    (r"BdbQuit", "nothing: the debugger was left with `q`, which ends the rank; `c` lets it go on"),
    (
        r"ModuleNotFoundError: .*No module named",
        f"install it into the Python that runs the script ({program_name()} env says which), or start from the "
        "folder where it lies",
    ),
    (r"ImportError", "the versions of the packages named above; `pip check` finds broken ones"),
    (r"SyntaxError", "`python -m py_compile` on that file"),
    (r"out of memory|MemoryError|can't allocate memory", "a smaller batch with gradient accumulation, or bf16"),
    (
        r"Duplicate GPU detected",
        "one process per device: fewer processes, or a different device in each process's CUDA_VISIBLE_DEVICES",
    ),
    (
        r"shared memory segment",
        "more shared memory (/dev/shm; docker run --shm-size or --ipc=host), which NCCL uses between GPUs",
    ),
    (
        r"ncclUnhandledCudaError|unhandled cuda error",
        "the CUDA error in the last line of the message, and NCCL_DEBUG=INFO for the call: often a driver too old for "
        "this torch, or a GPU in a failed state (nvidia-smi, dmesg | grep Xid)",
    ),
    (
        r"ncclSystemError|ncclRemoteError|no socket interface found",
        "the network between the machines: NCCL_SOCKET_IFNAME names the interface, NCCL_DEBUG=INFO shows which peer "
        "cannot be reached",
    ),
    (
        r"Watchdog caught collective operation timeout",
        "which rank did not come to that collective: one that was still busy, or took another branch; "
        "InitProcessGroupKwargs(timeout=...) allows more time",
    ),
    (
        r"DataLoader worker .*(killed|exited unexpectedly)",
        "more shared memory (/dev/shm; docker run --shm-size) or memory, fewer data workers, num_workers=0 to see the "
        "cause",
    ),
    (r"Caught .* in DataLoader worker", "num_workers=0, which shows the same exception under a debugger"),
    (r"address already in use|EADDRINUSE", "leave --main_process_port out: a free port is chosen"),
    (r"FileNotFoundError", "the path, seen from the folder where the launch was typed"),
    (
        r"UnsupportedSettingError|RuntimeConflictError|CheckpointError|DistributedOperationException",
        "what the message says",
    ),
    (
        r"mark a variable ready only once|expected to have finished reduction|did not receive grad",
        "DistributedDataParallelKwargs(find_unused_parameters=True), if some parameters take no part in the loss",
    ),
)
