from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from tests.ranks import ranks, run_on_ranks

from .small_transformer import TP_PLAN, VOCABULARY, loader, loss_of, model
from .ways import GLOBAL_BATCH, train


def accelerator(plan: dict[str, Any] | None, **sizes: int) -> Accelerator:
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_plan=plan, **({"tp_size": 2} | sizes)))


def losses_with(plan: dict[str, Any], dp_shard_size: int = 1, steps: int = 10) -> list[float]:
    run_by = accelerator(plan, dp_shard_size=dp_shard_size)
    net = model()
    net, optimizer, batches = run_by.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(GLOBAL_BATCH // dp_shard_size)
    )
    losses = []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        loss = loss_of(net(inputs), targets)
        run_by.backward(loss)
        run_by.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses.append(run_by.reduce(value.detach(), "mean").item())
    return losses


PLANS: dict[str, dict[str, Any]] = {
    "vocabulary": {**TP_PLAN, "head": "vocab"},
    "embeddings": {**TP_PLAN, "tokens": "embedding_rowwise", "head": "colwise_rep"},
    "torch's styles": {
        name: ColwiseParallel() if style == "colwise" else RowwiseParallel() for name, style in TP_PLAN.items()
    },
}


@pytest.mark.parametrize("dp_shard_size", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_every_style_trains_as_one_process_does(plan: str, dp_shard_size: int) -> None:
    [alone] = train("one", steps=10, clip=1.0)
    for losses in run_on_ranks(2 * dp_shard_size, losses_with, plan=PLANS[plan], dp_shard_size=dp_shard_size):
        assert losses == pytest.approx(alone, abs=1e-5)


@ranks(2)
def test_a_loss_over_a_split_vocabulary_never_holds_all_logits() -> None:
    run_by = accelerator({**TP_PLAN, "head": "vocab"})
    net = run_by.prepare(model())
    logits = net(torch.zeros(2, 4, dtype=torch.long))
    assert isinstance(logits, DTensor)
    assert logits.shape == (2, 4, VOCABULARY)
    assert logits.to_local().shape == (2, 4, VOCABULARY // 2)
    F.cross_entropy(logits.flatten(0, 1), torch.zeros(8, dtype=torch.long)).backward()
    assert net.head.weight.grad.to_local().shape == (VOCABULARY // 2, 16)


@ranks(2)
def test_a_model_that_carries_a_plan_needs_no_other() -> None:
    net = model()
    net._tp_plan = TP_PLAN
    net = accelerator(None).prepare(net)
    assert net.blocks[0].up.weight.to_local().shape == (32, 16)


@ranks(2)
def test_a_model_that_is_split_already_is_taken_as_it_is() -> None:
    run_by = accelerator(None)
    net = model()
    styles = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    parallelize_module(net, run_by.torch_device_mesh["tp"], styles)
    before = net.blocks[0].up.weight
    assert run_by.prepare(net).blocks[0].up.weight is before


@ranks(2)
def test_without_any_plan_the_form_of_one_is_shown() -> None:
    with pytest.raises(ValueError, match=r"tp_plan=.*has one.*colwise"):
        accelerator(None).prepare(model())


@ranks(2)
def test_names_and_styles_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="the style 'diagonal': choose one of colwise, rowwise"):
        accelerator({"blocks.*.up": "diagonal"}).prepare(model())
    with pytest.raises(ValueError, match="No module of the model"):
        accelerator({"layers.*.up": "colwise"}).prepare(model())


@ranks(2)
def test_widths_and_heads_that_do_not_divide_are_named_with_sizes_that_would() -> None:
    net = nn.Sequential(nn.Linear(4, 9))
    with pytest.raises(ValueError, match=r"0 has 9 outputs, which tp_size=2 does not divide. Sizes.*: 1, 3, 9"):
        accelerator({"0": "colwise"}).prepare(net)
    with pytest.raises(ValueError, match="has 9 inputs"):
        accelerator({"0": "rowwise"}).prepare(nn.Sequential(nn.Linear(9, 4)))
    heads = model()
    heads.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"num_key_value_heads=3, which tp_size=2 does not divide"):
        accelerator(TP_PLAN).prepare(heads)


@ranks(4)
def test_ranks_that_split_layers_see_the_same_samples_and_metrics_count_each_once() -> None:
    run_by = accelerator(TP_PLAN, dp_shard_size=2)
    batches = run_by.prepare(loader(4, samples=22))
    seen = [inputs[:, 0] for inputs, _ in batches for inputs in [run_by.gather_for_metrics(inputs)]]
    assert torch.equal(torch.cat(seen), torch.cat([inputs[:, 0] for inputs, _ in loader(4, samples=22)]))
    assert run_by.data_parallel_rank == run_by.process_index // 2
    assert run_by.tensor_parallel_rank == run_by.process_index % 2


@ranks(2)
def test_shuffled_samples_are_the_same_for_ranks_that_share_them() -> None:
    run_by = accelerator(TP_PLAN)
    torch.manual_seed(run_by.process_index)
    plain = torch.utils.data.DataLoader(torch.arange(16), batch_size=4, shuffle=True)
    mine = torch.cat(list(run_by.prepare(plain)))
    theirs = run_by.gather(mine).reshape(2, -1)
    assert torch.equal(theirs[0], theirs[1])
    assert sorted(mine.tolist()) == list(range(16))


@ranks(4)
def test_a_schedule_advances_by_the_batches_that_differ() -> None:
    run_by = accelerator(TP_PLAN, dp_shard_size=2)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    net, optimizer, schedule = run_by.prepare(net, optimizer, schedule)
    run_by.backward(net(torch.zeros(1, 4, dtype=torch.long)).sum())
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.98]
