"""`meshwright check`: run two optimizer steps, look for mistakes, list them with their lines, and end.

What is looked at here may be right in one script and wrong in another, or costs too much for every step. So it is done
only where somebody asks. Collectives are compared by the debug mode of `runtime/collectives/operations.py`.

The check itself runs no collective. A rank may step an optimizer that the others do not have, and uneven inputs end on
one rank before the others. So every rank writes down what should be equal, and the main process compares at the end.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn, no_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..config.environment import CHECK_FAILED_CODE
from ..errors.callers import user_line
from ..instruments import Instrument
from ..parallel.base import Bundle, params_of
from ..program import program_name
from ..runtime.collectives.operations import mesh_of
from ..runtime.group.runtime import Runtime

STEPS = 2
_SECONDS_FOR_OTHERS = 10.0
_SAME_LOSSES = "every rank computed the same losses: do all read the same samples? Hand the loader to prepare()."


def check() -> Check:
    """Return the check of this process: all of its Accelerators have one."""
    global _check
    runtime = Runtime.current()
    if _check is None or _check.runtime is not runtime:
        if _check is not None:
            _check.stop()
        _check = Check(runtime)
    return _check


class Check(Instrument):
    """The check of one process: it sees all of its Accelerators."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        runtime.debug = True
        # Kept from now on: the script may close the process group before it ends.
        self._store = runtime.store("check") if runtime.num_processes > 1 else None
        self._accelerators: list[Any] = []
        self._findings: dict[str, str] = {}
        """Text -> line."""
        self._values: dict[tuple[str, str], list[Any]] = {}
        """Line and text -> what should be the same on all ranks that come there."""
        self._losses: list[float] = []
        self._line_of_losses = ""
        self._steps: Counter[int] = Counter()
        self._stepping: list[Optimizer] = []
        """Optimizers whose step is under way; behind the first come those that it steps itself."""
        self._has_gradients = False
        self._reported = False
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Look at nothing more."""
        self._reported = True
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()

    # --- what the script calls --------------------------------------------------------------------------------------

    def attached(self, accelerator: Any) -> None:
        """Look at an Accelerator."""
        self._accelerators.append(accelerator)

    def prepare_ended(self, accelerator: Any, bundle: Bundle) -> None:
        """Compare the parameters of models."""
        for model in bundle.models:
            if _holds_copies(accelerator) and not bundle.evaluation:
                self._compare(
                    f"the ranks hold different parameters of {type(model).__name__} after prepare(). Call set_seed() "
                    "before the model is made, or load the same weights on every rank.",
                    _checksum(model.parameters()),
                )

    def loader_prepared(self, accelerator: Any, loader: Any) -> None:
        """Compare the length of a loader."""
        if accelerator.even_batches:
            self._compare(
                "the prepared loader has different numbers of batches on the ranks. prepare() splits the data: "
                "give all of it to every rank.",
                _length(loader),
            )

    def micro_batch_started(self, accelerator: Any, models: tuple[nn.Module, ...]) -> None:
        """Look whether accumulation knows where an epoch ends."""
        steps, state = accelerator.gradient_accumulation_steps, accelerator.gradient_state
        if steps > 1 and state.sync_with_dataloader and not state.in_dataloader:
            self._note(
                f"accumulate() is used with gradient_accumulation_steps={steps}, and no prepared loader is iterated: "
                "the last micro-batches of an epoch make no step of their own. Hand the loader to prepare()."
            )

    def backward_started(self, accelerator: Any, loss: Tensor | None) -> None:
        """Look at a loss; after two steps, end."""
        self._end_if_done()
        self._stepping.clear()  # a step that raised left its optimizer there
        self._has_gradients = True
        if loss is None:  # a pipeline computes it
            return
        value = float(loss.detach().float().mean())
        if not math.isfinite(value):
            self._note(f"the loss is {value}.")
        strategy = accelerator.strategy
        reads_own_samples = strategy.num_data_ranks > 1 and strategy.mesh is None
        if reads_own_samples and not accelerator.gradient_state.in_dataloader:
            self._losses.append(value)
            self._line_of_losses = self._line_of_losses or user_line()

    # --- what optimizers do, prepared or not ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        self._end_if_done()
        name, params = type(optimizer).__name__, params_of(optimizer)
        if not self._is_prepared(optimizer) and self._should_be_prepared(params):
            self._note(
                f"{name} was not given to prepare(): it steps on every micro-batch, does not unscale fp16 gradients, "
                "and is in no checkpoint."
            )
        if any(map(callable, (*args[1:], *kwargs.values()))):  # a closure computes the gradients during the step
            return
        steps = max(accelerator.gradient_accumulation_steps for accelerator in self._accelerators)
        if not any(param.grad is not None for param in params):
            self._note(f"{name} steps, but none of its {len(params)} parameters has a gradient.")
        elif not self._has_gradients and steps > 1:
            self._note(
                "gradients were computed without accelerator.backward(loss): they are not divided by "
                f"gradient_accumulation_steps={steps}."
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        is_part_of_a_step = len(self._stepping) > 1
        del self._stepping[-1:]
        if is_part_of_a_step:
            return
        self._steps[id(optimizer)] += 1
        if not any(each.window.unsynced for each in self._accelerators) and all(map(_holds_copies, self._accelerators)):
            self._compare(
                f"the parameters of {type(optimizer).__name__} differ between the ranks after a step: their model was "
                "not given to prepare(), or its gradients are not averaged.",
                _checksum(params_of(optimizer)),
            )

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        return any(prepared.wraps(optimizer) for each in self._accelerators for prepared in each._optimizers)

    def _should_be_prepared(self, params: Iterable[Tensor]) -> bool:
        """Tell whether an optimizer trains a prepared model; a script that prepares no optimizer forgot all of them."""
        if not any(each._optimizers for each in self._accelerators):
            return True
        own = {id(param) for param in params}
        models = (model for each in self._accelerators for model in each._models)
        return any(id(param) in own for model in models for param in model.parameters())

    # --- what was found ---------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._findings.setdefault(text, user_line())

    def _compare(self, text: str, value: Any) -> None:
        """Keep a value that should be the same on all ranks, and what is wrong where it is not."""
        if value is not None:
            self._values.setdefault((user_line(), text), []).append(value)

    def _steps_made(self) -> int:
        """Return the steps of a prepared optimizer; of any one, where none is prepared."""
        prepared = {id(opt.optimizer): opt for each in self._accelerators for opt in each._optimizers}
        prepared |= {id(getattr(opt.optimizer, "stepped", opt)): opt for opt in prepared.values()}
        return max((steps for key, steps in self._steps.items() if key in prepared or not prepared), default=0)

    def _end_if_done(self) -> None:
        if self._steps_made() >= STEPS:
            raise SystemExit(self._report())

    def _report(self) -> int:
        """Print what all ranks have found, on the main process; return the exit code."""
        self.stop()
        found = self._collect()
        if self.runtime.is_main_process:
            self._print(found)
        return CHECK_FAILED_CODE if found else 0

    def _collect(self) -> dict[tuple[str, str], list[int]]:
        """Return the findings, and the ranks that made them; the main process waits for the others' for a while."""
        here = self.runtime
        notes = [list(self._findings.items()), list(self._values.items()), self._losses]
        of_ranks = {here.process_index: json.loads(json.dumps(notes))}
        if self._store is not None:
            self._store.set(str(here.process_index), json.dumps(notes))
            others = range(1, here.num_processes) if here.is_main_process else ()
            until = time.monotonic() + _SECONDS_FOR_OTHERS
            while not all(self._store.check([str(rank)]) for rank in others) and time.monotonic() < until:
                time.sleep(0.05)
            of_ranks |= {r: json.loads(self._store.get(str(r))) for r in others if self._store.check([str(r)])}
        found: dict[tuple[str, str], list[int]] = {}
        for rank, (findings, _, _) in sorted(of_ranks.items()):
            for text, line in findings:
                found.setdefault((line, text), []).append(rank)
        everyone = list(range(here.num_processes))
        found |= dict.fromkeys(_differing([values for _, values, _ in of_ranks.values()]), everyone)
        losses = [losses for _, _, losses in of_ranks.values()]
        if len(losses) > 1 and all(losses) and not _differ(losses):
            found[self._line_of_losses, _SAME_LOSSES] = everyone
        return found

    def _print(self, found: dict[tuple[str, str], list[int]]) -> None:
        world_size, steps = self.runtime.num_processes, self._steps_made()
        amount = f"{len(found)} finding{'s' * (len(found) != 1)}" if found else "nothing was found"
        lines = [
            f"{program_name()} check: {amount} in {steps} optimizer steps on {world_size} "
            f"process{'es' * (world_size > 1)}"
        ]
        for (line, text), ranks in found.items():
            where = "" if len(ranks) == world_size else f"rank {', '.join(map(str, ranks))}: "
            lines.append(f"  {line}  {where}{text}")
        print("\n".join(lines), flush=True)

    def _at_exit(self) -> None:
        """Report of a script that ended before two steps; one that failed has said why."""
        if self._reported or not self.runtime.belongs_to_this_process():
            return
        if getattr(sys, "last_value", None) is not None:
            if self._findings:
                self._print({(line, text): [self.runtime.process_index] for text, line in self._findings.items()})
            return
        with suppress(RuntimeError):  # the store went with a process that has left
            if self._report():
                sys.stdout.flush()
                os._exit(CHECK_FAILED_CODE)


_check: Check | None = None


def _holds_copies(accelerator: Any) -> bool:
    """Tell whether every process has a copy of a model's parameters, and steps all of them."""
    strategy = accelerator.strategy
    return bool(strategy.holds_whole_models and not strategy.capabilities.owns_scaling)


def _differing(of_ranks: list[list[Any]]) -> list[tuple[str, str]]:
    """Return where ranks have different values; one that has not come there as often is compared as far as it came."""
    by_place: dict[tuple[str, str], list[list[Any]]] = {}
    for values in of_ranks:
        for place, here in values:
            by_place.setdefault((place[0], place[1]), []).append(here)
    return [place for place, values in by_place.items() if _differ(values)]


def _differ(values: list[list[Any]]) -> bool:
    return any(len(set(map(repr, together))) > 1 for together in zip(*values, strict=False))


def _checksum(params: Iterable[Tensor]) -> tuple[float, float] | None:
    """Return what is equal where all parameters are; None where they are spread over ranks or have no values."""
    held = [param.detach() for param in params]
    if any(mesh_of(param) is not None or param.is_meta for param in held):
        return None
    with no_grad():  # in a type that every device has
        return sum(float(p.float().sum()) for p in held), sum(float(p.float().abs().sum()) for p in held)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream
        return None
