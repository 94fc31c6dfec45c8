"""Run a script as one rank of a planned world, in a process of its own: `trace_script`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from ....accelerator import Accelerator
from ....config.combinations import Feature, require_combination
from ....instruments import PROCESS, Instrument
from ....parallel.base import Bundle
from ....program import program_name
from ....runtime.group.runtime import Runtime
from ..trace import FORWARD, GRADIENTS, OPTIMIZER, UPDATE, WEIGHTS, Trace, TracedStep
from .groups import axes_of, coordinates_of, open_groups_without_connections
from .host.building import Building
from .host.devices import accept_absent_devices
from .host.files import write_nothing
from .host.loaders import Batches, give_fake_batches
from .host.progress import Progress, Turns
from .host.values import Values
from .kernels import use_accelerator_kernels
from .models import Truncation, convert_fake_modules
from .recorder import TraceRecorder
from .replicas import replace_ddp
from .strategies import buffers_of_others, offload_to_host, stream_blocks, watch_strategies
from .traits import note_traits, watch_traits

PROGRESS = ".progress"
"""Suffix of a file beside the trace, which a script leaves that ends before its last step."""
_FEW_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """Which rank of which world is traced, and how much of it."""

    rank: int
    world_size: int
    output: Path
    steps: int = 2
    blocks: tuple[int, int] | None = None
    """Repeated blocks of the model, and of each stage of a pipeline; None traces all of them."""
    on_accelerators: bool = True
    """Whether kernels are chosen as on a GPU; otherwise as on the CPU of this machine."""
    batch_size: int | None = None
    """Samples of every batch, instead of what the script's loader gives."""
    accumulation: int | None = None
    """Micro-batches of a step, instead of what the script sets. At most two of them are traced."""


def trace_script(request: TraceRequest) -> TracedScript:
    """Make this process trace the script that it is going to run. It ends after the last step."""
    torch.autograd.set_multithreading_enabled(False)
    trace = Trace(
        rank=request.rank,
        world_size=request.world_size,
        axes={},
        parameters=0,
        trained_parameters=0,
        blocks=0,
        all_blocks=0,
    )
    values = Values(trace.guesses)
    recorder = TraceRecorder(trace, values, lambda ranks: axes_of(ranks, trace.axes))
    building = Building(FakeTensorMode(allow_non_fake_inputs=True), values)
    script = TracedScript(request, recorder, building)
    open_groups_without_connections(request.rank, request.world_size)
    replace_ddp(recorder)
    watch_strategies(recorder, values)
    give_fake_batches(recorder, values, script.batches, request.batch_size)
    values.read_by_python()
    accept_absent_devices()
    write_nothing()
    if request.on_accelerators:
        use_accelerator_kernels()
        offload_to_host(recorder)
    stream_blocks(recorder, request.on_accelerators)
    convert_fake_modules()
    script.watch()
    building.begin()
    recorder.__enter__()
    atexit.register(script.tell_progress)
    return script


class TracedScript(Instrument):
    """The script of this process: its models, its phases and its steps."""

    def __init__(self, request: TraceRequest, recorder: TraceRecorder, building: Building) -> None:
        self.batches = Batches()
        self._request = request
        self._recorder = recorder
        self._building = building
        self._trace = recorder.trace
        self._truncation = Truncation(request.blocks)
        self._models: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._module_of: dict[Tensor, str] = {}
        self._running: list[str] = []
        self._in_backward = ""
        self._passes = 0
        self._differentiates = False
        self._steps_in_backward = False
        self._turns = Turns()
        self._progress = Progress()
        self._microbatches = 1.0
        """Micro-batches of a pipeline for each that is traced."""
        self._began = 0
        recorder.module = self._module

    def watch(self) -> None:
        """Learn of models, passes and optimizer steps."""
        plain_backward = torch.autograd.backward
        script = self
        watch_traits(self._trace.traits)
        PROCESS.add(self)

        def backward(*args: Any, **kwargs: Any) -> None:
            inside = script._differentiates  # torch calls it again to apply a function mode, and to recompute blocks
            if not inside:
                script._running.clear()  # a stage of a pipeline leaves its last modules by an exception
            script._differentiates = True
            plain_backward(*args, **kwargs)
            script._differentiates = inside
            if not inside:
                script._after_backward()

        torch.autograd.backward = backward
        torch.compile = _not_compiled
        torch.amp.GradScaler._maybe_opt_step = lambda self, optimizer, *args, **kwargs: optimizer.step()  # type: ignore[method-assign]
        Runtime.wait_for_first = lambda self, store, counter: None  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._after_step)
        nn_module.register_module_forward_pre_hook(self._enter_module)
        nn_module.register_module_forward_hook(self._leave_module, always_call=True)

    # --- models -----------------------------------------------------------------------------------------------------

    def prepare_started(self, accelerator: Accelerator, bundle: Bundle) -> None:
        """Leave out repeated blocks, and note what is trained and how it is spread."""
        models, optimizers, trained = bundle.models, bundle.optimizers, not bundle.evaluation
        require_combination({Feature.PLAN: f"{program_name()} plan"} | accelerator.features)
        self._building.end(models, self._recorder)
        self._progress.models += len(models)
        self._turns.expect(optimizers)
        self._progress.optimizers += len(optimizers)
        plugin = getattr(accelerator.strategy, "plugin", None)
        self._recorder.offloads = self._request.on_accelerators and bool(getattr(plugin, "offloads", False))
        if not self._trace.axes and self._trace.world_size > 1:
            mesh = getattr(accelerator.strategy, "mesh", None)
            self._trace.axes = {"dp_replicate": self._trace.world_size} if mesh is None else _sizes(mesh.device_mesh)
            self._note_pipeline(accelerator)
        note_traits(self._trace.traits, accelerator.settings, models)
        if self._request.accumulation is not None and self._trace.stages == 1:
            accelerator.gradient_accumulation_steps = min(self._request.accumulation, _FEW_PASSES)
        for model in models:
            self._trace.parameters += sum(param.numel() for param in model.parameters())
            self._trace.trained_parameters += sum(p.numel() for p in model.parameters() if trained and p.requires_grad)
            self._truncation.apply(model, self._trace.stages)
        self._truncation.forget(optimizers)
        self._trace.blocks, self._trace.all_blocks = self._truncation.kept, self._truncation.found

    def _note_pipeline(self, accelerator: Any) -> None:
        trace, ranks = self._trace, self._trace.axes.get("pp", 1)
        if ranks > 1:
            config = accelerator.settings.parallelism.pp_handler
            trace.schedule = config.schedule
            trace.stages = ranks * config.stages_per_rank
            self._trace_fewer_microbatches(config, ranks)
            trace.stage = coordinates_of(trace.rank, tuple(trace.axes.values()))[list(trace.axes).index("pp")]

    def _trace_fewer_microbatches(self, config: Any, ranks: int) -> None:
        """Trace as many micro-batches as are in flight at once, and more to have gradients then; others repeat this."""
        wanted = config.microbatches or ranks
        enough = {"1f1b": ranks + 1, "interleaved": 3 * ranks}.get(config.schedule, wanted)
        if self._request.blocks is not None and wanted > enough:
            config.microbatches = enough
            self._microbatches = wanted / enough
            self.batches.fraction = enough / wanted

    def prepare_ended(self, accelerator: Accelerator, bundle: Bundle) -> None:
        """Note the names of modules, and whose weights are in memory."""
        for model in bundle.models:
            self._models.append(model)
            self._names |= {id(module): name for name, module in model.named_modules()}
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self._module_of[tensor] = name.rpartition(".")[0]
                self._recorder.claim(tensor, WEIGHTS, self._module_of[tensor])

    def micro_batch_started(self, accelerator: Accelerator, models: tuple[nn.Module, ...]) -> None:
        """Note that the script accumulates gradients by the Accelerator's windows."""
        self._trace.traits.accumulates = True

    # --- phases -----------------------------------------------------------------------------------------------------

    def _module(self) -> tuple[str, bool]:
        if self._running:
            return self._running[-1], True
        return (self._in_backward, False) if torch._C._current_autograd_node() is not None else ("", False)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self._running.append(name if name is not None else self._running[-1] if self._running else "")
        if name is not None and torch._C._current_autograd_node() is None and self._recorder.phase != FORWARD:
            self._recorder.phase = FORWARD

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
        name = self._names.get(id(module))
        if name is None:
            return
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._enter_backward(name))  # type: ignore[no-untyped-call]
                return

    def _enter_backward(self, name: str) -> None:
        self._in_backward = name

    def _after_backward(self) -> None:
        self._claim_gradients(param for model in self._models for param in model.parameters())
        self._passes += 1
        self._progress.backward_passes += 1
        self._in_backward = ""
        self._recorder.phase = UPDATE
        if self._steps_in_backward:
            self._steps_in_backward = False
            self._end_step()

    def _after_step(self, optimizer: Any, *args: Any) -> None:
        for param, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._recorder.claim(value, OPTIMIZER, self._module_of.get(param, ""))
        if self._differentiates:  # a hook of the parameter steps, and frees its gradient: the step ends with the pass
            self._steps_in_backward = True
            self._claim_gradients(param for group in optimizer.param_groups for param in group["params"])
        elif self._passes and (passes := self._turns.take(optimizer, self._passes)):
            self._passes = passes
            self._end_step()

    def _claim_gradients(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if param.grad is not None:
                self._recorder.claim(param.grad, GRADIENTS, self._module_of.get(param, ""))

    def _end_step(self) -> None:
        samples, tokens = self.batches.take()
        if self._trace.stages > 1:
            self._trace.microbatches = self._passes
            self._trace.all_microbatches = round(self._passes * self._microbatches)
        self._trace.steps.append(
            TracedStep(
                began=self._began, ended=self._recorder.tick, samples=samples, tokens=tokens, passes=self._passes
            )
        )
        wanted = self._request.accumulation
        if wanted is not None and self._passes == min(wanted, _FEW_PASSES):
            self._trace.all_passes = wanted
        self._began, self._passes = self._recorder.tick, 0
        self._recorder.phase = FORWARD
        more = len(self._trace.steps) - self._request.steps
        if more > 0 or (more == 0 and self._is_like_the_first()):
            self.end()

    def _is_like_the_first(self) -> bool:
        """Tell whether the last step has passes enough, and was not cut short by the end of the data."""
        return self._trace.steps[-1].passes >= min(self._trace.steps[0].passes, _FEW_PASSES)

    def _complete_last_step(self) -> None:
        """Let the last step have as many passes and samples as the first, where the data ended in it."""
        if not self._trace.steps:
            return  # a trace of an evaluation
        first, last = self._trace.steps[0], self._trace.steps[-1]
        if last.passes < first.passes:
            self._trace.all_passes = max(self._trace.all_passes, first.passes)
            last.samples = first.samples * last.passes // first.passes

    def hide_data(self) -> None:
        """Make all tensors fake from here on, not only from the first `prepare` on."""
        self._building.end([], self._recorder)

    def tell_progress(self) -> None:
        """Write down how far the script came; called where it ends before its last step."""
        self._progress.steps, self._progress.loaders = len(self._trace.steps), self.batches.loaded
        if len(self._trace.steps) >= self._request.steps:
            self.end()
        self._progress.save(self._request.output.with_suffix(PROGRESS))

    def end(self) -> None:
        """Write the trace and end this process."""
        self._recorder.finish()
        self._complete_last_step()
        if self._microbatches > 1:
            self._trace.allocations += buffers_of_others(self._trace, self._microbatches - 1)
        self._trace.save(self._request.output)
        os._exit(0)


def _sizes(mesh: Any) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function
