"""Say why a script cannot be planned: the line of the user's, the cause in one sentence, and what to do."""

from __future__ import annotations

import ast
import re
import sysconfig
from contextlib import suppress
from pathlib import Path

from ...program import program_name
from .tracing.host.progress import LoaderPass, Progress

_OURS = str(Path(__file__).parents[2])
_SHOWN_LINES, _LONGEST = 12, 400
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
_TRAINS = {"backward", "forward_backward", "fit", "learn", "step"}
_INFERS = {"no_grad", "inference_mode", "eval", "generate", "load_checkpoint_and_dispatch", "dispatch_model"}
"""Names of functions, some of which a script calls that trains, or that infers."""
_INFERS_ONLY = (
    "the script calls neither backward() nor a trainer: it only infers, and a plan is of training steps.",
    f"`{program_name()} estimate-memory` tells the memory of a model for inference.",
)
_LEAVE_OUT = (
    "compute it without the numbers of tensors, or leave it out of the first two steps "
    '(`if os.environ.get("MESHWRIGHT_PLAN") is None:`).'
)
_NO_TPU = (
    "accelerate 1.x calls this kind XLA, and has no other name for it: the script fails without a plan too.",
    "write DistributedType.XLA.",
)
_CAUSES = (
    ("DataDependentOutput", "this needs numbers of a tensor, and planned tensors have none.", _LEAVE_OUT),
    ("DynamicOutputShape", "the shape of its result depends on numbers, and planned tensors have none.", _LEAVE_OUT),
    ("data pointer", "a kernel outside of torch reads the memory of a tensor, and planned tensors have none.",
     "use the implementation in torch while planning, such as attn_implementation=\"sdpa\"."),
    ("split_with_sizes", "sizes that were read from a tensor have to sum to a length; a plan has no such numbers.",
     _LEAVE_OUT),
    ("CUDA", "the script uses a GPU directly, and a plan runs without one.",
     "take the device from accelerator.device."),
    ("NVIDIA driver", "the script uses a GPU directly, and a plan runs without one.",
     "take the device from accelerator.device."),
    ("offline", "a file of the hub is not on this machine; a plan needs the config and the tokenizer, no weights.",
     "download them once, or name a local folder."),
    ("no checkpoint at", "a plan writes no checkpoints, so one that the script has saved itself is not there.",
     "load one that is there before the run, or leave the line out of the plan "
     '(`if os.environ.get("MESHWRIGHT_PLAN") is None:`).'),
    ("AttributeError: TPU", *_NO_TPU),
    ("'DistributedType' has no attribute 'TPU'", *_NO_TPU),
)  # fmt: skip
"""Words of an error, why a plan runs into it, and what to do."""
_UNKNOWN = (
    "this was raised by the script or by a library, and may have nothing to do with the plan.",
    f"see whether the script comes to its second step by `{program_name()} launch --cpu`. If it does, the line needs "
    "something that a plan does not have: leave it out of the first two steps "
    '(`if os.environ.get("MESHWRIGHT_PLAN") is None:`).',
)


STILL_RUNNING = f"{program_name()} plan: still running"
"""A line in the output of a script whose time is nearly over. Where it is follows."""
_SLOW = (
    "a plan runs every operation in Python: long loops over tokens or time steps, and large data, take time.",
    "give it more time (--seconds_per_run 3600), or less to do in the first two steps.",
)


class PlanError(ValueError):
    """Report a script that cannot be planned, where it stopped, and what to do.

    The message names the line of the script. Lines that need the numbers of a tensor can be left out of the first two
    steps, or written without them.
    """


def why_not(reason: str, log: str, script: str) -> str:
    """Return the line of the user's at which a script ended, the cause in one sentence, and what to do."""
    lines = log.rstrip().splitlines()
    if STILL_RUNNING in lines and reason.startswith("had not ended"):
        place = _last_place(lines[lines.index(STILL_RUNNING) :], str(Path(script).parent))[0] or script
        return f"{place} was still running: the script {reason}.\n  why: {_SLOW[0]}\n  do:  {_SLOW[1]}\n"
    start = max((index for index, line in enumerate(lines) if line.startswith("Traceback")), default=None)
    if start is not None:
        return _why_it_raised(lines[start:], script)
    shown = "\n".join(f"    {line}" for line in lines[-_SHOWN_LINES:])
    return f"{script} {reason}.{' It printed last:' if shown else ''}\n{shown}"


def _why_it_raised(traceback: list[str], script: str) -> str:
    place, code = _last_place(traceback, str(Path(script).parent))
    cause = next((line for line in traceback[::-1] if _ERROR.match(line)), traceback[-1])
    text = f"{place or script} cannot be planned:\n    {code}\n    {cause[:_LONGEST]}\n"
    if "UnsupportedSettingError" in cause:  # it says why, and what to do
        return text
    known = next(((why, remedy) for words, why, remedy in _CAUSES if words in cause), _UNKNOWN)
    why, remedy = _INFERS_ONLY if _only_infers(Path(script)) else known
    return f"{text}  why: {why}\n  do:  {remedy}\n"


def too_few_steps(progress: Progress, script: str, rank: int, world_size: int) -> str:
    """Return why a script ended well, but without two optimizer steps."""
    why, remedy = _why_so_few(progress, script, world_size)
    steps = "one optimizer step" if progress.steps else "no optimizer step"
    return (
        f"{script} ended well after {steps}, and a plan needs two (as rank {rank} of {world_size}).\n"
        f"  why: {why}\n  do:  {remedy}\n"
    )


def _why_so_few(progress: Progress, script: str, world_size: int) -> tuple[str, str]:
    passes = progress.backward_passes
    if not passes and not progress.optimizers:
        if _only_infers(Path(script)):
            return _INFERS_ONLY
        return (
            "it ran no backward pass, and gave no optimizer to prepare().",
            f"let the script train in the first two steps. For inference, {_INFERS_ONLY[1]}",
        )
    longest = max(progress.loaders, key=lambda loaded: loaded.batches, default=None)
    if longest is not None and longest.batches <= max(1, passes):
        return _too_little_data(longest, world_size), (
            "give the script more data, more epochs or smaller batches. Only the shapes of the data count: repeated "
            "samples do as well."
        )
    if passes:
        return (
            f"it ran {_counted(passes, 'backward pass', 'backward passes')}, and no more.",
            "let it step twice, with optimizers of torch.optim that are given to prepare().",
        )
    return (
        "it gave an optimizer to prepare(), and ran no backward pass.",
        "let the script train in the first two steps.",
    )


def _too_little_data(loaded: LoaderPass, world_size: int) -> str:
    """Return what a loader lacks that gave a rank too few batches."""
    given = f"a loader gave this process {_counted(loaded.batches, 'batch', 'batches')}"
    if loaded.samples is None:
        return f"{given}."
    size = f" in batches of {loaded.batch_size}" if loaded.batch_size else ""
    return f"{given}: {_counted(loaded.samples, 'sample', 'samples')}{size} are few for {world_size} processes."


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _only_infers(script: Path) -> bool:
    """Return whether a script calls something that is for inference, and nothing that trains."""
    with suppress(SyntaxError, OSError):
        calls = [node.func for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.Call)]
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        names |= {call.id for call in calls if isinstance(call, ast.Name)}
        return bool(names & _INFERS) and not names & _TRAINS and not any(name.startswith("train") for name in names)
    return False


def _last_place(lines: list[str], folder: str) -> tuple[str, str]:
    """Return file and line of the innermost frame in the user's folder, and its code."""
    found = [
        (f"{match[1]}:{match[2]}", lines[index + 1].strip() if index + 1 < len(lines) else "")
        for index, line in enumerate(lines)
        if (match := re.match(r'  File "(.+)", line (\d+)', line))
        if _is_the_users(match[1], folder)
    ]
    return found[-1] if found else ("", "")


def _is_the_users(file: str, folder: str) -> bool:
    return file.startswith(folder) and not file.startswith((_OURS, *_installed_below(folder)))


def _installed_below(folder: str) -> list[str]:
    """Return where packages are installed, unless the script is one of them."""
    return [path for path in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")) if path not in folder]
