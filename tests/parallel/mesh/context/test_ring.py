"""Context parallelism: correct results, and models that are refused."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention  # by this name torch does not see it to join parts

from meshwright import Accelerator, ParallelismConfig
from meshwright.errors import FirstStepsWarning, UnsupportedSettingError
from meshwright.parallel.modules.dtensors import whole
from meshwright.parallel.modules.means import divisors_of, is_sum
from tests.ranks import ranks

from ...small_transformer import LENGTH, VOCABULARY, WIDTH, Block, Transformer, loss_of, model
from . import cpu_attention


class Tiny(nn.Module):
    """One block between embeddings and a head; `kind` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.mixer: nn.Module = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if kind == "recurrent":
            self.mixer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """Return the logits, and a loss where there are labels."""
        x = self.dropout(self.block(self.tokens(tokens)))
        query = x.unsqueeze(1)
        if self.kind == "written out":
            x = x + (torch.softmax(x @ x.transpose(1, 2), -1) @ x)
        if self.kind == "written out, causal":
            scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(2 * (x.shape[1],)).triu(1).bool(), -1e9)
            x = x + torch.softmax(scores, -1) @ x
        if self.kind == "imported by name":
            x = x + scaled_dot_product_attention(query, query, query, is_causal=True).squeeze(1)
        if self.kind == "masked":
            mask = torch.ones(1, 1, x.shape[1], x.shape[1]).tril().bool()
            x = x + F.scaled_dot_product_attention(query, query, query, attn_mask=mask).squeeze(1)
        if self.kind == "across":
            x = x + F.scaled_dot_product_attention(query, query[:, :, :2], query[:, :, :2]).squeeze(1)
        if self.kind == "convolution":
            x = x + self.mixer(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "pooled":
            return self.head(x.mean(1))
        logits = self.head(x)
        if labels is None:
            return logits
        if self.kind == "shifted inside":
            return {"loss": loss_of(logits[:, :-1], labels[:, 1:]), "logits": logits}
        return {"loss": loss_of(logits, labels), "logits": logits}


def split(accelerator: Accelerator, *buffers: Tensor) -> Any:
    return accelerator.maybe_context_parallel(
        buffers=list(buffers), buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    )


def tokens_and_labels(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


MIXES = r"at one position depends on other positions.*attn_implementation=\"sdpa\""


@ranks(2)
def test_what_would_see_only_a_part_of_the_sequence_is_refused_at_the_first_forward() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    for kind, said in {
        "written out": MIXES,
        "written out, causal": MIXES,
        "imported by name": MIXES,
        "convolution": MIXES,
        "pooled": MIXES,
        "masked": "a mask of 4 x 4 is given to attention, and this process has 4 of the 8 positions",
        "across": "attention is called with 4 queries and 2 keys",
        "shifted inside": r"output\['loss'\] depends on the order.*Shift the labels before they are cut",
    }.items():
        net = accelerator.prepare(Tiny(kind))
        tokens, labels = tokens_and_labels()
        if kind == "shifted inside":
            with split(accelerator, tokens):
                net(tokens)  # the logits are right
            tokens, labels = tokens_and_labels()
        refused = pytest.raises(UnsupportedSettingError, match=rf"cp_size > 1\) with Tiny cannot be used: .*{said}")
        with split(accelerator, tokens, labels), refused:
            net(tokens, labels)
    with pytest.raises(UnsupportedSettingError, match=r"cp_size=2 with mixer, a LSTM.*dp_shard_size"):
        accelerator.prepare(Tiny("recurrent"))


@ranks(2)
def test_a_model_that_counts_positions_itself_is_refused_and_asks_for_them() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    net = accelerator.prepare(model())
    tokens, _ = tokens_and_labels()
    with split(accelerator, tokens), pytest.raises(UnsupportedSettingError, match=r"counts positions.*position_ids"):
        net(tokens)


@ranks(2)
def test_rounding_to_bf16_is_no_dependence() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), mixed_precision="bf16")
    for kind in ("usual", "written out", "shifted inside"):
        net = accelerator.prepare(Tiny(kind))
        tokens, labels = tokens_and_labels()
        refused = nullcontext() if kind == "usual" else pytest.raises(UnsupportedSettingError)
        with split(accelerator, tokens, labels), refused:
            assert net(tokens, labels)["logits"].dtype == torch.float32


class WithAttentionOf(Transformer):
    """A model that says which attention it has, as those of transformers do."""

    class Config:
        """The config that transformers attaches to a model."""

        _attn_implementation = "eager"

    config = Config()


@ranks(2)
def test_another_attention_than_torchs_is_refused_at_prepare() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(UnsupportedSettingError, match=r"attn_implementation='eager'.*attn_implementation=\"sdpa\""):
        accelerator.prepare(WithAttentionOf())


@ranks(2)
def test_the_position_check_changes_nothing() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    net = accelerator.prepare(Tiny("usual"))
    net.head.eval()
    calls: list[bool] = []
    net.tokens.register_forward_hook(lambda module, args, output: calls.append(module.training))
    torch.manual_seed(3)
    for _ in range(2):
        tokens, labels = tokens_and_labels()
        with split(accelerator, tokens, labels):
            loss = net(tokens, labels)["loss"]
            loss.backward()
    assert calls == [False] * 3 + [True] * 2  # three passes without dropout, once
    assert (net.training, net.head.training) == (True, False)
    drawn = torch.rand(())
    torch.manual_seed(3)
    for _ in range(2):
        nn.functional.dropout(torch.ones(4, LENGTH // 2, WIDTH))
    assert drawn == torch.rand(())


# --- losses over different numbers of labels --------------------------------------------------------------------


def padded(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = tokens_and_labels(seed)
    labels[:, LENGTH // 4 + seed :] = -100
    return tokens, labels, torch.arange(LENGTH).repeat(len(tokens), 1)


@ranks(2)
def test_a_mean_over_different_numbers_of_labels_is_warned_of_at_the_scripts_line() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    net = accelerator.prepare(model())
    said = []
    for pad in (False, True, True):
        tokens, labels, positions = padded(0)
        labels = labels if pad else labels.clamp(min=0)
        with warnings.catch_warnings(record=True) as caught, split(accelerator, tokens, labels, positions):
            warnings.simplefilter("always")
            accelerator.backward(loss_of(net(tokens, positions), labels))
        here = [warning for warning in caught if warning.filename == __file__]
        said.append([str(each.message) for each in here if each.category is not FirstStepsWarning])  # of a NaN
    assert [len(messages) for messages in said] == [0, 1, 0]
    assert "over 0 items on one process and over 8 on another" in said[1][0]
    assert "accelerator.backward(loss_sum, num_items=n)" in said[1][0]


def summed_loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@ranks(2, 4)
def test_with_num_items_training_is_that_of_one_process(world_size: int) -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, pp_size=world_size // 2))
    alone, net = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, net)]
    net, optimizers[1] = accelerator.prepare(net, optimizers[1])
    for step in range(3):
        tokens, labels, positions = padded(step)
        count = (labels != -100).sum()
        expected = summed_loss_of(alone(tokens), labels) / count
        expected.backward()
        with split(accelerator, tokens, labels, positions):
            own = (labels != -100).sum()
            loss = accelerator.forward_backward(
                net, tokens, positions, target=labels, loss_fn=summed_loss_of, num_items=own
            )
        total = accelerator.reduce(loss.nan_to_num() * own, "sum").item() / (world_size // 2)
        assert total / count.item() == pytest.approx(expected.item(), abs=1e-5)
        gradients = {name: param.grad for name, param in alone.named_parameters()}
        for name, param in net.named_parameters():
            torch.testing.assert_close(whole(param.grad), gradients[name], atol=1e-5, rtol=0)
        norm = accelerator.clip_grad_norm_(net.parameters(), 1.0).item()
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item(), abs=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(alone.named_parameters())
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param), parameters[name], atol=1e-5, rtol=0)


@ranks(4)
def test_a_pipeline_of_parts_refuses_as_well() -> None:
    cpu_attention.register()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, pp_size=2))
    net = accelerator.prepare(model())
    tokens, labels = tokens_and_labels()
    with split(accelerator, tokens, labels), pytest.raises(UnsupportedSettingError, match="counts positions"):
        accelerator.forward_backward(net, tokens, target=labels, loss_fn=loss_of)


def test_a_loss_tells_what_it_was_divided_by() -> None:
    logits = torch.randn(6, 4, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 2, -100, -100])
    tokenwise = F.cross_entropy(logits, labels, reduction="none")
    counted = labels != -100
    mean = F.cross_entropy(logits, labels)
    for loss, expected in {
        mean: [3],
        mean.double() * 2 + logits.pow(2).mean(): [24, 3],
        tokenwise.sum() / counted.sum(): [3],
        tokenwise[counted].mean(): [3],
        F.mse_loss(logits, torch.zeros(6, 4)): [24],
        F.cross_entropy(logits, labels, reduction="sum"): [],
    }.items():
        assert sorted(map(float, divisors_of(loss)), reverse=True) == expected
        assert is_sum(loss) == (not expected)
    assert divisors_of(mean.detach()) == []
