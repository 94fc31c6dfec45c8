"""Where models are cut, which stage owns what, and what cannot be cut: no processes are needed for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config.plugins.parallelism import PipelineConfig
from meshwright.parallel.pipeline.cutting import (
    CannotCutError,
    Partition,
    partition_model,
    require_use_in_own_stage,
    stage_starts,
)
from meshwright.parallel.pipeline.stages import StageView, prune_to_stages
from meshwright.parallel.pipeline.tracing import ForwardTrace, MetaModel, partition_by_use

from ..small_transformer import LENGTH, VOCABULARY, model

CPU = torch.device("cpu")
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY


def trace_of(net: nn.Module, starts: list[str], *args: Any, **kwargs: Any) -> tuple[Partition, ForwardTrace]:
    partition = partition_model(net, starts)
    return partition, MetaModel(net, partition, CPU).trace(args, kwargs)


def through_the_stages(net: nn.Module, starts: list[str], *args: Any, **kwargs: Any) -> Any:
    """Run one stage after the other in this process, each with its own part of the model."""
    partition, trace = trace_of(net, starts, *args, **kwargs)
    require_use_in_own_stage(partition, trace.uses)
    meta_model = MetaModel(net, partition, CPU)
    views = [StageView(net, partition, meta_model, index) for index in range(partition.num_stages)]
    received: Any = ()
    for view in views:
        view.register_entry_hook()
        view.input_boundary = trace.boundaries[view.index - 1] if view.index else view.input_boundary
        view.output_boundary = trace.boundaries[view.index] if not view.is_last else view.output_boundary
        received = view.module(received, args, kwargs)
    return views[-1].output


def test_blocks_are_divided_evenly() -> None:
    net = model(layers=5)
    assert stage_starts(net, None, 2, "pp_size=2") == ["blocks.2"]
    assert stage_starts(net, None, 5, "pp_size=5") == ["blocks.1", "blocks.2", "blocks.3", "blocks.4"]


@pytest.mark.parametrize(
    ("split_at", "stages", "said"),
    [
        (None, 8, "8 stages, and the model only 4 blocks"),
        (["blocks.9"], 2, "no module blocks.9"),
        (["blocks.1", "blocks.2"], 2, "makes 3, and pp_size has 2: name 1"),
        (["blocks.1", "blocks.1.up"], 3, "inside another"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused_with_numbers(split_at: Any, stages: int, said: str) -> None:
    with pytest.raises(CannotCutError, match=said):
        stage_starts(model(layers=4), split_at, stages, "pp_size")


def test_a_model_without_blocks_names_the_remedy() -> None:
    class Lonely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    with pytest.raises(CannotCutError, match="split_at"):
        stage_starts(Lonely(), None, 2, "pp_size=2")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": "zigzag"}, "choose one of 1f1b, gpipe, interleaved"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "interleaved"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "at least 2"),
        ({"microbatches": 0}, "at least 1"),
    ],
)
def test_a_wrong_config_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineConfig(**fields)


def test_a_schedule_that_cannot_run_is_refused_with_numbers_that_would() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        PipelineConfig(microbatches=2).microbatches_for(4)
    with pytest.raises(ValueError, match=r"Numbers that work: .*4"):
        PipelineConfig(schedule="interleaved", microbatches=5).microbatches_for(2)
    assert PipelineConfig().microbatches_for(4) == 4
    assert PipelineConfig(schedule="interleaved").microbatches_for(2) == 4


def test_every_parameter_goes_to_the_stage_that_takes_it() -> None:
    net = model(layers=4)
    partition, trace = trace_of(net, ["blocks.1", "blocks.3"], TOKENS)
    require_use_in_own_stage(partition, trace.uses)
    assert trace.uses.keys() == dict(net.named_parameters()).keys()
    assert partition.stage_of("tokens.weight") == 0
    assert partition.stage_of("blocks.1.up.bias") == 1
    assert partition.stage_of("head.weight") == 2


def test_the_stages_together_are_the_model() -> None:
    net = model(layers=4)
    expected = net(TOKENS)
    torch.testing.assert_close(through_the_stages(net, ["blocks.1", "blocks.3"], TOKENS), expected)


class Layered(nn.Module):
    """A model as libraries write them: nested, masked, with keyword arguments, tuples and a dict."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, hidden: Tensor, *, mask: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
            return self.linear(hidden * mask.unsqueeze(-1) + positions[0] - positions[1]) * self.scale, None

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.ones(8))
            self.embed = nn.Embedding(16, 8)
            self.layers = nn.ModuleList(Layered.Layer() for _ in range(4))
            self.norm = nn.LayerNorm(8)
            self.register_buffer("frequencies", torch.arange(8.0), persistent=False)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            hidden = self.embed(tokens) + self.start
            positions = torch.arange(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
            angles = positions[:, None] * self.frequencies
            for layer in self.layers[: len(self.layers)]:
                hidden = layer(hidden, mask=mask, positions=(angles.cos(), angles.sin()))[0]
            return self.norm(hidden)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = Layered.Trunk()
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits, and a loss where there are labels."""
        logits = self.head(self.trunk(tokens, mask))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_nested_model_with_keyword_arguments_is_cut() -> None:
    net = Layered()
    tokens, mask = torch.arange(12).reshape(3, 4), torch.ones(3, 4)
    expected = net(tokens, mask=mask, labels=tokens)
    outputs = through_the_stages(net, ["trunk.layers.1", "trunk.layers.2"], tokens, mask=mask, labels=tokens)
    torch.testing.assert_close(outputs, expected)


def test_any_sequence_is_cut() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    data = torch.randn(6, 4)
    expected = net(data)
    starts = stage_starts(net, None, 3, "pp_size=3")
    torch.testing.assert_close(through_the_stages(net, starts, data), expected)


def test_the_kept_stage_has_its_own_names_and_the_rest_is_freed() -> None:
    net = Layered()
    everything = dict(net.state_dict())
    partition = partition_model(net, ["trunk.layers.2"])
    prune_to_stages(net, partition, MetaModel(net, partition, CPU), [1])
    left = net.state_dict()
    assert left.keys() < everything.keys()
    assert {name for name in everything if partition.stage_of(name) == 1} == left.keys()
    assert all(left[name] is not None and torch.equal(left[name], everything[name]) for name in left)
    assert {name for name, _ in net.named_parameters()} == left.keys() - {
        "trunk.layers.2.scale",
        "trunk.layers.3.scale",
    }


def test_tied_parameters_in_two_stages_are_refused_by_name() -> None:
    with pytest.raises(CannotCutError, match=r"tokens\.weight \(stage 0\), head\.weight \(stage 1\)"):
        partition_model(model(tied=True), ["blocks.1"])


def test_a_parameter_used_in_two_stages_is_refused() -> None:
    class Reuses(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self[1](x) @ self[0].weight)

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.__class__ = Reuses
    partition, trace = trace_of(net, ["1"], torch.ones(2, 4))
    with pytest.raises(CannotCutError, match=r"0\.weight .*stage 1.*example_inputs"):
        require_use_in_own_stage(partition, trace.uses)


def test_a_value_that_goes_around_a_cut_is_refused() -> None:
    class Skips(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first = self[0](x)
            return torch.as_tensor(self[1](first) + first)

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.__class__ = Skips
    with pytest.raises(CannotCutError, match=r"made in stage 0 and used in stage 1.*around the cut at 1"):
        trace_of(net, ["1"], torch.ones(2, 4))


def test_a_value_of_the_inputs_alone_may_pass_through_a_stage() -> None:
    class Casts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(4.0)
            first = self[0](x)
            first = first + positions.type_as(first)  # returns the argument itself
            return torch.as_tensor(self[1](first) + positions)

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.__class__ = Casts
    assert trace_of(net, ["1"], torch.ones(2, 4))


def test_an_output_of_an_earlier_stage_is_refused() -> None:
    class Tells(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            first = self[0](x)
            return self[1](first), first

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.__class__ = Tells
    with pytest.raises(CannotCutError, match=r"returns a tensor .* that stage 0 makes"):
        trace_of(net, ["1"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("starts", "said"),
    [(["blocks"], "never calls blocks"), (["blocks.2", "blocks.1"], "in the order")],
)
def test_a_cut_that_the_forward_pass_does_not_take_is_refused(starts: list[str], said: str) -> None:
    with pytest.raises(CannotCutError, match=said):
        trace_of(model(layers=4), starts, TOKENS)


def test_a_forward_pass_that_looks_at_values_is_refused() -> None:
    class Looks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            return torch.as_tensor(self[1](x if x.sum() > 0 else -x))

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.__class__ = Looks
    with pytest.raises(CannotCutError, match="could not be followed"):
        trace_of(net, ["1"], torch.ones(2, 4))


class HeadFirst(nn.Module):
    """A model that registers its last layer first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head makes of it."""
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def test_an_example_gives_parameters_by_use() -> None:
    net = HeadFirst()
    partition, trace = trace_of(net, ["blocks.1"], torch.ones(2, 4))
    with pytest.raises(CannotCutError, match=r"head\.weight was given to stage 0.*takes it in stage 1.*example_inputs"):
        require_use_in_own_stage(partition, trace.uses)
    assert partition_by_use(net, ["blocks.1"], (torch.ones(2, 4),), {}).stage_of("head.weight") == 1
