"""One step on divided sequences on two processes: a prepared loop, and the same by hand with torch's collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from meshwright import Accelerator, ParallelismConfig

from .interleave import Comparison, compare, timed
from .processes import WORLD_SIZE, run_on_two

LENGTH, WIDTH, HEADS, VOCABULARY, DOCUMENT = 512, 256, 4, 64, 128
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention, by a function that is given, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Return the next hidden state."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embeddings, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None, by: Attention | None = None
    ) -> Tensor:
        """Return the logits; without another function, attention is torch's."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)

        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, by or attend)
        return self.head(x)  # type: ignore[no-any-return]


def run(rounds: int) -> list[Comparison]:
    """Measure both ways to divide sequences."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            what,
            lambda axis=axis: timed(by_hand(axis), dist.barrier),  # type: ignore[misc]
            lambda axis=axis: timed(prepared(axis), dist.barrier),  # type: ignore[misc]
            rounds=rounds,
            target=1.05,
        )
        for what, axis in (
            ("context parallelism, packed documents by a mask, AdamW, 2 processes", "cp_size"),
            ("Ulysses, AdamW, 2 processes", "sp_size"),
        )
    ]


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.arange(LENGTH)[None]


def documents() -> Tensor:
    """Return the mask of causal documents of equal length."""
    document = torch.arange(LENGTH) // DOCUMENT
    return ((document[:, None] == document) & torch.ones(LENGTH, LENGTH).tril().bool())[None, None]


def prepared(axis: str) -> Iterator[None]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{axis: WORLD_SIZE}))  # type: ignore[arg-type]
    net = Transformer()
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters()))
    mask = documents() if axis == "cp_size" else None
    step = 0
    while True:
        tokens, labels, positions = buffers = batch_of(step)
        whole = [] if mask is None else [mask]
        with accelerator.maybe_context_parallel(
            buffers=[*buffers, *whole], buffer_seq_dims=[1, 1, 1, 2][: 3 + len(whole)], no_restore_buffers=set(buffers)
        ):
            loss = F.cross_entropy(net(tokens, positions, mask).flatten(0, 1), labels.flatten(), reduction="sum")
            accelerator.backward(loss, num_items=labels.numel())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        yield


def by_hand(axis: str) -> Iterator[None]:
    net = Transformer()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = AdamW(net.parameters())
    part = slice(dist.get_rank() * LENGTH // WORLD_SIZE, (dist.get_rank() + 1) * LENGTH // WORLD_SIZE)
    mask = documents()[:, :, part]
    attention = (lambda q, k, v: gathering(q, k, v, mask)) if axis == "cp_size" else exchanging
    step = 0
    while True:
        tokens, labels, positions = (whole[:, part] for whole in batch_of(step))
        logits = net(tokens, positions, by=attention)
        count = torch.tensor(float(labels.numel()))
        dist.all_reduce(count)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * WORLD_SIZE / count
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        yield


def gathering(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend with own queries to the keys of all."""
    both = torch.cat([key, value], -1).movedim(2, 0).contiguous()
    keys, values = collectives.all_gather_tensor_autograd(both, 0, dist.group.WORLD).movedim(0, 2).chunk(2, -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def exchanging(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with own heads in the whole sequence."""
    own = LENGTH // WORLD_SIZE
    heads = torch.cat([query, key, value], -1).unflatten(1, (WORLD_SIZE, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    whole = collectives.all_to_all_single_autograd(heads.contiguous(), [own] * 2, [own] * 2, dist.group.WORLD)
    attended = F.scaled_dot_product_attention(*whole.permute(1, 2, 0, 3).chunk(3, -1), is_causal=True)
    parts = attended.permute(2, 0, 1, 3).contiguous()
    back = collectives.all_to_all_single_autograd(parts, [own] * 2, [own] * 2, dist.group.WORLD)
    return back.unflatten(0, (WORLD_SIZE, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
