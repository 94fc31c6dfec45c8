"""Plugins and kwargs handlers: published defaults, what reaches torch, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright import PartialState
from meshwright.config.plugins.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from tests.ranks import ranks

DDP_DEFAULTS = {
    "dim": 0,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}

DEFAULTS: list[tuple[type, dict[str, Any]]] = [
    (AutocastKwargs, {"enabled": True, "cache_enabled": None}),
    (
        GradScalerKwargs,
        {
            "init_scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "enabled": True,
        },
    ),
    (InitProcessGroupKwargs, {"backend": "nccl", "init_method": None, "timeout": None}),
    (
        DistributedDataParallelKwargs,
        DDP_DEFAULTS | {"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}},
    ),
    (
        ProfileKwargs,
        {
            "activities": None,
            "schedule_option": None,
            "on_trace_ready": None,
            "record_shapes": False,
            "profile_memory": False,
            "with_stack": False,
            "with_flops": False,
            "with_modules": False,
            "output_trace_dir": None,
        },
    ),
    (
        GradientAccumulationPlugin,
        {"num_steps": None, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False},
    ),
    (
        DataLoaderConfiguration,
        {
            "split_batches": False,
            "dispatch_batches": None,
            "even_batches": True,
            "use_seedable_sampler": False,
            "data_seed": None,
            "non_blocking": False,
            "use_stateful_dataloader": False,
            "constant_memory_shuffle": False,  # ours, after the published ones
            "order": None,
        },
    ),
    (
        ProjectConfiguration,
        {
            "project_dir": None,
            "logging_dir": None,
            "automatic_checkpoint_naming": False,
            "total_limit": None,
            "iteration": 0,
            "save_on_each_node": False,
        },
    ),
]


@pytest.mark.parametrize(("plugin", "defaults"), DEFAULTS)
def test_fields_come_in_the_published_order_with_the_published_defaults(plugin: Any, defaults: dict[str, Any]) -> None:
    made = plugin()
    assert [(f.name, getattr(made, f.name)) for f in fields(plugin)] == list(defaults.items())


def test_to_kwargs_hands_on_only_what_was_changed() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=65536.0).to_kwargs() == {}
    assert GradScalerKwargs(growth_interval=5, enabled=False).to_kwargs() == {"growth_interval": 5, "enabled": False}
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=3)).to_kwargs() == {"timeout": timedelta(seconds=3)}


def test_to_dict_gives_copies() -> None:
    handler = ProfileKwargs(schedule_option={"wait": 1})
    handler.to_dict()["schedule_option"]["wait"] = 7
    assert handler.schedule_option == {"wait": 1}


def test_a_handler_of_another_library_works_the_same() -> None:
    @dataclass
    class Their(KwargsHandler):
        first: int = 1
        second: str = "x"

    assert Their(second="y").to_kwargs() == {"second": "y"}


def test_ddp_receives_its_own_options_and_not_those_of_the_gradient_hooks() -> None:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, comm_hook="fp16", comm_wrapper="bf16", comm_state_option={"a": 1}
    )
    assert handler.to_dict() == DDP_DEFAULTS | {"find_unused_parameters": True}
    assert handler.to_kwargs() == {"find_unused_parameters": True}
    assert "comm_hook" in handler.to_dict(ignore_keys=())


def gradients_of_a_wide_layer(handler: DistributedDataParallelKwargs, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's gradient as DDP reduced it, and the exact mean over the ranks."""
    state = PartialState()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    handler.register_comm_hook(model)
    torch.manual_seed(1 + state.process_index)
    for _ in range(steps):
        model.zero_grad()
        inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
        (model(inputs) * targets).sum().backward()
    exact = targets.T @ inputs
    dist.all_reduce(exact)
    reduced = model.module.weight.grad
    assert reduced is not None
    return reduced, exact / state.num_processes


@ranks(2)
def test_gradients_travel_compressed_and_arrive_as_their_mean() -> None:
    exact_needed = {"no": True, "fp16": False, "bf16": False}
    for name, exact_wanted in exact_needed.items():
        reduced, mean = gradients_of_a_wide_layer(DistributedDataParallelKwargs(comm_hook=name), steps=1)
        torch.testing.assert_close(reduced, mean, atol=0.15, rtol=0.02)
        is_exact = bool((reduced - mean).abs().max() < 1e-5)
        assert is_exact == exact_wanted, name


@ranks(2)
def test_power_sgd_reads_its_state_option_and_can_be_wrapped() -> None:
    for wrapper in ("no", "fp16", "bf16"):
        handler = DistributedDataParallelKwargs(
            comm_hook="power_sgd",
            comm_wrapper=wrapper,
            comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
        )
        uncompressed, mean = gradients_of_a_wide_layer(handler, steps=1)
        torch.testing.assert_close(uncompressed, mean, atol=0.15, rtol=0.02)
        low_rank, mean = gradients_of_a_wide_layer(handler, steps=4)
        singular = torch.linalg.svdvals(low_rank)
        assert singular[1] < 0.02 * singular[0], f"wrapped in {wrapper}: the gradient is not of rank one"
        assert torch.linalg.svdvals(mean)[1] > 0.1 * torch.linalg.svdvals(mean)[0]


@ranks(2)
def test_an_unknown_gradient_hook_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fp17' is not a DDPCommunicationHookType: choose one of no, fp16"):
        gradients_of_a_wide_layer(DistributedDataParallelKwargs(comm_hook="fp17"), steps=1)


def test_a_built_profiler_records_what_was_asked_for() -> None:
    ready: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
        record_shapes=True,
        with_flops=True,
    )
    with handler.build() as profiler:
        for _ in range(4):
            torch.mm(torch.ones(4, 8), torch.ones(8, 2))
            profiler.step()
    assert ready == [4]
    (multiplied,) = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert multiplied.count == 2, "the two active steps"
    assert multiplied.input_shapes == [[4, 8], [8, 2]]
    assert multiplied.flops == 2 * (2 * 4 * 8 * 2)


def test_a_profiler_without_options_records_the_cpu() -> None:
    with ProfileKwargs().build() as profiler:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert "aten::mm" in {event.key for event in profiler.key_averages()}


def test_an_unknown_activity_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"activities has unknown \['tpu'\]; choose from \['cpu', 'cuda'"):
        ProfileKwargs(activities=["cpu", "tpu"]).build()


def test_logs_go_to_the_project_directory_unless_they_have_their_own() -> None:
    assert ProjectConfiguration("run").logging_dir == "run"
    assert ProjectConfiguration("run", "logs").logging_dir == "logs"
    configuration = ProjectConfiguration()
    configuration.set_directories("later")
    assert (configuration.project_dir, configuration.logging_dir) == ("later", "later")


def test_a_wrapper_without_a_hook_is_warned_about() -> None:
    handler = DistributedDataParallelKwargs(comm_wrapper="fp16")
    with pytest.warns(UserWarning, match="comm_wrapper=fp16 has no effect without a comm_hook"):
        handler.register_comm_hook(torch.nn.Linear(1, 1))
