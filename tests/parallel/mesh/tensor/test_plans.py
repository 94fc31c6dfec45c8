from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate.utils import get_model_tp_size
from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks, run_on_ranks
from tests.sizes import cases, sized

from ...beside_one_process import off_by
from ...small_transformer import TP_PLAN, VOCABULARY, loader, loss_of, model
from ...ways import GLOBAL_BATCH, train

STEPS = sized(gate=3, nightly=10)


def accelerator(plan: dict[str, Any] | None, **sizes: int) -> Accelerator:
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_plan=plan, **({"tp_size": 2} | sizes)))


def losses_with(plan: dict[str, Any], dp_shard_size: int = 1, steps: int = STEPS) -> list[float]:
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
        losses.append(run_by.reduce(loss.detach(), "mean").item())
    return losses


PLANS: dict[str, dict[str, Any]] = {
    "vocabulary": {**TP_PLAN, "head": "vocab"},
    "embeddings": {**TP_PLAN, "tokens": "embedding_rowwise", "head": "colwise_rep"},
    "torch's styles": {
        name: ColwiseParallel() if style == "colwise" else RowwiseParallel() for name, style in TP_PLAN.items()
    },
}


@pytest.mark.parametrize(
    ("plan", "dp_shard_size"),
    cases(gate=[("vocabulary", 2), ("embeddings", 2), ("torch's styles", 1)], nightly=product(PLANS, (1, 2))),
)
def test_every_style_trains_as_one_process_does(plan: str, dp_shard_size: int) -> None:
    [alone] = train("one", steps=STEPS, clip=1.0)
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


@ranks(2, 4)
def test_a_loss_over_a_split_vocabulary_is_reduced_and_gathered_as_any_other(world_size: int) -> None:
    run_by = accelerator({**TP_PLAN, "head": "vocab"}, dp_shard_size=world_size // 2)
    alone, net = model(), run_by.prepare(model())
    tokens = torch.full((2, 4), run_by.data_parallel_rank)
    loss, wanted = loss_of(net(tokens), tokens), loss_of(alone(tokens), tokens).detach()
    assert isinstance(loss, DTensor)
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    torch.testing.assert_close(run_by.reduce(loss, "mean"), run_by.reduce(wanted, "mean"))
    torch.testing.assert_close(run_by.reduce({"loss": loss}, "sum"), run_by.reduce({"loss": wanted}, "sum"))
    torch.testing.assert_close(run_by.gather(loss), run_by.gather(wanted))
    torch.testing.assert_close(run_by.gather_for_metrics(loss), run_by.gather_for_metrics(wanted))
    torch.testing.assert_close(
        run_by.gather_for_metrics({"losses": loss.detach().repeat(2)}),
        run_by.gather_for_metrics({"losses": wanted.repeat(2)}),
    )


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


def _presharded(size: int = 2) -> nn.Module:
    net = model()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()})
    return net


@ranks(2)
def test_a_model_that_was_split_before_is_refused_with_the_setting_that_would_take_it() -> None:
    plain = Accelerator(cpu=True)
    needs_axis = r"is split: blocks.0.up.weight .* ranks 0, 1 .* asks for .*ParallelismConfig\(tp_size=2\)"
    with pytest.raises(ValueError, match=needs_axis):
        plain.prepare(_presharded())
    sharding = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(ValueError, match=needs_axis):
        sharding.prepare(_presharded())


@ranks(4)
def test_a_model_that_was_split_over_more_processes_is_refused() -> None:
    run_by = accelerator(None, dp_shard_size=2)
    with pytest.raises(ValueError, match=r"of ranks 0, 1, 2, 3 .* asks for the mesh \(dp_shard=2, tp=2\)"):
        run_by.prepare(_presharded(4))


def test_the_number_of_processes_that_split_a_model_is_found_where_libraries_note_it() -> None:
    model: Any = SimpleNamespace()
    assert get_model_tp_size(model) is None
    for noted in (SimpleNamespace(tp_size=2), {"tp_size": 2}):  # as transformers 5 has it, and as its file has it
        model = SimpleNamespace(tp_size=None, config=SimpleNamespace(distributed_config=noted))
        assert get_model_tp_size(model) == 2
    model.tp_size = 4
    assert get_model_tp_size(model) == 4


@ranks(2)
def test_recurrent_layers_are_refused_where_sequences_are_split() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 4))
    by_context = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(ValueError, match="cp_size=2 with 2, a LSTM, cannot be used: a recurrent layer"):
        by_context.prepare(net)
    with pytest.raises(ValueError, match="splits sequences with 2, a LSTM, cannot be used"):
        accelerator({"0": "colwise", "1": "sequence"}).prepare(net)


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


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


class NormedEmbedding(nn.Embedding):
    """An embedding that normalises its vectors, as Inkling has it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(super().forward(indices))
        return normed


@ranks(2)
def test_layers_that_cannot_be_split_are_refused_by_name() -> None:
    net = nn.Sequential(Conv1D(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"splits 0, which is a Conv1D: only nn.Linear and nn.Embedding"):
        accelerator({"0": "colwise", "1": "rowwise"}).prepare(net)
    net = nn.Sequential(NormedEmbedding(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"splits 0, a NormedEmbedding with weights in modules of its own \(norm\)"):
        accelerator({"0": "embedding_rowwise"}).prepare(net)


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


def _pipelined_off_by() -> dict[str, float]:
    plan = {**TP_PLAN, "tokens": "embedding_rowwise", "head": "colwise_rep"}
    return off_by(accelerator(plan, pp_size=2), model())


def test_a_plan_may_name_layers_that_only_one_stage_of_a_pipeline_has() -> None:
    for found in run_on_ranks(4, _pipelined_off_by):
        assert max(found.values()) < 1e-5, found


def tied(plan: dict[str, Any] | None, load_from: str | None = None, save_to: str | None = None) -> list[float]:
    run_by = accelerator(plan) if plan else Accelerator(cpu=True)
    net = model(tied=True)
    net, optimizer, batches = run_by.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(GLOBAL_BATCH, samples=GLOBAL_BATCH * 3)
    )
    if load_from is not None:
        run_by.load_state(load_from)
    losses = []
    for inputs, targets in batches:
        loss = loss_of(net(inputs), targets)
        run_by.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run_by.reduce(loss.detach(), "mean").item())
    if save_to is not None:
        run_by.save_state(save_to)
    assert net.head.weight is net.tokens.weight
    return losses


def test_a_tied_model_goes_on_from_its_checkpoint_split_or_whole(tmp_path: Path) -> None:
    plan = {**TP_PLAN, "head": "colwise_rep"}
    [[untrained, *_], _] = run_on_ranks(2, tied, plan=plan, save_to=str(tmp_path / "split"))
    [[first, *_], _] = split = run_on_ranks(2, tied, plan=plan, load_from=str(tmp_path / "split"))
    [whole] = run_on_ranks(1, tied, plan=None, load_from=str(tmp_path / "split"))
    assert first < 0.9 * untrained
    for losses in split:
        assert losses == pytest.approx(whole, abs=1e-5)
    run_on_ranks(1, tied, plan=None, save_to=str(tmp_path / "whole"))
    for losses in run_on_ranks(2, tied, plan=plan, load_from=str(tmp_path / "whole")):
        assert losses == pytest.approx(whole, abs=1e-5)


class Adapted(nn.Module):
    """A layer with LoRA, in the form of PEFT."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        result: torch.Tensor = self.base_layer(x) + 2.0 * adapted
        return result


class Adapters(nn.Module):
    """A model under the names that PEFT gives it."""

    def __init__(self, *, magnitudes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.ModuleDict({"up": Adapted(nn.Linear(4, 8)), "down": Adapted(nn.Linear(8, 4))})
        if magnitudes:
            inner["up"].lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 8)})
        self.base_model = nn.ModuleDict({"model": inner})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.base_model["model"]
        result: torch.Tensor = inner["down"](torch.tanh(inner["up"](x)))
        return result


@pytest.mark.parametrize(
    "plan", [{"up": "colwise", "down": "rowwise"}, {"up": "colwise_rep"}, {"up": "colwise_rep", "down": "rowwise_rep"}]
)
@ranks(2)
def test_layers_with_lora_are_split_with_their_adapters(plan: dict[str, str]) -> None:
    plain, net = Adapters().double(), Adapters().double()
    run_by = accelerator(plan)
    net, optimizer = run_by.prepare(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5))
    by_itself = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    data = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        plain(data).square().sum().backward()
        run_by.backward(net(data).square().sum())
        for each in (by_itself, optimizer):
            each.step()
            each.zero_grad()
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        found = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(found, expected)


@ranks(2)
def test_layers_whose_weight_is_computed_are_refused_by_name() -> None:
    for wrap in (torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm):
        net = nn.ModuleDict({"up": wrap(nn.Linear(4, 8)), "down": nn.Linear(8, 4)})
        with pytest.raises(UnsupportedSettingError, match=r"splits up cannot.*weight_norm.*remove_parametrizations"):
            accelerator({"up": "colwise", "down": "rowwise"}).prepare(net)
    with pytest.raises(UnsupportedSettingError, match=r"up, a Adapted of PEFT.*lora_magnitude_vector.*use_dora=False"):
        accelerator({"up": "colwise", "down": "rowwise"}).prepare(Adapters(magnitudes=True))
