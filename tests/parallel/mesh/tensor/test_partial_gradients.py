"""Layers that a plan of tensor parallelism leaves out get the gradients that one process would give them."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from meshwright import Accelerator, ParallelismConfig
from tests.ranks import ranks, run_on_ranks
from tests.sizes import cases

from ...beside_one_process import off_by, one_step
from ...small_transformer import VOCABULARY, WIDTH

PLAN: dict[str, Any] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HEAD = 4


class Block(nn.Module):
    """A norm of every kind: before the split layers, per head between them, and after them; and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(HEAD), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        heads = self.up(self.before(x)).unflatten(-1, (-1, HEAD))
        gated = torch.tanh(self.between(heads).flatten(-2)) * (1 + self.scale)
        return x + self.after(self.down(gated))


class Model(nn.Module):
    """Embeddings, blocks and a head that is the embeddings again."""

    def __init__(self, tied: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


def model(kind: type[nn.Module] = Model, **options: Any) -> Any:
    """Make the same model every time, without values that are equal by chance."""
    torch.manual_seed(0)
    made = kind(**options)
    with torch.no_grad():
        for param in made.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return made


def accelerator(plan: dict[str, Any], accumulation: int = 1, **sizes: int) -> Accelerator:
    config = ParallelismConfig(tp_plan=plan, **({"tp_size": 2} | sizes))
    return Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=accumulation)


PLANS: dict[str, dict[str, Any]] = {
    "neither": PLAN,
    "head": {**PLAN, "head": "colwise_rep"},
    "embedding": {**PLAN, "tokens": "rowwise"},
    "both": {**PLAN, "tokens": "embedding_rowwise", "head": "colwise_gather_output"},
    "vocabulary": {**PLAN, "head": "vocab"},
}


def tied_off_by(plan: str, dp_shard_size: int) -> dict[str, float]:
    run_by, net = accelerator(PLANS[plan], dp_shard_size=dp_shard_size), model()
    found = off_by(run_by, net)
    assert net.head.weight is net.tokens.weight
    return found


SPREAD = ("both", "vocabulary")
"""Plans that the gate has on 2 x 2 ranks."""


@pytest.mark.parametrize(
    ("plan", "dp_shard_size"),
    cases(
        gate=[*((plan, 1) for plan in PLANS if plan not in SPREAD), *((plan, 2) for plan in SPREAD)],
        nightly=product(PLANS, (1, 2)),
    ),
)
def test_tied_weights_and_norms_between_split_layers_train_as_on_one_process(plan: str, dp_shard_size: int) -> None:
    for found in run_on_ranks(2 * dp_shard_size, tied_off_by, plan=plan, dp_shard_size=dp_shard_size):
        assert max(found.values()) < 1e-5, found


@ranks(2)
def test_the_optimizer_holds_a_tied_weight_once() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator(PLANS["head"]).prepare(net, optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert sum(param is net.tokens.weight for param in held) == 1
    assert {id(param) for param in held} == {id(param) for param in net.parameters()}


@ranks(2)
def test_two_ways_to_split_one_weight_are_refused_by_name() -> None:
    plan = {**PLAN, "tokens": "colwise", "head": "colwise_rep"}
    with pytest.raises(ValueError, match=r"tokens.weight and head.weight share one weight.*S\(1\).*S\(0\)"):
        accelerator(plan).prepare(model())


@pytest.mark.parametrize(
    "options",
    [{"reentrant": False}, {"reentrant": True}, {"accumulation": 2}],
    ids=["recomputed", "reentrant", "twice"],
)
def test_gradients_are_summed_once_where_blocks_recompute_and_steps_accumulate(options: dict[str, Any]) -> None:
    for found in run_on_ranks(2, _varied, **options):
        assert max(found.values()) < 1e-5, found


def _varied(reentrant: bool | None = None, accumulation: int = 1) -> dict[str, float]:
    return off_by(accelerator(PLAN, accumulation), model(reentrant=reentrant), microbatches=accumulation)


@ranks(2)
def test_what_is_frozen_at_first_is_right_when_it_is_trained_later() -> None:
    run_by, net, alone = accelerator(PLAN), model(), model()
    for each in (net, alone):
        each.requires_grad_(False)
        each.blocks[0].after.requires_grad_(True)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    net, optimizer = run_by.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    both = (run_by, net, optimizer, alone, by_itself)
    assert max(one_step(*both).values()) < 1e-5
    for each in (net, alone):
        each.requires_grad_(True)
    assert max(one_step(*both, seed=1).values()) < 1e-5


class Sometimes(Model):
    """One block is left out where the text begins with 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens)
        for block in self.blocks if self.training else self.blocks[:1]:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@ranks(2)
def test_a_layer_that_is_used_late_is_looked_at_then_and_nothing_is_followed_any_more_after_that() -> None:
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright.parallel.mesh.tensor.partial_gradients").addHandler(handler)
    run_by, net, alone = accelerator(PLAN), model(Sometimes), model(Sometimes)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1)
    net, optimizer = run_by.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    both = (run_by, net, optimizer, alone, by_itself)
    hooks = own_hooks(net)
    for each in (net, alone):
        each.eval()
    for seed in range(2):
        assert max(one_step(*both, seed=seed).values()) < 1e-5
    assert len(noted) == 1
    assert "blocks.1.before.weight" in noted[0]
    for each in (net, alone):
        each.train()
    assert max(one_step(*both, seed=2).values()) < 1e-5
    assert own_hooks(net) == hooks - len(list(net.modules()))


def own_hooks(net: nn.Module) -> int:
    """Count the hooks before forward passes, without that of the check of the first steps."""
    hooks = [hook for module in net.modules() for hook in module._forward_pre_hooks.values()]
    return sum("first_steps" not in hook.__module__ for hook in hooks)


class Sequences(nn.Module):
    """A model whose sequences can be split between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.offset
        x = x + self.down(torch.tanh(self.up(self.norm1(x))))
        logits: Tensor = self.head(self.norm2(x))
        return logits


@ranks(2)
def test_split_sequences_train_as_on_one_process() -> None:
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm1": "sequence",
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": "sequence_rowwise",
        "norm2": "sequence",
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    found = off_by(accelerator(plan), model(Sequences))
    assert max(found.values()) < 1e-5, found


class SharedKeys(nn.Module):
    """Many heads of queries and one of keys; or one norm for what is whole and what is split."""

    def __init__(self, keys: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, HEAD) if keys else None
        self.norm = nn.RMSNorm(HEAD)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens)
        if self.key is None:
            x = self.norm(x.unflatten(-1, (-1, HEAD))).flatten(-2)
        queries = self.norm(self.query(x).unflatten(-1, (-1, HEAD)))
        if self.key is not None:
            queries = queries * self.key(x).unsqueeze(-2)
        logits: Tensor = self.head(x + self.out(queries.flatten(-2)))
        return logits


@ranks(2)
def test_what_would_be_partial_and_whole_at_once_is_refused_by_name() -> None:
    plan = {"query": "colwise", "out": "rowwise"}
    text = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"tokens.weight would get gradients .* is combined with something split in the model"
    ):
        accelerator(plan).prepare(model(SharedKeys, keys=True))(text)
    with pytest.raises(ValueError, match=r"what comes before would get gradients .* in the model itself"):
        accelerator({**plan, "tokens": "rowwise"}).prepare(model(SharedKeys, keys=True))(text)
    with pytest.raises(ValueError, match=r"norm.weight would get gradients .* in norm"):
        accelerator(plan).prepare(model(SharedKeys, keys=False))(text)


@ranks(2)
def test_one_sided_plans_are_refused_with_the_style_that_is_missing() -> None:
    with pytest.raises(ValueError, match=r"splits the outputs of blocks.0.up, blocks.1.up, and no layer.*rowwise"):
        accelerator({"blocks.*.up": "colwise"}).prepare(model())
    with pytest.raises(ValueError, match=r"gives blocks.0.down, blocks.1.down split inputs.*rowwise_rep"):
        accelerator({"blocks.*.down": "rowwise"}).prepare(model())
    text = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(
        RuntimeError, match=r"blocks.1.down runs under a plan of tensor parallelism.*only a \"rowwise\""
    ):
        accelerator({"blocks.*.up": "colwise", "blocks.0.down": "rowwise"}).prepare(model())(text)
    with pytest.raises(ValueError, match=r"leaves the model's output split.*colwise_rep.*vocab"):
        accelerator({**PLAN, "head": "colwise"}).prepare(model(tied=False))(text)
    chain = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 8))
    chain[1].register_forward_hook(lambda module, args, output: output[..., :4])
    with pytest.raises(ValueError, match=r"gives 2 an input that is split; it takes a whole one.*colwise_rep"):
        accelerator({"1": "colwise", "2": "colwise", "3": "rowwise"}).prepare(chain)(text)
