"""The FLOPs of a step beside the count by hand, for the layers of Llama, ViT and UNet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from meshwright.tools.meter.flops import FlopCounter

BATCH, LENGTH, WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, LAYERS = 2, 48, 64, 4, 2, 96, 50, 3


class LlamaLayer(nn.Module):
    """Attention with fewer keys than queries, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, repeats: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.repeats = repeats

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.repeats else layer(x)
        return self.head(x)


def llama_forward() -> tuple[int, int]:
    """Return the FLOPs of a layer's forward pass for the batch, and those of the head."""
    keys = KEY_HEADS * WIDTH // HEADS
    weights = 2 * WIDTH * WIDTH + 2 * WIDTH * keys + 3 * WIDTH * HIDDEN
    return BATCH * (2 * LENGTH * weights + 4 * LENGTH**2 * WIDTH), 2 * BATCH * LENGTH * WIDTH * VOCABULARY


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1))


def vit_step() -> int:
    """Images of 32 x 32 are 64 patches; the gradient of the images is not computed."""
    patches = 64
    embedding = 2 * patches * WIDTH * 3 * 16
    layer = 2 * patches * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) + 4 * patches**2 * WIDTH
    return BATCH * (2 * embedding + 3 * (LAYERS * layer + 2 * WIDTH * 10))


class UNet(nn.Module):
    """Down, attend, up, with a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        across = self.first(images)
        low = self.down(across)
        positions = low.flatten(2).transpose(1, 2)
        attended, _ = self.attention(positions, positions, positions, need_weights=False)
        low = low + attended.transpose(1, 2).unflatten(2, low.shape[2:])
        return self.last(torch.cat([across, self.up(low)], dim=1))


def unet_step() -> int:
    """Images of 16 x 16, 8 x 8 below; the gradient of the images is not computed."""
    high, low = 256, 64
    first = 2 * high * 16 * 3 * 9
    down = 2 * low * 32 * 16 * 9
    attention = 2 * low * 4 * 32 * 32 + 4 * low**2 * 32
    up = 2 * high * 16 * 32
    last = 2 * high * 3 * 32 * 9
    return BATCH * (2 * first + 3 * (down + attention + up + last))


def counted(model: nn.Module, inputs: Tensor) -> FlopCounter:
    counter = FlopCounter()
    counter.start()
    model(inputs).square().mean().backward()
    assert counter.stop()
    return counter


def llama_step() -> int:
    layer, head = llama_forward()
    return 3 * (LAYERS * layer + head)


@pytest.mark.parametrize(
    ("make_model", "shape", "by_hand"),
    [(Llama, None, llama_step), (ViT, (BATCH, 3, 32, 32), vit_step), (UNet, (BATCH, 3, 16, 16), unet_step)],
)
def test_flops_of_a_step_are_those_counted_by_hand(
    make_model: Callable[[], nn.Module], shape: tuple[int, ...] | None, by_hand: Callable[[], int]
) -> None:
    inputs = torch.randint(VOCABULARY, (BATCH, LENGTH)) if shape is None else torch.randn(shape)
    assert counted(make_model(), inputs).flops == pytest.approx(by_hand(), rel=0.01)


@pytest.mark.parametrize(
    ("make_layer", "forward"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * 9 * 8 * 256),
        (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), 2 * 9 * 2 * 16 * 256),
        (lambda: nn.Conv2d(8, 16, 1, stride=2), 2 * 8 * 16 * 64),
        (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), 2 * 8 * 2 * 4 * 256),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(8, 8, 5, padding=2, groups=8)), 2 * 5 * 8 * 256),
    ],
)
def test_convolutions_in_groups_are_counted_by_their_own_channels(
    make_layer: Callable[[], nn.Module], forward: int
) -> None:
    images = torch.randn(BATCH, 8, 16, 16)
    assert counted(make_layer(), images).flops == BATCH * 2 * forward, "the images need no gradient"
    assert counted(make_layer(), images.requires_grad_()).flops == BATCH * 3 * forward


class Recurrent(nn.Module):
    """Recurrent layers, whose first argument alone is given."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, HIDDEN, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted(kind: type[nn.RNNBase], gates: int) -> None:
    by_hand = 3 * 2 * BATCH * LENGTH * gates * HIDDEN * (WIDTH + 3 * HIDDEN)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    assert counted(Recurrent(kind), inputs).flops == pytest.approx(by_hand, rel=0.02)


def test_recomputation_is_counted_apart() -> None:
    layer, _ = llama_forward()
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    plain, repeating = counted(Llama(), ids), counted(Llama(repeats=True), ids)
    assert repeating.flops == plain.flops
    scores = LAYERS * BATCH * 2 * LENGTH**2 * WIDTH  # attention repeats them itself
    assert plain.recomputed == pytest.approx(scores, rel=0.01)
    # Checkpointing repeats no product whose result nobody needs: the last one of each block.
    last = LAYERS * BATCH * 2 * LENGTH * WIDTH * HIDDEN
    assert repeating.recomputed == pytest.approx(scores + LAYERS * layer - last, rel=0.01)


def test_a_gradient_of_a_gradient_is_no_recomputation() -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    counter = FlopCounter()
    counter.start()
    (gradient,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
    gradient.square().sum().backward()
    assert counter.stop()
    assert counter.recomputed == 0
    assert counter.flops >= 4 * 2 * 4 * 8 * 8


def test_a_compiled_model_is_compiled_after_it_was_counted() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model, inputs = nn.Linear(8, 8), torch.randn(4, 8)
    fast = torch.compile(lambda x: model(x).square(), backend=backend)
    counter = FlopCounter()
    counter.start()
    fast(inputs).mean().backward()
    assert counter.stop()
    assert (counter.flops, compiled) == (2 * 2 * 4 * 8 * 8, [])
    fast(inputs)
    assert len(compiled) == 1


def test_a_mode_of_the_script_ends_first() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    counter = FlopCounter()
    counter.start()
    with TorchDispatchMode():
        assert not counter.stop()
    assert counter.stop()
