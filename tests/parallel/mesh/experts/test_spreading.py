"""Experts that are spread over processes train as on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelConfig
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night

from . import moe

WAYS: list[Any] = [
    (2, {"dp_shard_size": 2, "ep_size": 2}),
    (2, {"dp_replicate_size": 2, "ep_size": 2}),
    (2, {"tp_size": 2, "ep_size": 2}),
    at_night(4, {"dp_shard_size": 4, "ep_size": 2}),
    at_night(4, {"dp_shard_size": 4, "ep_size": 4}),
    (4, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
    at_night(4, {"dp_replicate_size": 4, "ep_size": 2}),
    at_night(4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}),
    at_night(4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
    at_night(4, {"dp_replicate_size": 2, "tp_size": 2, "ep_size": 2}),
    at_night(4, {"dp_shard_size": 2, "cp_size": 2, "ep_size": 4}),
    at_night(4, {"dp_shard_size": 2, "cp_size": 2, "ep_size": 2}),
    at_night(4, {"cp_size": 2, "tp_size": 2, "ep_size": 4}),
    (2, {"sp_size": 2, "ep_size": 2}),
    at_night(4, {"dp_shard_size": 2, "sp_size": 2, "ep_size": 2}),
    at_night(8, {"dp_shard_size": 2, "sp_size": 2, "tp_size": 2, "ep_size": 8}),
    (8, {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": 4}),
    at_night(8, {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": 8}),
    at_night(8, {"dp_shard_size": 8, "ep_size": 8}),
    at_night(8, {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
]


@pytest.mark.parametrize(("world_size", "sizes"), WAYS)
def test_gradients_norm_and_parameters_are_those_of_one_process(world_size: int, sizes: dict[str, int]) -> None:
    for worst in run_on_ranks(world_size, moe.off_by, sizes=sizes):
        assert max(worst.values()) < 1e-5, worst


SHARDED = {"dp_shard_size": 2, "ep_size": 2}


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, SHARDED),
        at_night(4, {"dp_shard_size": 4, "ep_size": 2}),
        (4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}),
    ],
)
def test_a_process_may_get_no_tokens(world_size: int, sizes: dict[str, int]) -> None:
    for worst in run_on_ranks(world_size, moe.off_by, sizes=sizes, options={"skewed": True}):
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    "fields",
    [{}, at_night({"activation_checkpointing": True}), at_night({"cpu_offload": True, "reshard_after_forward": False})],
)
def test_gradients_accumulate_by_every_setting_of_fsdp(fields: dict[str, Any]) -> None:
    sizes = {"dp_shard_size": 4, "ep_size": 2}
    plugin = FullyShardedDataParallelPlugin(**fields)
    for worst in run_on_ranks(4, moe.off_by, sizes=sizes, micro_batches=3, fsdp_plugin=plugin):
        assert max(worst.values()) < 1e-5, worst


@ranks(2)
def test_experts_are_recomputed_and_counted_once() -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    accelerator = Accelerator(cpu=True, parallelism_config=moe.mesh(**SHARDED), fsdp_plugin=plugin)
    net = accelerator.prepare(moe.model())
    assert accelerator.expert_counts(net)["blocks.0.experts"].tolist() == [0] * moe.EXPERTS
    inputs, targets = moe.batch_of(0)
    moe.own_loss(accelerator, net, inputs, targets)
    counts = accelerator.expert_counts(net)
    alone = moe.model()
    chosen: list[Tensor] = []
    for block in alone.blocks:
        block.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    alone(inputs, torch.arange(inputs.shape[1]).expand_as(inputs))
    wanted = [index.flatten().bincount(minlength=moe.EXPERTS).tolist() for index in chosen]
    assert [count.tolist() for count in counts.values()] == wanted
    assert list(counts) == ["blocks.0.experts", "blocks.1.experts"]
    assert accelerator.expert_counts(net)["blocks.0.experts"].sum() == 0, "since the last call"


@ranks(2)
def test_every_process_holds_its_experts_only() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=moe.mesh(**SHARDED))
    whole = moe.model().blocks[0].experts.up.detach()
    net = accelerator.prepare(moe.model())
    up = net.blocks[0].experts.up
    half = moe.EXPERTS // 2
    first = half * accelerator.process_index
    torch.testing.assert_close(up.to_local(), whole[first : first + half])
    assert up.shape == whole.shape
    assert isinstance(accelerator.get_state_dict(net), dict)


@ranks(2)
def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32() -> None:
    losses = {}
    for precision in ("no", "bf16"):
        accelerator = Accelerator(cpu=True, parallelism_config=moe.mesh(**SHARDED), mixed_precision=precision)
        net = accelerator.prepare(moe.model())
        losses[precision] = float(moe.own_loss(accelerator, net, *moe.batch_of(0)))
        assert net.blocks[0].experts.up.dtype == net.blocks[0].experts.up.grad.dtype == torch.float32
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.02)


def balance_off_by(sizes: dict[str, int]) -> tuple[float, float, float]:
    """Return how far our loss, its gradient, and the mean of each process's own loss are from those of all tokens."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(8, 6, 4, generator=generator) for _ in range(2)]
    mask = (torch.rand(8, 6, generator=generator) > 0.3).long()

    def by_hand(layers: list[Tensor], mask: Tensor) -> Tensor:
        each = torch.cat([layer.reshape(-1, 4).softmax(-1) for layer in layers])
        counted = mask.flatten().repeat(len(layers)).float()
        hits = torch.zeros_like(each).scatter_(1, each.topk(2).indices, 1.0)
        return 4 * ((counted @ hits / counted.sum()) * (counted @ each / counted.sum())).sum()

    whole = [layer.clone().requires_grad_() for layer in logits]
    wanted = by_hand(whole, mask)
    wanted.backward()
    shares, share = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    own = [layer.chunk(shares)[share].clone().requires_grad_() for layer in logits]
    loss = accelerator.load_balancing_loss(tuple(own), 2, mask.chunk(shares)[share])
    loss.backward()
    alone = by_hand([layer.detach() for layer in own], mask.chunk(shares)[share])
    gradient = max(
        float((mine.grad / shares - layer.grad.chunk(shares)[share]).abs().max())  # type: ignore[union-attr]
        for mine, layer in zip(own, whole, strict=True)
    )
    mean, of_means = accelerator.reduce(loss.detach(), "mean"), accelerator.reduce(alone, "mean")
    return float((mean - wanted).abs()), gradient, float((of_means - wanted).abs())


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_routers_loss_is_that_of_the_global_batch(world_size: int) -> None:
    for loss, gradient, of_means in run_on_ranks(world_size, balance_off_by, sizes={"dp_shard_size": world_size}):
        assert loss < 1e-6
        assert gradient < 1e-7
        assert (of_means > 1e-3) == (world_size > 1), "what each process computes alone is another loss"


# --- refusals -------------------------------------------------------------------------------------------------------


class WeightsFirst(moe.Experts):
    """Experts that take weighted tokens, which is not the same as weighting what they return."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for choice in range(index.shape[1]):
            one = torch.ones_like(weights[:, choice : choice + 1])
            output = output + super().forward(tokens * weights[:, choice : choice + 1], index[:, choice, None], one)
        return output


class SharedScale(moe.Experts):
    """Experts with a parameter that all of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class WithBuffer(moe.Experts):
    """Experts with a buffer per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(moe.EXPERTS))


def prepared_with(experts: type[nn.Module], **fields: Any) -> Any:
    accelerator = Accelerator(cpu=True, parallelism_config=moe.mesh(**SHARDED), **fields)
    net = moe.model()
    net.blocks[0].experts = experts()
    return accelerator, accelerator.prepare(net)


@ranks(2)
def test_experts_that_cannot_be_spread_are_refused_by_name() -> None:
    for experts, said in {
        SharedScale: r"blocks.0.experts, a SharedScale,.* its scale of \(3,\) has no leading dimension of 8 experts",
        WithBuffer: r"blocks.0.experts, a WithBuffer,.* its buffer seen",
        nn.ReLU: r"blocks.0.experts, a ReLU,.* it has no parameters",
    }.items():
        with pytest.raises(ValueError, match=said):
            prepared_with(experts)
    with pytest.raises(ValueError, match=r"blocks.0.experts has 3 experts, which ep_size=2 does not divide.*: 1, 3\."):
        prepared_with(lambda: moe.Experts(3))  # type: ignore[arg-type]


@ranks(2)
def test_experts_with_another_meaning_of_weights_are_refused_in_the_first_pass() -> None:
    accelerator, net = prepared_with(WeightsFirst)
    with pytest.raises(ValueError, match=r"blocks.0.experts, a WeightsFirst,.* not the sum .* of weight x expert"):
        moe.own_loss(accelerator, net, *moe.batch_of(0))


PLAN: dict[str, Any] = {"ep_plan": moe.EP_PLAN}
SPLIT: dict[str, Any] = {"tp_plan": moe.TP_PLAN, **PLAN}
ON_TWO: dict[str, dict[str, Any]] = {
    r"ep_size=2 with MoeTransformer .* no module with experts was found.*ep_plan": SHARDED,
    r"no module .* name in the plan": {**SHARDED, "ep_plan": {"layers.*.moe": "experts"}},
    r"the style 'rowwise': the one style": {**SHARDED, "ep_plan": {"blocks.*.experts": "rowwise"}},
    r"ep_size=3\): .* the 2 processes that share .*: 1, 2\.": {**SHARDED, **PLAN, "ep_size": 3},
    r"the 2 processes that copy .*: 1, 2\.": {"dp_replicate_size": 2, **PLAN, "ep_size": 3},
    r"ep_size=2 with pp_size=2": {"pp_size": 2, **PLAN, "ep_size": 2},
    r"sequence_parallel=True": {
        "tp_size": 2, "ep_size": 2, "tp_handler": TorchTensorParallelConfig(sequence_parallel=True), **SPLIT,
    },
}  # fmt: skip


def refusals_of(meshes: list[dict[str, Any]]) -> list[str]:
    """Return what is said when a model is prepared on each mesh."""
    return [refusal_of(ParallelismConfig(**mesh)) for mesh in meshes]


def refusal_of(mesh: ParallelismConfig, device: str = "cpu", **options: Any) -> str:
    """Return what is said when a model is prepared."""
    with pytest.raises(ValueError, match=r"ep_|sequence_parallel|plan|ignored") as refusal, torch.device(device):
        Accelerator(cpu=True, parallelism_config=mesh, **options).prepare(moe.model())
    return str(refusal.value)


def test_meshes_that_cannot_hold_experts_are_refused() -> None:
    for messages in run_on_ranks(2, refusals_of, meshes=list(ON_TWO.values())):
        for said, message in zip(ON_TWO, messages, strict=True):
            assert re.search(said, message), message
    [message] = run_on_ranks(4, refusals_of, meshes=[{"tp_size": 4, "ep_size": 2, **SPLIT}])[0]
    assert re.search(r"ep_size=2 with tp_size=4 and no axis of data .* ep_size=4", message)


@ranks(2)
def test_weights_must_be_on_every_process() -> None:
    assert "a model on the meta device" in refusal_of(moe.mesh(**SHARDED), "meta")
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    assert "cpu_ram_efficient_loading=True with ep_size=2" in refusal_of(moe.mesh(**SHARDED), fsdp_plugin=plugin)


@ranks(2)
def test_ignored_experts_are_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(ignored_modules=r"blocks\.1")
    assert "ignored_modules with blocks.1.experts" in refusal_of(moe.mesh(**SHARDED), fsdp_plugin=plugin)


def test_the_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "4")
    config = ParallelismConfig(dp_shard_size=2, tp_size=4)
    assert config.ep_size == 4
    assert config.total_size == 8, "experts add no processes"
    assert config.expert_sizes == (1, 2, 4)
