"""Divided sequences beside one process: masks, padding, any length; context parallelism, Ulysses, their products."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd  # nn's breaks on groups of gloo

from meshwright import Accelerator, DeepSpeedSequenceParallelConfig, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.modules.dtensors import whole
from tests.ranks import ranks
from tests.sizes import at_night

from ...small_transformer import HEADS, TP_PLAN, VOCABULARY, WIDTH, Block

LENGTHS = (5, 11, 3)
LENGTH = sum(LENGTHS)  # divisible by no number of processes


class MaskedBlock(Block):
    """A block with any mask; it may have fewer heads of keys than of queries."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS * key_heads) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = True) -> Tensor:
        """Return the next hidden state."""
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal and mask is None, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MaskedTransformer(nn.Module):
    """Embeddings, two blocks and a head."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock(key_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None = None, is_causal: bool = True
    ) -> Tensor:
        """Return the logits."""
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask, is_causal)
        logits: Tensor = self.head(x)
        return logits


def document_mask(window: int | None = None) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (document[:, None] == document) & torch.ones(LENGTH, LENGTH).tril().bool()
    return (mask if window is None else mask.triu(1 - window))[None, None]


def keys_padded(batch: int) -> Tensor:
    mask = torch.ones(batch, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, ..., :4], mask[1, ..., -6:] = False, False
    return mask


CASES: dict[str, tuple[Any, int | None]] = {
    "causal": (lambda batch: {}, None),
    "bidirectional": (lambda batch: {"is_causal": False}, None),
    "documents": (lambda batch: {"mask": document_mask()}, 2),
    "window": (lambda batch: {"mask": document_mask(4).repeat(batch, 1, 1, 1)}, 2),
    "whole mask": (lambda batch: {"mask": document_mask()}, None),
    "added": (lambda batch: {"mask": torch.where(document_mask(), 0.3, -1e9)}, 2),
    "padding": (lambda batch: {"mask": keys_padded(batch)}, 3),
}
"""What the model is called with, and the dimension in which the mask is divided."""


def beside_one_process(accelerator: Accelerator, case: str, key_heads: int = HEADS) -> None:
    """Compare the loss and every gradient."""
    alone = MaskedTransformer(key_heads)
    net = accelerator.prepare(copy.deepcopy(alone))
    share = accelerator.strategy.num_data_ranks
    generator = torch.Generator().manual_seed(1)
    batch = 2
    tokens = torch.randint(0, VOCABULARY, (batch * share, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch * share, LENGTH), generator=generator)
    labels[:, -4:] = -100
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(batch * share, 1)
    make, dim = CASES[case]
    given = make(batch)
    expected = torch.tensor(0.0)
    for part in range(share):
        rows = slice(part * batch, (part + 1) * batch)
        logits = alone(tokens[rows], positions[rows], **given)
        expected = expected + F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")
    expected = expected / (labels != -100).sum()
    expected.backward()
    rows = slice(accelerator.strategy.data_rank * batch, (accelerator.strategy.data_rank + 1) * batch)
    own = [tokens[rows].clone(), positions[rows].clone(), labels[rows].clone()]
    buffers, dims = list(own), [1, 1, 1]
    if dim is not None:
        buffers, dims = [*own, given["mask"]], [1, 1, 1, dim]
    with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=dims):
        logits = net(own[0], own[1], **given)
        loss = F.cross_entropy(logits.flatten(0, 1), own[2].flatten(), reduction="sum")
        items = (own[2] != -100).sum()
        accelerator.backward(loss, num_items=items)
    assert torch.equal(own[0], tokens[rows])
    group = accelerator.strategy.gradient_group
    totals = torch.stack([loss.detach(), items.float()])
    dist.all_reduce(totals, group=group)
    assert float(totals[0] / totals[1]) == pytest.approx(expected.item(), abs=1e-5)
    gradients = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param.grad), gradients[name], atol=1e-5, rtol=0)


@ranks(at_night(2), 4)
def test_context_parallelism_carries_masks_padding_and_any_length(world_size: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=world_size))
    for case in CASES:
        beside_one_process(accelerator, case)


@ranks(at_night(2), 4)
def test_ulysses_carries_masks_padding_and_any_length(world_size: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=world_size))
    for case in CASES:
        beside_one_process(accelerator, case, key_heads=2)  # with 4 processes they are repeated


@ranks(4)
def test_products_with_other_axes_train_as_one_process() -> None:
    for axes in (
        {"cp_size": 2, "dp_shard_size": 2},
        {"sp_size": 2, "dp_shard_size": 2},
        {"sp_size": 2, "dp_replicate_size": 2},
        {"cp_size": 2, "tp_size": 2, "tp_plan": TP_PLAN},
        {"sp_size": 2, "tp_size": 2, "tp_plan": TP_PLAN},
    ):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**axes))  # type: ignore[arg-type]
        for case in ("causal", "window"):
            beside_one_process(accelerator, case)


@ranks(2)
def test_recomputed_layers_attend_to_the_same_keys() -> None:
    for axes in ({"cp_size": 2}, {"sp_size": 2}):
        plugin = FullyShardedDataParallelPlugin(
            activation_checkpointing=True, transformer_cls_names_to_wrap=["MaskedBlock"]
        )
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**axes), fsdp_plugin=plugin)
        beside_one_process(accelerator, "window")


@ranks(2)
def test_views_of_one_text_are_divided_each_for_itself() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    text = torch.arange(18).view(2, 9)
    inputs, labels = text[:, :-1], text[:, 1:]
    with accelerator.maybe_context_parallel(buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
        assert torch.equal(inputs + 1, labels)
        assert inputs.shape == (2, 4)
    assert torch.equal(inputs, torch.arange(18).view(2, 9)[:, :-1])


@ranks(2)
def test_lengths_that_do_not_fit_are_named() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    for buffers, said in (
        ([torch.zeros(1, 3)], r"cuts sequences into 4 pieces; a buffer of \(1, 3\) has 3 positions.*Pad it to 4"),
        ([torch.zeros(1, 8), torch.zeros(1, 9)], "buffers with 8, 9 positions"),
    ):
        with (
            pytest.raises(ValueError, match=said),
            accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
        ):
            pass


# --- Ulysses ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_heads_that_processes_cannot_share_are_refused_by_name() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))

    class OneHead(MaskedTransformer):
        """All blocks have one head."""

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
            """Return something like logits."""
            x = self.tokens(input_ids)[:, None]
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    net = accelerator.prepare(OneHead())
    tokens, positions = torch.zeros(2, 8, dtype=torch.long), torch.arange(8).repeat(2, 1)
    with (
        accelerator.maybe_context_parallel(buffers=[tokens, positions], buffer_seq_dims=[1, 1]),
        pytest.raises(UnsupportedSettingError, match=r"sp_size > 1\) with OneHead.*equal number of heads.*1 for 2"),
    ):
        net(tokens, positions)


class Texts(torch.utils.data.Dataset[Any]):
    """Eight texts of a number of positions, with labels that a model would shift."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: 3 + index] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)}


def loss_over_all(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Average as scripts for sequence parallelism do: weighted by the labels of each process, with gradients."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    count = (labels != -100).sum()
    losses, counts = (all_gather_tensor_autograd(each[None], 0, group) for each in (loss, count.float()))
    return (losses * counts).sum() / counts.sum()


@ranks(at_night(2), 4)
def test_a_loader_prepared_with_a_model_divides_its_batches_as_scripts_for_deepspeed_expect(world_size: int) -> None:
    config = ParallelismConfig(
        sp_size=2,
        dp_shard_size=world_size // 2,
        sp_backend="deepspeed",
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
    )
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    alone = MaskedTransformer()
    batches = torch.utils.data.DataLoader(Texts(), batch_size=4 // (world_size // 2))
    net, loader = accelerator.prepare(copy.deepcopy(alone), batches)
    second = accelerator.deepspeed_ulysses_dl_adapter(accelerator.prepare(batches), net)
    group = accelerator.torch_device_mesh["sp"].get_group()
    assert len(loader) == len(second) == 2
    wanted = [expected_of(alone, step, world_size // 2) for step in range(2)]
    for step, (batch, again) in enumerate(zip(loader, second, strict=True)):
        assert batch.keys() == {"input_ids", "position_ids", "shift_labels"}
        assert batch["input_ids"].shape[1] == math.ceil((LENGTH - dist.get_rank(group)) / 2)
        assert torch.equal(batch["shift_labels"], again["shift_labels"])
        with accelerator.maybe_context_parallel(buffers=[batch["input_ids"]], buffer_seq_dims=[1]):  # not twice
            logits = net(batch["input_ids"], batch["position_ids"])
            loss = loss_over_all(logits, batch["shift_labels"], group)
            accelerator.backward(loss)
        expected, gradients = wanted[step]
        assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(expected, abs=1e-5)
        for name, param in net.named_parameters():
            torch.testing.assert_close(whole(param.grad), gradients[name], atol=1e-5, rtol=0)
        net.zero_grad()
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    assert net(tokens, torch.arange(LENGTH)[None]).shape == (1, LENGTH, VOCABULARY)  # whole again after the loop


def expected_of(alone: nn.Module, step: int, parts: int) -> tuple[float, dict[str, Tensor]]:
    """Return the mean of the losses of the parts of a batch, and its gradients."""
    alone.zero_grad()
    loss = torch.tensor(0.0)
    for part in torch.arange(4 * step, 4 * step + 4).chunk(parts):
        ids, labels = (torch.stack([Texts()[int(i)][name] for i in part]) for name in ("input_ids", "labels"))
        logits = alone(ids, torch.arange(LENGTH).repeat(len(ids), 1))[:, :-1]
        loss = loss + F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()) / parts
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in alone.named_parameters() if param.grad is not None}
