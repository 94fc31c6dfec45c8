"""A model that is cut into stages trains as one process does, on any mesh."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.config.plugins.parallelism import PipelineConfig
from meshwright.errors import UnsupportedSettingError
from meshwright.inference import prepare_pippy
from meshwright.parallel.modules.dtensors import whole
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night, cases, sized

from ..small_transformer import LENGTH, TP_PLAN, VOCABULARY, loader, loss_of, model
from .pipelined_models import (
    WORDS,
    CountingNet,
    FrontWithMask,
    FrontWithNumber,
    MaskNet,
    Net,
    NoisyNet,
    OptionalMaskNet,
    RandomNet,
)
from .test_cutting import HeadFirst, Layered

GLOBAL_BATCH = 8
STEPS = sized(gate=4, nightly=20)


def pipeline(schedule: str = "1f1b", microbatches: int | None = 4, **sizes: Any) -> ParallelismConfig:
    """Return a mesh with two stages along the pipeline, by default."""
    handler = PipelineConfig(schedule=schedule, microbatches=microbatches)
    return ParallelismConfig(**{"pp_size": 2, "pp_handler": handler, **sizes})


WAYS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "one": (1, dict),
    "copies": (2, dict),
    "shards": (2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()}),
    "gpipe": (2, lambda: {"parallelism_config": pipeline("gpipe")}),
    "1f1b": (2, lambda: {"parallelism_config": pipeline()}),
    "interleaved": (2, lambda: {"parallelism_config": pipeline("interleaved")}),
    "four stages": (4, lambda: {"parallelism_config": pipeline(pp_size=4)}),
    "1f1b of copies": (4, lambda: {"parallelism_config": pipeline(dp_replicate_size=2)}),
    "1f1b of shards": (4, lambda: {"parallelism_config": pipeline(dp_shard_size=2)}),
    "interleaved of shards": (4, lambda: {"parallelism_config": pipeline("interleaved", dp_shard_size=2)}),
    "1f1b of split layers": (4, lambda: {"parallelism_config": pipeline(tp_size=2, tp_plan=TP_PLAN)}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.5},
    "accumulating": {"accumulation": 2, "clip": 0.5},
}


def train(
    way: str,
    *,
    steps: int = STEPS,
    clip: float | None = None,
    accumulation: int = 1,
    load_from: str | None = None,
    save_to: str | None = None,
    **options: Any,
) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **{**WAYS[way][1](), **options})
    net = model(layers=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    shares = accelerator.strategy.num_data_ranks
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader(GLOBAL_BATCH // shares))
    if load_from is not None:
        accelerator.resume(load_from)
    losses = []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        with accelerator.accumulate(net):
            loss = accelerator.forward_backward(net, inputs, target=targets, loss_fn=loss_of)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        assert not loss.requires_grad
        losses.append(accelerator.gather_for_metrics(loss.reshape(1)).mean().item())
    if save_to is not None:
        accelerator.save_state(save_to)
    return losses


@cache
def alone(variant: str) -> list[float]:
    [losses] = run_on_ranks(1, train, way="one", **VARIANTS[variant])
    return losses


def test_forward_backward_on_one_process_is_the_plain_loop() -> None:
    net = model(layers=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _, (inputs, targets) in zip(range(STEPS), loader(GLOBAL_BATCH), strict=False):
        loss = loss_of(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert alone("plain") == losses


@pytest.mark.parametrize(
    ("way", "variant"),
    cases(
        gate=[
            *((way, "plain") for way in ("copies", "shards", "four stages", "1f1b of split layers")),
            ("1f1b", "clipped"),
            *((way, "accumulating") for way in ("gpipe", "interleaved", "1f1b of copies", "1f1b of shards")),
        ],
        nightly=[("interleaved of shards", "clipped"), *((way, "plain") for way in WAYS if way != "one")],
    ),
)
def test_the_loss_is_that_of_one_process(way: str, variant: str) -> None:
    per_rank = run_on_ranks(WAYS[way][0], train, way=way, **VARIANTS[variant])
    for losses in per_rank:
        assert losses == pytest.approx(alone(variant), abs=1e-5)


@pytest.mark.parametrize("way", [at_night("1f1b"), "1f1b of shards"])
def test_bf16_trains(way: str) -> None:
    for losses in run_on_ranks(WAYS[way][0], train_on_one_batch, way=way, mixed_precision="bf16"):
        assert losses[-1] < losses[0] * sized(gate=0.8, nightly=0.5)


def train_on_one_batch(way: str, **options: Any) -> list[float]:
    accelerator = Accelerator(cpu=True, **{**WAYS[way][1](), **options})
    net = model(layers=4)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    inputs, targets = next(iter(loader(GLOBAL_BATCH)))
    losses = []
    for _ in range(sized(gate=6, nightly=20)):
        loss = accelerator.forward_backward(net, inputs, target=targets, loss_fn=loss_of)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_gradients_are_reduced_only_when_a_window_closes() -> None:
    for reduced in run_on_ranks(4, batches_with_reduced_gradients):
        assert reduced == [False, True, False, True]


def batches_with_reduced_gradients() -> list[bool]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **WAYS["1f1b of shards"][1]())
    net = model(layers=4)
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters()), loader(4))
    reduced = []
    for _, (inputs, targets) in zip(range(4), batches, strict=False):
        with accelerator.accumulate(net):
            accelerator.forward_backward(net, inputs, target=targets, loss_fn=loss_of)
            reduced.append(any(param.grad is not None for param in net.parameters()))  # a shard has one afterwards
            optimizer.step()
            optimizer.zero_grad()
    return reduced


# --- what a process holds ---------------------------------------------------------------------------------------


@ranks(2)
def test_a_process_holds_its_stage_under_the_models_own_names() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    net = model(layers=4)
    names, references = [name for name, _ in net.named_parameters()], [weakref.ref(p) for p in net.parameters()]
    groups = [
        {"params": [p for n, p in net.named_parameters() if "head" in n], "lr": 0.5},
        {"params": [p for n, p in net.named_parameters() if "head" not in n], "weight_decay": 0.0},
    ]
    prepared, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups, lr=0.1))
    del groups
    assert accelerator.unwrap_model(prepared) is net
    own = {name for name, _ in prepared.named_parameters()}
    assert own < set(names)
    assert own == set(prepared.state_dict())
    assert ("tokens.weight" in own, "head.weight" in own) == [(True, False), (False, True)][accelerator.process_index]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in prepared.parameters()}
    assert len(optimizer.param_groups[0]["params"]) == accelerator.process_index
    gc.collect()
    assert {name for name, ref in zip(names, references, strict=True) if ref() is not None} == own
    inputs, targets = next(iter(loader(8)))
    accelerator.forward_backward(prepared, inputs, target=targets, loss_fn=loss_of)
    optimizer.step()  # one of its groups is empty on the first process


@ranks(2)
def test_all_stages_together_hold_everything_once() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline("interleaved"))
    net = model(layers=4)
    names = [name for name, _ in net.named_parameters()]
    net = accelerator.prepare(net)
    own = [[name for name, _ in net.named_parameters()]]
    together: list[Any] = [None, None]
    torch.distributed.all_gather_object(together, own[0])
    assert sorted(together[0] + together[1]) == sorted(names)
    assert any(name.startswith("blocks.0.") for name in together[0])
    assert any(name.startswith("blocks.2.") for name in together[0])


@pytest.mark.parametrize("way", [at_night("1f1b"), "interleaved of shards", "1f1b of split layers"])
def test_the_whole_state_reaches_the_main_process(way: str, tmp_path: Path) -> None:
    run_on_ranks(WAYS[way][0], whole_state_of, way=way, folder=str(tmp_path))
    saved = nn.Module.state_dict(model(layers=4))
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name


def whole_state_of(way: str, folder: str) -> None:
    accelerator = Accelerator(cpu=True, **WAYS[way][1]())
    net = accelerator.prepare(model(layers=4))
    state = accelerator.get_state_dict(net)
    expected = list(model(layers=4).state_dict()) if accelerator.is_main_process else []
    assert list(state) == expected
    accelerator.save_model(net, folder)


@pytest.mark.parametrize(
    ("saving", "loading"), [at_night("1f1b", "one"), at_night("shards", "1f1b"), ("1f1b of shards", "interleaved")]
)
def test_training_goes_on_from_a_checkpoint_on_another_mesh(saving: str, loading: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_on_ranks(WAYS[saving][0], train, way=saving, steps=STEPS // 2, save_to=folder)
    for losses in run_on_ranks(WAYS[loading][0], train, way=loading, steps=STEPS // 2, load_from=folder):
        assert losses == pytest.approx(alone("plain")[STEPS // 2 :], abs=1e-5)


# --- evaluation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [at_night("1f1b"), at_night("interleaved"), at_night("1f1b of shards"), "1f1b of split layers"]
)
def test_evaluation_gives_every_process_the_outputs(way: str) -> None:
    run_on_ranks(WAYS[way][0], evaluate, way=way)


def evaluate(way: str) -> None:
    accelerator = Accelerator(cpu=True, **WAYS[way][1]())
    whole = model(layers=4).eval()
    net = accelerator.prepare(model(layers=4)).eval()
    for rows, length in ((8, LENGTH), (3, LENGTH), (4, LENGTH - 3)):  # also not divisible, and of another length
        inputs = torch.arange(rows * length).reshape(rows, length) % VOCABULARY
        with torch.no_grad():
            torch.testing.assert_close(net(inputs), whole(inputs), atol=1e-6, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"forward_backward\(model.*no_grad"):
        net(inputs)


@ranks(2)
def test_training_and_evaluation_take_turns_in_the_models_own_mode() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = torch.randn(8, 4)
    for _ in range(2):
        net.train()
        accelerator.forward_backward(net, data, loss_fn=lambda outputs: outputs.pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            assert torch.equal(net(data), net(data))
            net.train()
            assert not torch.equal(net(data), net(data))


# --- models -----------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_model_that_computes_its_own_loss_is_trained() -> None:
    reference, net = Layered(), Layered()
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, net)]
    net, optimizers[1] = accelerator.prepare(net, optimizers[1])
    tokens, mask = torch.arange(32).reshape(8, 4) % 16, torch.ones(8, 4)
    for _ in range(3):
        expected = reference(tokens, mask=mask, labels=tokens)["loss"]
        expected.backward()
        loss = accelerator.forward_backward(net, tokens, mask=mask, labels=tokens)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_sequences_may_have_any_length() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    reference = model(layers=4)
    net = accelerator.prepare(model(layers=4))
    for length in (LENGTH, 5, LENGTH):
        inputs = torch.arange(8 * length).reshape(8, length) % VOCABULARY
        loss = accelerator.forward_backward(net, inputs, target=inputs, loss_fn=loss_of)
        assert loss.item() == pytest.approx(loss_of(reference(inputs), inputs).item(), abs=1e-5)


@ranks(2)
def test_frozen_layers_stay_as_they_are() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    net = model(layers=4)
    for name, param in net.named_parameters():
        param.requires_grad_(name.startswith(("blocks.3", "head")))
    net = accelerator.prepare(net)
    inputs, targets = next(iter(loader(8)))
    accelerator.forward_backward(net, inputs, target=targets, loss_fn=loss_of)
    with_gradient = {name for name, param in net.named_parameters() if param.grad is not None}
    assert with_gradient == {name for name, param in net.named_parameters() if param.requires_grad}
    assert bool(with_gradient) == (accelerator.process_index == 1)


@ranks(2)
def test_an_example_shows_which_stage_takes_what() -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    handler = PipelineConfig(split_at=["blocks.1"], example_inputs=lambda: data[:1])
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline(pp_handler=handler))
    net = accelerator.prepare(HeadFirst())
    loss = accelerator.forward_backward(net, data, target=data[:, :2], loss_fn=nn.functional.mse_loss)
    assert loss.item() == pytest.approx(nn.functional.mse_loss(HeadFirst()(data), data[:, :2]).item(), abs=1e-6)
    assert ("head.weight" in dict(net.named_parameters())) == (accelerator.process_index == 1)


# --- what is refused --------------------------------------------------------------------------------------------


@ranks(2)
def test_a_pipeline_that_does_not_fit_says_what_would() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline("interleaved"))
    with pytest.raises(ValueError, match="pp_size=2 with stages_per_rank=2 has 4 stages, and the model only 3 blocks"):
        accelerator.prepare(model(layers=3))
    with pytest.raises(ValueError, match=r"tokens\.weight .*head\.weight"):
        accelerator.prepare(model(layers=4, tied=True))
    net = accelerator.prepare(model(layers=4))
    inputs = torch.zeros(6, LENGTH, dtype=torch.long)
    with pytest.raises(ValueError, match=r"6 samples .* 4 equal .* could be 1, 2, 3, 6; .* multiple of 4"):
        accelerator.forward_backward(net, inputs, target=inputs, loss_fn=loss_of)
    with pytest.raises(ValueError, match="fp16"):
        Accelerator(cpu=True, parallelism_config=pipeline(), mixed_precision="fp16")
    with pytest.raises(ValueError, match="pp_size=3 = 3 processes, and the run has 2"):
        Accelerator(cpu=True, parallelism_config=pipeline(pp_size=3))
    with pytest.raises(ValueError, match="at least 2"):
        Accelerator(cpu=True, parallelism_config=pipeline(microbatches=1))


@ranks(2)
def test_the_first_batch_refuses_what_cannot_be_cut_on_every_process() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    net = accelerator.prepare(HeadFirst())
    data = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"head\.weight .*example_inputs"):
        accelerator.forward_backward(net, data, loss_fn=lambda outputs: outputs.sum())


def test_a_model_without_a_loss_asks_for_one() -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="loss_fn"):
        accelerator.forward_backward(net, torch.ones(2, 2))


# --- inference --------------------------------------------------------------------------------------------------


@ranks(1, 2)
def test_prepare_pippy_spreads_a_model_for_inference(world_size: int) -> None:
    whole = model(layers=4).eval()
    inputs = torch.arange(6 * LENGTH).reshape(6, LENGTH) % VOCABULARY
    expected = whole(inputs)
    everywhere = prepare_pippy(model(layers=4).eval(), example_args=(inputs,), gather_output=True)
    torch.testing.assert_close(everywhere(inputs), expected, atol=1e-6, rtol=1e-5)
    last = prepare_pippy(model(layers=4).eval(), split_points=["blocks.1"] if world_size > 1 else "auto", num_chunks=3)
    outputs = last(inputs)
    if Accelerator(cpu=True).is_last_process:
        torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)
    else:
        assert outputs is None


# --- values that go from stage to stage -------------------------------------------------------------------------


def clip_and_compare(accelerator: Accelerator, net: nn.Module, alone: nn.Module) -> None:
    """Clip the gradients of both; they and their norms are the same."""
    gradients = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param.grad), gradients[name], atol=1e-5, rtol=0)
    norm = accelerator.clip_grad_norm_(net.parameters(), 1.0).item()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item(), abs=1e-5)


def compared_with_one_process(
    make: Callable[[], nn.Module], schedule: str, accumulation: int = 1, batches: int = 3
) -> nn.Module:
    """Train next to a plain copy, and compare losses, gradients, their norm, and parameters; return the model."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, parallelism_config=pipeline(schedule, microbatches=4)
    )
    alone, net = make(), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, net)]
    net, optimizers[1] = accelerator.prepare(net, optimizers[1])
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        for _ in range(accumulation):
            tokens, targets = (torch.randint(0, WORDS, (8, 6), generator=generator) for _ in range(2))
            # One process passes the same micro-batches, one after the other.
            parts = zip(tokens.chunk(4), targets.chunk(4), strict=True)
            losses = [loss_of(alone(x), y) / 4 for x, y in parts]
            for loss in losses:
                (loss / accumulation).backward()
            with accelerator.accumulate(net):
                own = accelerator.forward_backward(net, tokens, target=targets, loss_fn=loss_of)
                assert own.item() == pytest.approx(sum(loss.item() for loss in losses), abs=1e-5)
                if accelerator.sync_gradients:
                    clip_and_compare(accelerator, net, alone)
                optimizers[1].step()
                optimizers[1].zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
    expected = dict(alone.named_parameters())
    for name, param in net.named_parameters():
        torch.testing.assert_close(param, expected[name], atol=1e-5, rtol=0)
    alone.eval(), net.eval()
    with torch.no_grad():
        outputs = torch.cat([alone(part) for part in tokens.chunk(4)])
        torch.testing.assert_close(net(tokens), outputs, atol=1e-5, rtol=0)
    return net


@pytest.mark.parametrize(
    ("front", "schedule"),
    cases(
        gate=[(FrontWithMask, "1f1b"), (FrontWithNumber, "interleaved")],
        nightly=product((FrontWithMask, FrontWithNumber), ("gpipe", "1f1b", "interleaved")),
    ),
)
def test_what_an_embedding_computes_from_the_inputs_is_that_of_each_micro_batch(
    schedule: str, front: type[nn.Embedding]
) -> None:
    run_on_ranks(2, compare_masked, schedule=schedule, front=front)


def compare_masked(schedule: str, front: type[nn.Embedding]) -> None:
    compared_with_one_process(lambda: MaskNet(front), schedule, accumulation=2 if schedule == "1f1b" else 1)


@ranks(2)
def test_a_mask_may_be_missing_in_some_micro_batches() -> None:
    class SmallTokens(OptionalMaskNet):
        def forward(self, tokens: Any) -> Any:
            return super().forward(tokens % 11)  # 10 is not in every micro-batch

    for schedule in ("1f1b", "interleaved"):
        compared_with_one_process(SmallTokens, schedule, batches=2)


@ranks(2)
def test_a_random_mask_is_handed_on_and_one_that_goes_around_a_cut_is_refused() -> None:
    tokens = torch.arange(48).reshape(8, 6) % WORDS
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    torch.manual_seed(accelerator.process_index)  # processes draw different numbers
    net = accelerator.prepare(RandomNet())
    with torch.no_grad():
        hidden = net(tokens)
    assert set(hidden.unique().tolist()) <= {0.0, 4.0}  # every block saw the same mask
    assert len(hidden.unique()) == 2
    net = accelerator.prepare(NoisyNet())
    with pytest.raises(ValueError, match=r"made in stage 0 and used in stage 1 \(by mul\), around the cut"):
        accelerator.forward_backward(net, tokens, target=tokens, loss_fn=loss_of)


# --- what a model keeps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["assigned", "in place"])
def test_a_buffer_that_the_forward_pass_changes_is_kept_and_saved(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, count_samples, kind=kind, folder=str(tmp_path))


def count_samples(kind: str, folder: str) -> None:
    net = compared_with_one_process(lambda: CountingNet(kind), "1f1b")
    assert net.seen.item() == 4 * 8  # three batches, and one in evaluation
    assert net.calls == 4 * 4
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    fresh = accelerator.prepare(CountingNet(kind))
    fresh.load_state_dict(net.state_dict())
    tokens = torch.zeros(8, 6, dtype=torch.long)
    accelerator.forward_backward(fresh, tokens, target=tokens, loss_fn=loss_of)
    accelerator.save_state(folder)
    state = accelerator.get_state_dict(fresh)
    if accelerator.is_main_process:
        assert state["seen"].item() == 5 * 8
    fresh.seen = torch.zeros(())
    accelerator.load_state(folder)
    assert fresh.seen.item() == 5 * 8


@ranks(2)
def test_a_buffer_that_only_some_stages_could_change_is_refused_by_name() -> None:
    tokens = torch.zeros(8, 6, dtype=torch.long)
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    for kind, stage in (("of activations", 0), ("at the end", 1)):
        net = accelerator.prepare(CountingNet(kind))
        with pytest.raises(ValueError, match=f"changes seen in stage {stage}.*module with parameters"):
            accelerator.forward_backward(net, tokens, target=tokens, loss_fn=loss_of)
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline("interleaved"))
    net = accelerator.prepare(CountingNet())
    with pytest.raises(ValueError, match=r"changes .*seen.* 2 stages would change it as many times.*1f1b"):
        accelerator.forward_backward(net, tokens, target=tokens, loss_fn=loss_of)


# --- losses over padded labels ----------------------------------------------------------------------------------


def padded(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of eight sequences, of which the later ones are shorter."""
    tokens, labels = (torch.randint(0, WORDS, (8, 6), generator=generator) for _ in range(2))
    for row in range(8):
        labels[row, 6 - row // 2 :] = -100
    return tokens, labels


def summed_loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize(
    "way", cases(gate=["1f1b of shards"], nightly=["gpipe", "1f1b", "interleaved", "1f1b of copies"])
)
def test_with_num_items_every_label_has_the_same_weight(way: str) -> None:
    run_on_ranks(WAYS[way][0], compare_per_item, way=way, accumulation=1)
    run_on_ranks(WAYS[way][0], compare_per_item, way=way, accumulation=2)


def compare_per_item(way: str, accumulation: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **WAYS[way][1]())
    alone, net = Net(), Net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, net)]
    net, optimizers[1] = accelerator.prepare(net, optimizers[1])
    generator = torch.Generator().manual_seed(1)
    shares, rank = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    for _ in range(3):
        batches = [[padded(generator) for _ in range(shares)] for _ in range(accumulation)]
        everything = [batch for batches_of_all in batches for batch in batches_of_all]
        items = sum((labels != -100).sum() for _, labels in everything)
        (sum(summed_loss_of(alone(tokens), labels) for tokens, labels in everything) / items).backward()
        for batches_of_all in batches:
            tokens, labels = batches_of_all[rank]
            count = (labels != -100).sum()
            with torch.no_grad():
                expected = summed_loss_of(alone(tokens), labels) / count
            with accelerator.accumulate(net):
                loss = accelerator.forward_backward(net, tokens, target=labels, loss_fn=summed_loss_of, num_items=count)
                assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
                if accelerator.sync_gradients:
                    clip_and_compare(accelerator, net, alone)
                optimizers[1].step()
                optimizers[1].zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
    parameters = dict(alone.named_parameters())
    for name, param in net.named_parameters():
        torch.testing.assert_close(whole(param), parameters[name], atol=1e-5, rtol=0)


def masked_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = labels != -100
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / counted.sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def selected(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = labels != -100
    return nn.functional.cross_entropy(logits[counted], labels[counted], reduction="none").mean()


@ranks(2)
def test_a_mean_over_different_numbers_of_labels_is_warned_of_at_the_scripts_line() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=pipeline())
    tokens, labels = padded(torch.Generator().manual_seed(1))
    for loss_fn in (loss_of, masked_mean, smoothed, selected, summed_loss_of):
        net = accelerator.prepare(Net())
        said = []
        for targets in (labels.clamp(min=0), labels, labels):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                accelerator.forward_backward(net, tokens, target=targets, loss_fn=loss_fn)
            said.append([str(w.message) for w in caught if w.filename == __file__])
        told = (
            "sum, and a pipeline takes the mean" if loss_fn is summed_loss_of else "over 6 items .* over 12 in another"
        )
        expected = [[1, 0, 0], [0, 1, 0]][loss_fn is not summed_loss_of] if accelerator.process_index else [0, 0, 0]
        assert [len(messages) for messages in said] == expected, (loss_fn, said)
        for message in (message for messages in said for message in messages):
            assert re.search(told, message)
            assert "num_items=" in message


class JointNorm(torch.optim.Optimizer):
    """Divide every gradient by the norm of all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum(float(param.grad.square().sum()) for param in params) ** 0.5
        for param in params:
            param.sub_(param.grad / (1 + norm))


@ranks(2)
def test_optimizers_whose_steps_depend_on_other_stages_are_refused() -> None:
    for kind in (torch.optim.LBFGS, JointNorm):
        net = model()
        with pytest.raises(UnsupportedSettingError, match=f"{kind.__name__} with pp_size"):
            Accelerator(cpu=True, parallelism_config=pipeline()).prepare(net, kind(net.parameters()))
