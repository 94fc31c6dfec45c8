"""What a checkpoint is made of: what each part captures, objects to and restores."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright import PartialState
from meshwright.checkpoint.parts.states import ModelPart, OptimizerPart, ProgressPart, RandomPart, with_ties
from meshwright.runtime.group.runtime import Runtime

from ..formats.published import Tied


def test_a_tied_weight_is_known_by_any_of_its_names() -> None:
    model = Tied()
    own = model.state_dict()
    for name in ("embedding.weight", "head.weight"):
        stored = {key: value for key, value in own.items() if key == name or "weight" not in key}
        stored["norm.weight"] = own["norm.weight"]
        complete = with_ties(stored, own)
        assert complete.keys() == own.keys()
        assert ModelPart("model", "model.safetensors", model).objection(stored) is None


def test_weights_that_only_look_alike_are_not_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[1].weight)
    stored = {name: value for name, value in model.state_dict().items() if name != "1.weight"}
    assert ModelPart("model", "model.safetensors", model).objection(stored) == "the checkpoint lacks 1.weight"


def test_many_missing_names_are_counted() -> None:
    part = ModelPart("model", "model.safetensors", nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    assert part.objection({}) == "the checkpoint lacks 0.bias, 0.weight, 1.bias, 1.weight and 4 more"


def test_a_model_may_be_loaded_in_part_when_it_is_asked_for() -> None:
    model = nn.Linear(2, 2)
    part = ModelPart("model", "model.safetensors", model)
    part.load_options["strict"] = False
    assert part.objection({"weight": torch.ones(2, 2)}) is None
    part.restore({"weight": torch.ones(2, 2)})
    assert model.weight.tolist() == [[1, 1], [1, 1]]


def test_an_optimizer_with_other_groups_is_described() -> None:
    model = nn.Linear(2, 2)
    saved = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    part = OptimizerPart("optimizer", "optimizer.bin", torch.optim.SGD([model.weight], lr=0.1), [model])
    assert part.objection(saved) == "the groups have [1] parameters here and [2] in the checkpoint"


def test_loaders_are_counted() -> None:
    objection = ProgressPart([]).objection({"loaders": [{}]})
    assert objection == "0 loaders are prepared here, and the checkpoint has the positions of 1"


class Window:
    step = 3


def test_generators_come_back_with_the_step() -> None:
    PartialState(cpu=True)
    window: Any = Window()
    part = RandomPart("random_states_0.pkl", Runtime.current(), window)
    state = part.capture()
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    window.step = 0
    part.restore(state)
    assert [random.random(), float(np.random.rand()), torch.rand(()).item()] == drawn
    assert window.step == 3
    assert state.keys() == {"step", "random_state", "numpy_random_seed", "torch_manual_seed"}, "the published names"
