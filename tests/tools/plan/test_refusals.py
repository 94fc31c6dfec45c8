"""What `meshwright plan` says of scripts that it cannot plan."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from meshwright.tools.plan.refusals import too_few_steps, why_not
from meshwright.tools.plan.tracing.host.progress import LoaderPass, Progress
from tests.launching import run_accelerate

EXAMPLES = Path(__file__).parents[3] / "examples"
TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from meshwright import Accelerator
accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones({samples}, 4), batch_size=2))
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def refusal(script: Path, devices: str) -> str:
    done = run_accelerate("plan", "--gpus", devices, script, directory=script.parent)
    assert done.code == 2, done.printed
    return done.complaints


def test_too_few_samples_for_the_processes_are_named_with_their_number(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(samples=3))
    said = refusal(script, "64xH100")
    assert "train.py ended well after one optimizer step, and a plan needs two (as rank 0 of 64)." in said
    assert "why: a loader gave this process 1 batch: 3 samples in batches of 2 are few for 64 processes." in said
    assert "do:  give the script more data" in said


@pytest.mark.parametrize("example", ["distributed_inference", "experts"])
def test_examples_that_cannot_be_planned_are_refused_by_name(example: str, tmp_path: Path) -> None:
    script = tmp_path / f"{example}.py"
    script.write_text((EXAMPLES / script.name).read_text())
    said = refusal(script, "2xA100-80GB")
    line = next(line for line in said.splitlines() if "cannot be planned" in line)
    assert f"{script}:" in line
    expected = {
        "distributed_inference": "it only infers, and a plan is of training steps.\n  do:  `meshwright estimate-memory",
        "experts": "tokens each process gets depends on the numbers of the router. Plan the script with ep_size=1",
    }
    assert expected[example] in said


def test_a_line_that_needs_numbers_is_named_with_what_to_do() -> None:
    log = dedent(
        """\
        Traceback (most recent call last):
          File "/mine/train.py", line 7, in <module>
            table = torch.linalg.eigvals(weights)
          File "/packages/torch/_ops.py", line 1, in fall
            return call()
        torch._subclasses.fake_tensor.DynamicOutputShapeException: aten.nonzero.default
        """
    )
    said = why_not("ended with exit code 1", log, "/mine/train.py")
    assert said.startswith("/mine/train.py:7 cannot be planned:\n    table = torch.linalg.eigvals(weights)\n")
    assert "why: the shape of its result depends on numbers, and planned tensors have none." in said
    assert "do:  compute it without the numbers of tensors" in said
    unknown = why_not("", log.replace("DynamicOutputShapeException", "SomeError"), "/mine/train.py")
    assert "may have nothing to do with the plan" in unknown


def test_a_script_that_takes_too_long_is_refused_with_the_line_at_which_it_was(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(samples=64) + "    while True: model(batch)\n")
    done = run_accelerate("plan", "--gpus", "2xH100", "--seconds_per_run", "3", script, directory=tmp_path)
    assert done.code == 2
    line = len(script.read_text().splitlines())
    assert f"{script}:{line} was still running: the script had not ended after 3 s." in done.complaints


def test_scripts_that_end_early_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("model.eval()\nmodel(questions).argmax(-1)\n")
    assert "it only infers" in too_few_steps(Progress(), str(script), 0, 2)
    script.write_text("model.eval()\nhelper.train_adapters(model)\n")
    assert "it ran no backward pass, and gave no optimizer" in too_few_steps(Progress(), str(script), 0, 2)
    enough = [LoaderPass(samples=100, batch_size=2, batches=25)]
    trained = Progress(models=1, optimizers=1, backward_passes=3, loaders=enough)
    assert "it ran 3 backward passes, and no more." in too_few_steps(trained, str(script), 0, 2)
    idle = Progress(models=1, optimizers=1, loaders=enough)
    assert "it gave an optimizer to prepare(), and ran no backward pass." in too_few_steps(idle, str(script), 0, 2)
    stream = Progress(models=1, optimizers=1, loaders=[LoaderPass(samples=None)])
    assert "why: a loader gave this process 0 batches.\n" in too_few_steps(stream, str(script), 0, 2)
