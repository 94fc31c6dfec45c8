"""The check of the first steps: mistakes are told once, right scripts are not alarmed, and nothing is slower."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from meshwright import Accelerator
from meshwright.errors import FirstStepsError, FirstStepsWarning, UnsupportedSettingError
from meshwright.instruments import PROCESS
from meshwright.tools.first_steps.instrument import FirstSteps
from meshwright.tools.first_steps.records import Copies, Record, compare
from meshwright.tools.first_steps.samples import fingerprint, norms
from tests.launching import run_accelerate
from tests.ranks import run_on_ranks
from tests.sizes import cases
from tests.tools.first_steps import scripts
from tests.training import make_data, make_model

Told = list[tuple[str, str]]


def told_by(script: str, way: str) -> Told:
    """Run a script, and return the file and the text of each warning of the check."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(scripts, script)(scripts.options_of(way))
    kinds = FirstStepsWarning, UserWarning
    ours = [each for each in caught if issubclass(each.category, kinds) and "lr_scheduler" not in str(each.message)]
    return [(Path(each.filename).name, str(each.message)) for each in ours]


def told_on_ranks(script: Callable[[scripts.Options], None], way: str, world_size: int) -> Told:
    of_ranks = run_on_ranks(world_size, told_by, script=script.__name__, way=way)
    return [each for told in of_ranks for each in told]


def str_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


SEVERAL = [
    (script, way, size)
    for script, (sizes, ways, _) in scripts.MISTAKES.items()
    for way in ways
    for size in sizes
    if size > 1
]
IN_GATE = [(script, way, size) for script, way, size in SEVERAL if size == 2 and way == scripts.MISTAKES[script][1][0]]


@pytest.mark.parametrize(("script", "way", "world_size"), cases(gate=IN_GATE, nightly=SEVERAL), ids=str_of)
def test_a_mistake_is_told_once_with_its_line(script: Any, way: str, world_size: int) -> None:
    found = told_on_ranks(script, way, world_size)
    expected = scripts.MISTAKES[script][2]
    if script is not scripts.optimizer_of_another_model:  # which the engine itself tells, on every rank
        assert len(found) == 1, found
    assert all(re.search(expected, text) for _, text in found), found
    assert all(file in ("scripts.py", "training.py") for file, _ in found)


@pytest.mark.parametrize(
    "script",
    [script for script, (sizes, _, _) in scripts.MISTAKES.items() if 1 in sizes],
    ids=lambda each: each.__name__,
)
def test_a_mistake_on_one_process_is_told_once(script: Any) -> None:
    ((file, text),) = told_by(script.__name__, "ddp")
    assert re.search(scripts.MISTAKES[script][2], text)
    assert file == "scripts.py"


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("script", scripts.RIGHT, ids=lambda each: each.__name__)
def test_a_right_script_is_not_alarmed(script: Any, way: str) -> None:
    if way in scripts.RIGHT[script]:
        assert told_on_ranks(script, way, 2) == []


def right_on_one_process() -> Told:
    return [each for script in scripts.RIGHT for each in told_by(script.__name__, "ddp")]


def test_right_scripts_on_one_process_are_not_alarmed() -> None:
    assert right_on_one_process() == []


@pytest.mark.parametrize("script", scripts.MESHES, ids=lambda each: each.__name__)
def test_ranks_that_share_samples_by_design_are_not_alarmed(script: Any) -> None:
    assert told_on_ranks(script, "ddp", 4 if script is scripts.copies_of_shards else 2) == []


# --- how it behaves ---------------------------------------------------------------------------------------------------


def test_after_two_steps_nothing_is_left_of_it() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*scripts.parts(accelerator))
    assert [type(each) for each in accelerator.instruments] == [FirstSteps, *map(type, PROCESS)]
    copied = copy.deepcopy(model)
    scripts.loop(accelerator, model, optimizer, loader, steps=2)
    assert list(accelerator.instruments) == list(PROCESS)
    assert not model._forward_pre_hooks
    assert not _global_optimizer_pre_hooks
    copied(make_data(4)[:][0])
    assert list(Accelerator(cpu=True).instruments) == list(PROCESS), "once per run"


def late_and_missing_ranks() -> bool:
    """Rank 1 makes no step at all, and rank 0 does not wait for it."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = scripts.parts(accelerator, seed=accelerator.process_index)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if accelerator.is_main_process:
        scripts.loop(accelerator, model, optimizer, loader)
    return FirstSteps.current is not None and FirstSteps.current.is_over


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    assert run_on_ranks(2, late_and_missing_ranks) == [True, False]


def test_an_error_in_the_check_ends_the_check_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: FirstSteps, *_: Any) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr(FirstSteps, "_look_at_gradients", fail)
    accelerator = Accelerator(cpu=True)
    scripts.loop(accelerator, *accelerator.prepare(*scripts.parts(accelerator)))
    assert "The check of the first steps ended early, and training goes on: KeyError('unexpected')" in caplog.text
    assert list(accelerator.instruments) == list(PROCESS)


def test_off_leaves_it_out_raise_makes_an_error_and_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_FIRST_STEPS", "off")
    assert list(Accelerator(cpu=True).instruments) == list(PROCESS)
    monkeypatch.setenv("MESHWRIGHT_FIRST_STEPS", "raise")
    with pytest.raises(FirstStepsError, match=r"scripts\.py:\d+: gradient_accumulation_steps=4, but"):
        scripts.accumulate_not_used({"cpu": True})
    FirstSteps.current = None
    monkeypatch.setenv("MESHWRIGHT_FIRST_STEPS", "maybe")
    with pytest.raises(UnsupportedSettingError, match="MESHWRIGHT_FIRST_STEPS=maybe cannot be used"):
        Accelerator(cpu=True)


SCRIPT = """
import torch
from torch.utils.data import DataLoader
from meshwright import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for batch in DataLoader(torch.randn(16, 4), batch_size=2):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_launch_shows_the_finding_with_its_line_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launched = run_accelerate("launch", "--cpu", "--num_processes", 2, "train.py", directory=tmp_path)
    assert launched.code == 0
    assert launched.complaints.count("Ranks 0 and 1 computed on the same batches in the first 2 steps.") == 1
    assert re.search(r"train\.py:12: FirstStepsWarning", launched.complaints)


def test_warnings_that_are_errors_end_the_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FirstStepsWarning)
        with pytest.raises(FirstStepsWarning, match="nobody cleared them"):
            scripts.gradients_not_cleared({"cpu": True})


# --- its numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (1, 4_000_000), (3_000_000, 2)])
def test_norms_read_a_bounded_part_of_any_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 2.0)
    (norm,) = norms([tensor])
    assert norm is not None
    assert norm == pytest.approx(2 * min(tensor.numel(), norm / 2))
    assert norm / 2 <= 1 << 19
    assert norms([tensor.t() if tensor.dim() == 2 else tensor])[0] is not None


def test_norms_leave_out_what_has_no_such_values() -> None:
    sparse = torch.ones(2, 2).to_sparse()
    assert norms([None, torch.ones(2, device="meta"), sparse, torch.ones(2, dtype=torch.int8)]) == [None] * 4
    assert norms([]) == []


def test_a_storage_that_is_empty_is_not_read() -> None:
    away, here = torch.ones(3), torch.ones(3)
    away.untyped_storage().resize_(0)
    assert norms([away, here]) == [None, 3.0]
    assert fingerprint([away]) is None


def test_fingerprints_tell_inputs_apart_and_know_what_they_do_not_know() -> None:
    one_hot = torch.eye(3)
    numbers = [fingerprint(((row,), {"mask": None, "scale": 1.0})) for row in one_hot]
    assert len(set(numbers)) == 3
    assert fingerprint(((one_hot[0],), {"mask": None, "scale": 1.0})) == numbers[0]
    assert fingerprint(((one_hot[0].bfloat16(),), {})) is not None
    assert fingerprint(((object(), one_hot), {})) is None
    assert fingerprint(((), {})) is None
    assert fingerprint((torch.ones(0),)) is None


def record(norm: float, **values: Any) -> Record:
    copies = Copies(
        ranks=[0, 1], what="gradients", remedy="Average them.", place=("a.py", 1), names=["weight"], norms=[norm]
    )
    return Record(copies={"0/own/gradients": copies}, place_of_inputs=("a.py", 2), **values)


def test_copies_may_differ_by_rounding_and_batches_that_never_change_are_no_finding() -> None:
    assert compare({0: record(1.0, inputs=[5, 5]), 1: record(1.00001, inputs=[5, 5], data_rank=1)}) == []
    assert compare({0: record(float("nan")), 1: record(1.0)}) == []
    (finding,) = compare({0: record(1.0), 1: record(1.1)})
    assert finding.text == "Ranks 0 and 1 have different gradients: weight (1 of 1). Average them."
    (finding,) = compare({0: record(1.0, inputs=[5, 6]), 1: record(1.0, inputs=[5, 6], data_rank=1)})
    assert finding.place == ("a.py", 2)
    assert compare({0: record(1.0, inputs=[5, 6]), 1: record(1.0, inputs=[5, 6], data_rank=0)}) == []
    assert compare({0: record(1.0, inputs=[5, None]), 1: record(1.0, inputs=[5, None], data_rank=1)}) == []


def test_a_record_is_read_as_it_was_written() -> None:
    written = record(1.5, inputs=[1, None], data_rank=3, lengths=[(4, ("b.py", 7)), (None, ("b.py", 8))])
    assert Record.from_text(written.as_text()) == written


def test_a_poisoned_batch_of_the_second_step_is_seen() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    broken = [(features, labels) for features, labels in DataLoader(make_data(8), batch_size=4)]
    broken[1][0].fill_(float("inf"))
    with pytest.warns(FirstStepsWarning, match="The loss is not finite"):
        scripts.loop(accelerator, model, optimizer, broken)
