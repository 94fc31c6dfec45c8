"""`meshwright check`: what two steps show, and how the script ends."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    LocalSGD,
    ParallelismConfig,
    PartialState,
    PipelineConfig,
)
from meshwright.tools import check
from tests.launching import run_accelerate
from tests.ranks import run_on_ranks
from tests.training import loss_of, make_data, make_model

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from meshwright import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.ones(16, 4), batch_size=2):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
print("not reached")
"""


def test_a_launch_lists_what_every_rank_found_and_ends_without_a_panel(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launched = run_accelerate("check", "--cpu", "--num_processes", 2, "train.py", directory=tmp_path)
    title, *findings = launched.printed.splitlines()
    assert title == "meshwright check: 3 findings in 2 optimizer steps on 2 processes"
    assert findings[0].startswith("  train.py:11  accumulate() is used with gradient_accumulation_steps=2, and no")
    assert findings[1].startswith("  train.py:13  SGD was not given to prepare()")
    assert findings[2].startswith("  train.py:13  the parameters of SGD differ between the ranks after a step")
    assert "the run failed" not in launched.complaints
    assert launched.code == 3


def train(accelerator: Accelerator, *, prepares: bool = True, broken: bool = False) -> None:
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(make_data(16), batch_size=4)
    model = accelerator.prepare(model)
    if prepares:
        optimizer, loader = accelerator.prepare(optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch) * (float("nan") if broken else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    raise AssertionError("the check ends the script before")


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 3)])
def test_two_steps_are_made_and_the_exit_code_tells_whether_something_was_found(
    broken: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHWRIGHT_INSTRUMENTS", "meshwright.tools.check:check")
    with pytest.raises(SystemExit) as ending:
        train(Accelerator(cpu=True), broken=broken)
    assert ending.value.code == code
    printed = capsys.readouterr().out
    assert "in 2 optimizer steps on 1 process\n" in printed
    assert ("the loss is nan." in printed) == broken
    assert ("nothing was found" in printed) != broken


def test_without_the_option_nothing_is_looked_at() -> None:
    with pytest.raises(AssertionError, match="ends the script before"):
        train(Accelerator(cpu=True))


# --- scripts without a mistake, on two processes ----------------------------------------------------------------------


def checked(script: str) -> tuple[int, str]:
    """Run a function under the check; return the exit code and what was printed."""
    os.environ["MESHWRIGHT_INSTRUMENTS"] = "meshwright.tools.check:check"  # the worker forgets it after the job
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            globals()[script]()
            assert check._check is not None
            code = check._check._report()
        except SystemExit as ending:
            code = int(ending.code or 0)
    return code, printed.getvalue()


def prepared(accelerator: Accelerator, samples: int = 32, **options: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return accelerator.prepare(model, optimizer, DataLoader(make_data(samples), batch_size=4, **options))


def local_sgd() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local:
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            local.step()


def uneven_inputs() -> None:
    """Rank 1 has no second batch, so it runs no call of the check's that rank 0 runs."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator, samples=12)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def uneven_loader() -> None:
    config = DataLoaderConfiguration(even_batches=False)
    prepared(Accelerator(cpu=True, dataloader_config=config), samples=12)
    PartialState().destroy_process_group()


def optimizer_with_a_closure() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(32), batch_size=4))
    for batch in loader:

        def loss_again(batch: Any = batch) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            return loss.item()

        optimizer.step(loss_again)


class Slow(torch.optim.Optimizer):
    """An optimizer that steps another one, as Lookahead and SAM do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def optimizer_around_another() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = Slow(torch.optim.SGD(model.parameters(), 0.1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(32), batch_size=4))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def two_accelerators() -> None:
    """Each has one optimizer, as the two engines of a distillation have."""
    accelerators = [Accelerator(cpu=True), Accelerator(cpu=True)]
    sets = [prepared(accelerator) for accelerator in accelerators]
    for batches in zip(*(loader for _, _, loader in sets), strict=True):
        for accelerator, (model, optimizer, _), batch in zip(accelerators, sets, batches, strict=True):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def loss_over_all_ranks() -> None:
    """A contrastive loss is computed from what all ranks have, so every rank has the same."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    for batch in loader:
        loss = loss_of(model, batch)
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.backward(loss + (mean - loss).detach())
        optimizer.step()
        optimizer.zero_grad()


def probe_of_one_rank() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    for batch in loader:
        if accelerator.is_main_process:
            probe = make_model(seed=5)
            own = torch.optim.SGD(probe.parameters(), 0.1)
            for _ in range(3):
                loss_of(probe, batch).backward()
                own.step()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def windows_beside_the_loader() -> None:
    """The batches were read before, and windows do not follow the end of the loader."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, loader = prepared(accelerator)
    for batch in list(loader):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def stages_of_a_pipeline() -> None:
    config = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config)
    model, optimizer, loader = prepared(accelerator)
    for features, labels in loader:
        with accelerator.accumulate(model):
            accelerator.forward_backward(model, features, target=labels, loss_fn=nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()


def partitions_of_deepspeed() -> None:
    from tests.parallel.deepspeed.engines import run

    run(2, accumulation=2)


@pytest.mark.parametrize(
    "script",
    [
        local_sgd,
        uneven_inputs,
        uneven_loader,
        optimizer_with_a_closure,
        optimizer_around_another,
        two_accelerators,
        loss_over_all_ranks,
        probe_of_one_rank,
        windows_beside_the_loader,
        stages_of_a_pipeline,
        partitions_of_deepspeed,
    ],
    ids=lambda script: script.__name__,
)
def test_nothing_is_found_in_a_right_script(script: Callable[[], None]) -> None:
    if script is partitions_of_deepspeed:
        pytest.importorskip("deepspeed", reason="pip install deepspeed: see .ci/install_deepspeed")
    (code, printed), (code_of_other, _) = run_on_ranks(2, checked, script=script.__name__)
    steps = 0 if script is uneven_loader else 2
    assert printed == f"meshwright check: nothing was found in {steps} optimizer steps on 2 processes\n"
    assert code == code_of_other == 0


# --- mistakes that only a comparison of ranks shows -------------------------------------------------------------------


def parts_of_the_data() -> None:
    """The script splits the data, and then prepare() does it again."""
    accelerator = Accelerator(cpu=True)
    prepared(accelerator, samples=64 - 32 * accelerator.process_index)


def same_samples() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepared(accelerator)
    for batch in DataLoader(make_data(32), batch_size=4):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        (parts_of_the_data, r"test_check.py:\d+  the prepared loader has different numbers of batches"),
        (same_samples, r"test_check.py:\d+  every rank computed the same losses"),
    ],
)
def test_ranks_are_compared(script: Callable[[], None], finding: str) -> None:
    code, printed = run_on_ranks(2, checked, script=script.__name__)[0]
    assert printed.startswith("meshwright check: 1 finding in ")
    assert re.search(finding, printed)
    assert code == 3
