"""What CONTRIBUTING.md shows under "A new ...": one of each, as a file and at most one line elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshwright import Accelerator, Instrument
from meshwright.commands import cli
from meshwright.config.combinations import Feature, Refused, require_combination
from meshwright.config.launch import options, parser, settings
from meshwright.config.launch.options import HARDWARE, Option
from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel import registry
from meshwright.parallel.single import SingleProcess
from meshwright.tracking.general import GeneralTracker


def test_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = ModuleType("meshwright.commands.greet")

    def add_parser(verbs: Any) -> None:
        greet = parser.verb_parser(verbs, "greet")
        greet.add_argument("name")
        greet.set_defaults(run=lambda args: print(f"Good morning, {args.name}."))

    module.add_parser = add_parser
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(parser.VERBS, "greet", "say good morning")
    cli.main(["greet", "Ada"])
    assert capsys.readouterr().out == "Good morning, Ada.\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "  greet           say good morning\n" in capsys.readouterr().out


def test_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Option(
        name="colour", help="of the bars", group=HARDWARE, choices=("red", "blue"), default="red", yaml="colour",
        variable="MESHWRIGHT_COLOUR",
    )  # fmt: skip
    monkeypatch.setattr(settings, "OPTIONS", (*options.OPTIONS, setting))
    assert LaunchSettings.resolve({}, None).resolved["colour"].value == "red"
    given = LaunchSettings.resolve({"colour": "blue"}, None)
    assert given.resolved["colour"].value == "blue"
    assert given.origin("colour") == "flag --colour"
    assert given.child_variables()["MESHWRIGHT_COLOUR"] == "blue"
    monkeypatch.setenv("MESHWRIGHT_COLOUR", "blue")
    assert LaunchSettings.resolve({}, None).resolved["colour"].value == "blue"


def test_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(SingleProcess):
        """Train nothing."""

        def wrap(self, model: nn.Module) -> nn.Module:
            return model.requires_grad_(False)

    monkeypatch.setattr(registry, "SingleProcess", Frozen)
    model = Accelerator(cpu=True).prepare(nn.Linear(2, 1))
    assert not any(param.requires_grad for param in model.parameters())


def test_a_pair_that_does_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Refused(Feature.FP16, (Feature.COMPILE,), "it was never tried.", "Use bf16.")
    monkeypatch.setattr("meshwright.config.combinations.REFUSED", (row,))
    with pytest.raises(UnsupportedSettingError, match=r"cannot be used: it was never tried\. Use bf16\."):
        require_combination({Feature.FP16: "fp16", Feature.COMPILE: "compile"})
    with pytest.raises(UnsupportedSettingError, match="it was never tried"):
        Accelerator(cpu=True, mixed_precision="fp16", dynamo_backend="eager")


def test_a_tracker() -> None:
    seen: list[tuple[dict[str, Any], int | None]] = []

    class Listing(GeneralTracker):
        name = "listing"
        requires_logging_directory = False

        @property
        def tracker(self) -> Any:
            return seen

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Keep no settings."""

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            seen.append((values, step))

    accelerator = Accelerator(cpu=True, log_with=Listing())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    assert seen == [({"loss": 0.5}, 3)]


def test_an_instrument(tmp_path: Path) -> None:
    class Losses(Instrument):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def backward_ended(self, accelerator: Accelerator, loss: Tensor) -> None:
            self.losses.append(float(loss))

    losses = Losses()
    accelerator = Accelerator(cpu=True, instruments=[losses])
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(6, 2), batch_size=2)
    )
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses.losses) == 3
