"""The same script on one process and on many."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from meshwright import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    LocalSGD,
)
from tests.ranks import ranks, run_on_ranks
from tests.training import loss_of, loss_trace, make_data, make_model, parameters_of

STEPS, BATCH = 50, 4


def by_hand(rank: int, world_size: int, accumulation: int) -> list[torch.Tensor]:
    """The DDP loop that a careful person writes without any library."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = make_data(STEPS * BATCH * world_size)
    for step in range(STEPS):
        start = (step * world_size + rank) * BATCH
        batch = data[start : start + BATCH]
        closes = (step + 1) % accumulation == 0 or step == STEPS - 1
        with nullcontext() if closes else model.no_sync():
            loss = loss_of(model, batch)
            (loss / accumulation if accumulation > 1 else loss).backward()
        if closes:
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


def with_the_library(accumulation: int) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(STEPS * BATCH * accelerator.num_processes), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model, DistributedDataParallel)
    return parameters_of(model)


@pytest.mark.parametrize("accumulation", [1, 4])
@ranks(2, 4)
def test_parameters_equal_a_hand_written_ddp_loop_to_the_bit(accumulation: int, world_size: int) -> None:
    ours = with_the_library(accumulation)
    theirs = by_hand(dist.get_rank(), world_size, accumulation)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], parameters_of(make_model())[0]), "nothing was trained"


def test_one_two_and_four_processes_have_the_same_losses_at_equal_global_batch() -> None:
    alone = loss_trace(global_batch=16, steps=40)
    assert alone[-1] < alone[0]
    for world_size in (2, 4):
        for trace in run_on_ranks(world_size, loss_trace, global_batch=16, steps=40):
            assert trace == pytest.approx(alone, abs=1e-5)


@ranks(2)
def test_accumulating_leaves_gradients_unreduced_until_the_window_closes() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    local = torch.full((1, 12), float(accelerator.process_index + 1))
    for micro_batch in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(local).sum())
        gradients = accelerator.gather(model.module[3].weight.grad[None])
        assert torch.equal(gradients[0], gradients[1]) == (micro_batch == 1)
        assert accelerator.sync_gradients == (micro_batch == 1)


@ranks(2)
def test_sync_each_batch_reduces_every_micro_batch() -> None:
    from meshwright import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(make_model())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 12), float(accelerator.process_index + 1))).sum())
    gradients = accelerator.gather(model.module[3].weight.grad[None])
    assert torch.equal(gradients[0], gradients[1])
    assert not accelerator.sync_gradients


@ranks(2)
def test_sync_can_be_triggered_in_the_backward_pass_after_a_forward_in_no_sync() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    local = torch.full((1, 12), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        loss = model(local).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    gradients = accelerator.gather(model.module[3].weight.grad[None])
    assert torch.equal(gradients[0], gradients[1])


@ranks(2)
def test_several_models_accumulate_together() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(make_model(seed=0), make_model(seed=1))
    local = torch.full((1, 12), float(accelerator.process_index + 1))
    for closes in (False, True):
        with accelerator.accumulate(first, second):
            accelerator.backward(first(local).sum() + second(local).sum())
        for model in (first, second):
            gradients = accelerator.gather(model.module[3].weight.grad[None])
            assert torch.equal(gradients[0], gradients[1]) == closes


@pytest.mark.parametrize("kind", ["two losses of one output", "two outputs", "accumulating"])
@ranks(2)
def test_a_second_backward_pass_is_averaged_too(kind: str) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    plain = make_model()
    batches = [torch.full((1, 12), float(rank + 1)) for rank in range(2)]
    for _ in range(2):
        output = model(batches[accelerator.process_index])
        other = model(batches[accelerator.process_index] + 1) if kind == "two outputs" else output
        with accelerator.no_sync(model) if kind == "accumulating" else nullcontext():
            accelerator.backward(output.sum(), retain_graph=True)
        accelerator.backward(other.square().sum())
    for _ in range(2):
        for batch in batches:
            output, other = plain(batch), plain(batch + 1 if kind == "two outputs" else batch)
            ((output.sum() + other.square().sum()) / 2).backward()
    for own, expected in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


HOOKS = DDPCommunicationHookType


@pytest.mark.parametrize(
    ("hook", "wrapper", "tolerance"),
    [
        (HOOKS.FP16, HOOKS.NO, 1e-2),
        (HOOKS.BF16, HOOKS.NO, 5e-2),
        (HOOKS.POWER_SGD, HOOKS.NO, None),
        (HOOKS.POWER_SGD, HOOKS.FP16, None),
        (HOOKS.POWER_SGD, HOOKS.BF16, None),
    ],
)
@ranks(2)
def test_communication_hooks_train_and_keep_ranks_equal(hook: str, wrapper: str, tolerance: float | None) -> None:
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)
    if hook == HOOKS.POWER_SGD:
        handler.comm_state_option = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_data(160), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    gathered = accelerator.gather(torch.cat([p.reshape(-1) for p in parameters_of(model)])[None])
    assert torch.equal(gathered[0], gathered[1])
    assert sum(losses[-10:]) < sum(losses[:10])
    if tolerance is not None:
        exact = plain_parameters_after_three_epochs(accelerator)
        assert torch.allclose(gathered[0], exact, atol=tolerance)


def plain_parameters_after_three_epochs(accelerator: Accelerator) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = accelerator.prepare(DataLoader(make_data(160), batch_size=8))
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return torch.cat([p.reshape(-1) for p in parameters_of(model)])


@ranks(2)
def test_ddp_options_reach_ddp() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
    model = Accelerator(kwargs_handlers=[handler]).prepare(make_model())
    assert model.find_unused_parameters
    assert model.gradient_as_bucket_view


@ranks(2)
def test_a_frozen_or_evaluated_model_is_not_wrapped() -> None:
    accelerator = Accelerator()
    assert isinstance(accelerator.prepare(make_model().requires_grad_(False)), nn.Sequential)
    assert isinstance(accelerator.prepare_model(make_model(), evaluation_mode=True), nn.Sequential)


@ranks(2)
def test_unwrap_model_and_state_dict_give_the_users_own_names() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    own = make_model()
    model = accelerator.prepare(own)
    assert accelerator.unwrap_model(model) is own
    assert list(accelerator.get_state_dict(model)) == list(make_model().state_dict())
    assert next(iter(accelerator.get_state_dict(model, unwrap=False))).startswith("module.")


@ranks(2)
def test_join_uneven_inputs_lets_ranks_have_different_numbers_of_batches() -> None:
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_data(5), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == (3 if accelerator.process_index == 0 else 2)
    assert len(loader) == 3, "even batches are restored"


@ranks(2)
def test_joining_says_which_loaders_do_not_become_uneven() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    model, _ = accelerator.prepare(make_model(), DataLoader(range(5)))
    accelerator.dataloader_config.dispatch_batches = None
    accelerator.prepare(DataLoader(range(5)))
    with (
        pytest.warns(UserWarning, match="only supported for map-style datasets .* 1 of 2 prepared"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accelerator.join_uneven_inputs([model]):
            pass


@ranks(2)
def test_local_sgd_averages_parameters_every_few_steps() -> None:
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_data(64), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    equal_after = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            both = accelerator.gather(model.module[0].weight.detach()[None])
            equal_after.append(torch.equal(both[0], both[1]))
    assert equal_after == [False, False, False, True] * 2


@ranks(2)
def test_triggers_set_on_one_rank_are_seen_by_all() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger(), "a trigger is seen once"


@ranks(2)
def test_profile_writes_one_trace_per_rank(tmp_path: object) -> None:
    from pathlib import Path

    from meshwright import ProfileKwargs

    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    accelerator = Accelerator(kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(8) + 1
    assert any(event.name == "aten::add" for event in profiler.events())
    assert (Path(str(tmp_path)) / f"profile_{accelerator.process_index}.json").exists()


@ranks(2)
def test_a_model_spread_by_a_device_map_is_refused() -> None:
    model = make_model()
    model.hf_device_map = {"0": 0, "3": "cpu"}
    with pytest.raises(ValueError, match="spreads it over several devices"):
        Accelerator().prepare(model)


@ranks(2)
def test_end_training_leaves_the_group() -> None:
    accelerator = Accelerator()
    assert dist.is_initialized()
    accelerator.end_training()
    assert not dist.is_initialized()
