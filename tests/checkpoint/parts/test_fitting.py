"""Plain values that do not fit are refused before anything is restored; what other versions and scripts save fits."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from meshwright import AcceleratedScheduler, Accelerator
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.formats import codec
from meshwright.checkpoint.parts.fitting import objection_to_optimizer, objection_to_state

HUGE = 1 << 8000
NAN = float("nan")


@dataclass
class Saved:
    """A checkpoint, and the objects that it is loaded into."""

    folder: Path
    accelerator: Accelerator
    objects: list[Any]

    def states(self) -> str:
        generators = torch.get_rng_state().sum(), random.getstate()[1][-1], np.random.get_state()[2]
        steps = self.objects[1].steps_taken, self.accelerator.step
        return str([*(each.state_dict() for each in self.objects), generators, steps])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(list(torch.arange(8.0)), batch_size=2)  # type: ignore[arg-type]
    prepared = list(accelerator.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1), loader))
    registered = nn.BatchNorm1d(2)
    scaler = torch.amp.GradScaler("cpu")
    accelerator.register_for_checkpointing(registered)
    accelerator.register_for_checkpointing(scaler)
    accelerator.backward(prepared[0](torch.ones(1, 2)).sum())
    prepared[1].step()
    folder = Path(accelerator.save_state(str(tmp_path_factory.mktemp("saved") / "good")))
    accelerator.backward(prepared[0](torch.ones(1, 2)).sum())
    prepared[1].step()
    return Saved(folder, accelerator, [*prepared, registered, scaler])


def group(**options: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        state["param_groups"][0].update(options)
        return state

    return change


def without(name: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        del state["param_groups"][0][name]
        return state

    return change


def moment(**values: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        state["state"][0].update(values)
        return state

    return change


def lacking(name: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        del state["state"][0][name]
        return state

    return change


def value(**values: Any) -> Callable[[Any], Any]:
    return lambda state: {**state, **values}


def loader(**values: Any) -> Callable[[Any], Any]:
    return lambda state: {**state, "loaders": [{**state["loaders"][0], **values}]}


def as_(state: Any) -> Callable[[Any], Any]:
    return lambda _: state


LIES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("optimizer.bin", as_([1]), "no state of an optimizer"),
    ("optimizer.bin", value(param_groups=3), "no parameter groups"),
    ("optimizer.bin", value(param_groups=[3]), "no parameter groups"),
    ("optimizer.bin", value(state=[1, 2]), "no state of an optimizer"),
    ("optimizer.bin", value(state={0: [1]}), "parameter 0 is no dictionary"),
    ("optimizer.bin", value(state={7: {}}), "parameter 7, which is in no group"),
    ("optimizer.bin", group(params="ab"), "no parameter groups"),
    ("optimizer.bin", group(params=[0, 0]), "tell its parameters apart"),
    ("optimizer.bin", group(params=[0]), r"2\] parameters here and \[1\]"),
    ("optimizer.bin", group(lr="x"), "lr of group 0 is a text"),
    ("optimizer.bin", group(lr=NAN), "lr of group 0 is nan"),
    ("optimizer.bin", group(lr=HUGE), "lr of group 0 is out of range"),
    ("optimizer.bin", group(lr=None), "does not take the options"),
    ("optimizer.bin", group(lr=-1.0), "does not take the options"),
    ("optimizer.bin", group(lr=torch.ones(2)), "lr of group 0 is a tensor of shape"),
    ("optimizer.bin", group(lr=torch.ones((), device="meta")), "lr of group 0 has no value"),
    ("optimizer.bin", group(lr=1j), "lr of group 0 is a complex"),
    ("optimizer.bin", group(betas=0.5), "betas of group 0 is a number"),
    ("optimizer.bin", group(betas=(0.9, 1.0)), "does not take the options"),
    ("optimizer.bin", group(betas=(0.9, "x")), r"betas of group 0\[1\] is a text"),
    ("optimizer.bin", group(betas=(0.9, NAN)), r"betas of group 0\[1\] is nan"),
    ("optimizer.bin", group(foreach="x"), "foreach of group 0 is a text"),
    ("optimizer.bin", group(differentiable=[1]), "differentiable of group 0 is a list"),
    ("optimizer.bin", moment(exp_avg=torch.ones(7)), r"exp_avg is a tensor of shape \(7,\)"),
    ("optimizer.bin", moment(exp_avg=torch.ones(())), r"exp_avg is a tensor of shape \(\)"),
    ("optimizer.bin", moment(exp_avg=torch.ones(3, 2, device="meta")), "exp_avg has no plain numbers"),
    ("optimizer.bin", moment(exp_avg=torch.ones(3, 2) * 1j), "exp_avg has no plain numbers"),
    ("optimizer.bin", moment(exp_avg_sq=[1.0]), "exp_avg_sq is a list"),
    ("optimizer.bin", moment(step="x"), "step is a text"),
    ("optimizer.bin", moment(step=torch.tensor(NAN)), "step is nan"),
    ("optimizer.bin", moment(step=torch.ones(3)), "step is a tensor"),
    ("optimizer.bin", lacking("exp_avg"), "lacks exp_avg"),
    ("scheduler.bin", as_("x"), "the state is a text"),
    ("scheduler.bin", value(step=3), "'?step'?, which is no value of StepLR"),
    ("scheduler.bin", value(get_lr=1), "get_lr"),
    ("scheduler.bin", value(optimizer=3), "optimizer"),
    ("scheduler.bin", value(last_epoch="x"), "last_epoch is a text"),
    ("scheduler.bin", value(last_epoch=HUGE), "last_epoch is out of range"),
    ("scheduler.bin", value(last_epoch=NAN), "last_epoch is nan"),
    ("scheduler.bin", value(base_lrs=3), "base_lrs is a number"),
    ("scheduler.bin", value(base_lrs=[0.1, 0.2]), "base_lrs has 1 values here and 2"),
    ("scheduler.bin", value(_last_lr=["x"]), r"_last_lr\[0\] is a text"),
    ("scheduler.bin", as_({}), "lacks last_epoch"),
    ("custom_checkpoint_0.pkl", as_([1]), "dictionary of names"),
    ("custom_checkpoint_0.pkl", value(weight=torch.ones(7)), "weight has shape"),
    ("custom_checkpoint_0.pkl", value(weight="x"), "expected a tensor"),
    ("custom_checkpoint_0.pkl", value(weight=torch.ones(2, device="meta")), "no plain numbers"),
    ("custom_checkpoint_0.pkl", value(more=torch.ones(2)), "the names differ: more"),
    ("custom_checkpoint_1.pkl", as_({}), "lacks scale"),
    ("custom_checkpoint_1.pkl", value(scale="x"), "scale is a text"),
    ("custom_checkpoint_1.pkl", value(scale=NAN), "scale is nan"),
    ("custom_checkpoint_1.pkl", value(scale=0.0), "scale is 0.0"),
    ("progress.bin", as_([1]), "expected an object"),
    ("progress.bin", value(steps="ab"), "steps is a text"),
    ("progress.bin", value(steps=[1, "x"]), r"steps\[1\] is a text"),
    ("progress.bin", value(steps=[HUGE]), "steps"),
    ("progress.bin", value(steps=[-1]), "out of range"),
    ("progress.bin", value(loaders=[3]), "expected"),
    ("progress.bin", value(trackers=[3]), "trackers is a list"),
    ("progress.bin", value(trackers={"next_step": "x", "runs": {}}), "next_step is a text"),
    ("progress.bin", loader(batches=NAN), "batches"),
    ("progress.bin", loader(epoch=HUGE), "epoch"),
    ("progress.bin", loader(epoch=-1), "out of range"),
    ("progress.bin", loader(order={"rng": torch.ones(3)}), "state of a generator"),
    ("progress.bin", loader(order={"seed": "x"}), "the seed of its order"),
    ("random_states_0.pkl", value(step=HUGE), "is none"),
    ("random_states_0.pkl", value(step=-3), "is none"),
    ("random_states_0.pkl", value(torch_manual_seed=torch.zeros(5056, dtype=torch.uint8)), "is none"),
    ("random_states_0.pkl", value(random_state=(3, tuple([0] * 624 + [1 << 20]), None)), "is none"),
    ("random_states_0.pkl", value(torch_cpu_manual_seed="x"), "device's generator"),
    ("model.safetensors", value(weight=torch.ones(3, 7)), "weight has shape"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "reason"), LIES, ids=[f"{file}: {reason}" for file, _, reason in LIES])
def test_values_that_do_not_fit_are_refused_and_nothing_is_restored(
    file: str, change: Callable[[Any], Any], reason: str, saved: Saved, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(saved.folder, folder)
    codec.write(change(codec.read(folder / file)), folder / file)
    record = json.loads((folder / "commit.json").read_text())
    with ThreadPoolExecutor(1) as pool:
        facts = codec.facts_of(folder / file, pool)
    record["files"][file] = {"size": facts.size, "checksum": facts.checksum}
    (folder / "commit.json").write_text(json.dumps(record))
    before = saved.states()
    with pytest.raises(CheckpointError, match=f"was not loaded.*{reason}"):
        saved.accelerator.load_state(str(folder))
    assert saved.states() == before


def test_shapes_are_compared_where_names_are_not(saved: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(saved.folder, folder)
    codec.write({"weight": torch.ones(3, 2), "bias": torch.ones(7)}, folder / "model.safetensors")
    for file in ("commit.json", "progress.bin"):
        (folder / file).unlink()
    before = saved.states()
    with pytest.raises(CheckpointError, match=r"was not loaded.*bias has shape"):
        saved.accelerator.load_state(str(folder), strict=False)
    assert saved.states() == before


# --- What fits --------------------------------------------------------------------------------------------------------


def stepped(kind: Any, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (2, 5))]
    if kind is not torch.optim.Muon:
        params += [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(())), nn.Parameter(torch.ones(1))]
    optimizer: torch.optim.Optimizer = kind(params, **{"lr": 0.01, **options})
    for param in params[1:]:  # the first one has no gradient, and no state
        param.grad = torch.ones_like(param)
    optimizer.step(lambda: torch.zeros(())) if kind is torch.optim.LBFGS else optimizer.step()
    return optimizer


OPTIMIZERS = sorted(
    (
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and name not in ("Optimizer", "SparseAdam")
    )
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_fits(name: str, tmp_path: Path) -> None:
    optimizer = stepped(getattr(torch.optim, name))
    codec.write(optimizer.state_dict(), tmp_path / "x.bin")
    state = codec.read(tmp_path / "x.bin")
    assert objection_to_optimizer(state, optimizer) is None
    assert objection_to_optimizer(state, type(optimizer)(optimizer.param_groups[0]["params"], lr=0.5)) is None  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "betas": [0.9, 0.95]}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    ],
)
def test_other_options_fit(kind: Any, options: dict[str, Any]) -> None:
    optimizer = stepped(kind, **options)
    assert objection_to_optimizer(copy.deepcopy(optimizer.state_dict()), stepped(kind)) is None


def test_states_of_older_versions_and_of_scripts_fit() -> None:
    optimizer = stepped(torch.optim.AdamW)
    state = copy.deepcopy(optimizer.state_dict())
    for of_one in state["state"].values():
        of_one["step"] = 3  # before torch 1.12
    for name in ("foreach", "maximize", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
        del state["param_groups"][0][name]
    state["param_groups"][0] |= {"initial_lr": 0.1, "name": "all", "params": list("abcde"), "best": float("inf")}
    state["state"] = {"abcde"[number]: of_one for number, of_one in state["state"].items()}
    assert objection_to_optimizer(state, optimizer) is None


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rank": None})

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"left": torch.ones(9), "history": [torch.ones(2)], "kind": "low rank"}


def test_optimizers_of_others_have_states_of_their_own() -> None:
    optimizer = Own([nn.Parameter(torch.ones(3))])
    optimizer.step()
    assert objection_to_optimizer(optimizer.state_dict() | {"more": 1}, Own([nn.Parameter(torch.ones(3))])) is None


def test_a_probe_calls_no_hooks_and_changes_nothing() -> None:
    called: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *args: called.append(args))
    try:
        optimizer = stepped(torch.optim.AdamW)
        called.clear()
        before = torch.get_rng_state()
        assert objection_to_optimizer(optimizer.state_dict(), optimizer) is None
        assert called == []
        assert torch.equal(before, torch.get_rng_state())
    finally:
        handle.remove()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


class WarmUp(lr_scheduler.LRScheduler):
    """A scheduler with values that appear when it steps, and change their kind."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        if self.last_epoch > 1:
            self.reached = [self.last_epoch]
            self.note = "late"
        return [0.1]

    note: Any = None


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "a function with a state": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay()),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2]),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer)]),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "own": lambda optimizer: WarmUp(optimizer),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_a_scheduler_fits_a_new_one_and_the_other_way_round(name: str) -> None:
    old, new = SCHEDULERS[name](sgd()), SCHEDULERS[name](sgd())
    first = copy.deepcopy(new.state_dict())
    for _ in range(4):
        old.step(*([1.0] if name == "plateau" else []))
    later = copy.deepcopy(old.state_dict())
    for state, scheduler in ((later, new), (first, old)):
        assert objection_to_state(state, scheduler) is None
        assert objection_to_state({"verbose": False, **state}, scheduler) is None
        scheduler.load_state_dict(state)


class Decay:
    """A function of the epoch with a state."""

    def __init__(self) -> None:
        self.factor = 0.5

    def __call__(self, epoch: int) -> float:
        self.last = epoch  # a value that appears when it is called
        return self.factor**epoch


@pytest.mark.parametrize(
    ("name", "forge", "reason"),
    [
        ("lambda", lambda state: {}, "lacks last_epoch, lr_lambdas"),
        ("lambda", lambda state: {**state, "lr_lambdas": []}, "lr_lambdas has 1 values here"),
        ("lambda", lambda state: {**state, "lr_lambdas": 3}, "lr_lambdas has 1 values here"),
        ("lambda", lambda state: {**state, "lr_lambdas": [{"__wrapped__": 1}]}, "a function has attributes"),
        ("objects", lambda state: {**state, "lr_lambdas": [None]}, "a function has attributes"),
        ("objects", lambda state: {**state, "lr_lambdas": [{"__call__": 1}]}, "__call__, which is no value of Decay"),
        ("objects", lambda state: {**state, "lr_lambdas": [{"factor": "x"}]}, "factor is a text"),
        ("in a row", lambda state: {**state, "_schedulers": state["_schedulers"][:1]}, "_schedulers has 2 values here"),
        ("in a row", lambda state: {**state, "_schedulers": [{}, {}]}, "_schedulers: the checkpoint lacks last_epoch"),
        ("in a row", lambda state: _within(state, get_lr=1), "_schedulers: .*get_lr, which is no value of ConstantLR"),
        ("chained", lambda state: _within(state, optimizer=1), "_schedulers: .*optimizer, which is no value"),
        ("chained", lambda state: _within(state, last_epoch="x"), "_schedulers: last_epoch is a text"),
    ],
)
def test_what_a_scheduler_holds_is_compared_too(name: str, forge: Callable[[Any], Any], reason: str) -> None:
    kinds = {**SCHEDULERS, "objects": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay())}
    scheduler = kinds[name](sgd())
    assert objection_to_state(copy.deepcopy(scheduler.state_dict()), scheduler) is None
    assert re.search(reason, objection_to_state(forge(copy.deepcopy(scheduler.state_dict())), scheduler) or "")


def _within(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**state, "_schedulers": [{**state["_schedulers"][0], **values}, *state["_schedulers"][1:]]}


def test_schedulers_of_others_judge_themselves() -> None:
    class Plain:
        """No scheduler of torch."""

        def __init__(self) -> None:
            self.step_count = 0

        def state_dict(self) -> Any:
            return {"step_count": self.step_count, "step": "a name of a method", "curve": None}

    wrapped = AcceleratedScheduler(Plain(), sgd())  # type: ignore[arg-type]
    assert objection_to_state({"step_count": 3, "curve": [1], "more": {}}, wrapped) is None
    assert objection_to_state({"step_count": "x"}, wrapped) is not None
    assert objection_to_state("anything", object()) is None
