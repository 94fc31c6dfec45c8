"""Adapters: a DeepSpeed engine as an optimizer, and placeholders for its own optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...errors import UnsupportedSettingError


class DummyOptim(Optimizer):
    """A placeholder for the optimizer of DeepSpeed's config, which `prepare` makes."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Raise: there is nothing to step yet."""
        raise RuntimeError("DummyOptim stands in for an optimizer of DeepSpeed's config: step what prepare() returned.")


class DummyScheduler:
    """A placeholder for the scheduler of DeepSpeed's config, or of a function, which `prepare` makes."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raise: there is nothing to advance yet."""
        raise RuntimeError(
            "DummyScheduler stands in for a schedule of DeepSpeed's config: step what prepare() returned."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine keeps the state of its scheduler."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the engine keeps the state of its scheduler."""


class DeepSpeedSchedulerWrapper:
    """A scheduler that its engine advances with every optimizer step; its state is part of the engine's."""

    _is_accelerate_prepared = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has advanced it."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes of the scheduler."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class DeepSpeedEngineWrapper:
    """An engine whose `backward` also steps. Published; `prepare` returns engines themselves."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Add the gradients of a loss, and step if they are complete."""
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last step."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class EngineOptimizer(Optimizer):
    """An engine as an optimizer: `step` and the gradients before it are the engine's.

    [Note: gradient reduction] DeepSpeed accumulates gradients over any number of backward passes and reduces them in
    `step`: it averages them over the processes, or lays out what it has averaged already. Clipping and scaling need
    them earlier, so they are reduced here, once, and `step` does not reduce them again.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.step_was_skipped = False
        """The last step was skipped because an fp16 gradient overflowed."""
        self._has_gradients = False
        self._is_reduced = False
        self._clips_at: float = engine.gradient_clipping()

    # The engine owns the state; Optimizer.__init__ is not called.

    @property
    def stepped(self) -> Optimizer:
        """Return the plain optimizer that the engine steps; schedulers are made for it."""
        optimizer: Optimizer = self.engine.basic_optimizer
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups, with the effective learning rates."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of this process's partition."""
        return self.stepped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the default options."""
        return self.stepped.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's partition."""
        state: dict[str, Any] = self.engine.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise: the state of one process is a partition, which only the engine can load."""
        raise RuntimeError("DeepSpeed's optimizer states are partitions: use accelerator.load_state(folder).")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: partitions are laid out once."""
        raise RuntimeError("DeepSpeed lays out partitions once: add parameter groups before prepare().")

    # --- the step -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Accumulate the gradients of a loss."""
        if self._has_gradients and getattr(self.engine.optimizer, "_epilogue_ran_this_backward", False):
            # DeepSpeed resets this flag in a forward pass; without one in between, it would not accumulate.
            self.engine.optimizer.clear_backward_seen_flag()
        self.engine.backward(loss, scale_wrt_gas=False, **options)
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Record that there are gradients to step with or to zero."""
        self._has_gradients = True
        self._is_reduced = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        if closure is not None:
            raise UnsupportedSettingError("step(closure)", "DeepSpeed has no such step.", "Call backward() before it.")
        if self._is_reduced:
            with _without_reduction(self.engine):
                self.engine.step()
        else:
            self.engine.step()
        self.step_was_skipped = not self.engine.was_step_applied()
        self._has_gradients = self._is_reduced = False
        if self.engine.gradient_clipping() != self._clips_at:
            self._clip_at(self._clips_at)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients that no step has used; a step zeroes its own."""
        if not self._has_gradients:
            return
        zero = self.engine.optimizer
        for held in ("averaged_gradients", "all_grad_tensors"):
            if hasattr(zero, held):
                getattr(zero, held).clear()
        if hasattr(zero, "micro_step_id"):
            zero.micro_step_id = 0 if self.engine.zero_optimization_partition_weights() else -1
        zero.zero_grad()
        self.engine.zero_grad()
        self._has_gradients = self._is_reduced = False

    # --- gradients before the step ------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step; return their norm before clipping."""
        if self.engine.has_moe_layers or self.engine.mp_world_size > 1:
            raise UnsupportedSettingError(
                "clip_grad_norm_ with experts or tensor parallelism of DeepSpeed",
                "only the engine knows which gradients are whose.",
                "Write gradient_clipping in DeepSpeed's config.",
            )
        if self._clips_at and max_norm not in (self._clips_at, float("inf")):
            raise ValueError(
                f"DeepSpeed's config and the script disagree: gradient_clipping is {self._clips_at} there, and "
                f"clip_grad_norm_ was given {max_norm}. Change one of the two."
            )
        if max_norm != float("inf"):
            self._clip_at(max_norm)
        norm = self._norm()
        scale = getattr(self.engine.optimizer, "loss_scale", 1.0)
        return norm / scale if scale != 1.0 else norm

    def _norm(self) -> Tensor:
        gradients = self.gradients()
        squares = [torch.linalg.vector_norm(gradient.float()).square() for gradient in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.engine.device)
        if self.engine.zero_optimization():
            total = total.to(self.engine.device)
            dist.all_reduce(total, group=self.engine.optimizer.dp_process_group)
        return total.sqrt()

    def scale(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients."""
        if self.engine.zero_use_cpu_optimizer():
            raise UnsupportedSettingError(
                "backward(num_items=...) over several micro-batches with offloaded optimizer states",
                "DeepSpeed has measured the gradients already.",
                "Give the mean loss, or leave the states on the device.",
            )
        for gradient in self.gradients():
            gradient.mul_(factor.to(gradient.dtype))

    def gradients(self) -> list[Tensor]:
        """Return this process's partition of the reduced gradients. See [Note: gradient reduction]."""
        engine, zero = self.engine, self.engine.optimizer
        if not self._is_reduced and self._has_gradients:
            self._reduce()
        if not engine.zero_optimization():
            return [param.grad for param in engine.module.parameters() if param.grad is not None]
        if engine.zero_use_cpu_optimizer():
            partitions = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
            return [partition.grad for partition in partitions if partition.grad is not None]
        if not hasattr(zero, "averaged_gradients"):
            raise UnsupportedSettingError(
                f"clip_grad_norm_ with DeepSpeed's {type(zero).__name__}",
                "it keeps its gradients to itself.",
                "Write gradient_clipping in DeepSpeed's config.",
            )
        return [
            gradient for group in zero.averaged_gradients.values() for gradient in group or () if gradient is not None
        ]

    def _reduce(self) -> None:
        engine = self.engine
        engine._running_engine_step = True  # marks an accumulation boundary
        try:
            if engine.zero_optimization_partition_gradients():
                engine.optimizer.finalize_gradient_accumulation_boundary()
            else:
                engine.allreduce_gradients()
        finally:
            engine._running_engine_step = False
        self._is_reduced = True

    def _clip_at(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.stepped!r})"


@contextmanager
def _without_reduction(engine: Any) -> Iterator[None]:
    zero, reduces = engine.optimizer, engine.enable_backward_allreduce
    engine.enable_backward_allreduce = False
    zero.finalize_gradient_accumulation_boundary = lambda: None
    try:
        yield
    finally:
        engine.enable_backward_allreduce = reduces
        del zero.finalize_gradient_accumulation_boundary


def engines_of_loss(loss: Tensor, engines: Iterable[EngineOptimizer]) -> list[EngineOptimizer]:
    """Return the engines whose parameters a loss depends on."""
    owners = {id(param): engine for engine in engines for param in engine.engine.module.parameters()}
    found: dict[int, EngineOptimizer] = {}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (owner := owners.get(id(getattr(node, "variable", None)))) is not None:
            found.setdefault(id(owner), owner)
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())
