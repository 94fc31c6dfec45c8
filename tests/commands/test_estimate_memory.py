"""`meshwright estimate-memory` as people type it."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands.cli import main
from meshwright.commands.estimate_memory import estimate_command_parser
from meshwright.inference.estimating import definitions
from tests.launching import run_accelerate

PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(32, 100)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def make():
    assert torch.empty(1).is_meta  # nothing is allocated
    return Model()

def inputs(batch_size, sequence_length):
    return torch.zeros(batch_size, sequence_length, dtype=torch.long)

def loss(outputs, words):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), words.flatten())

def number():
    return 3

def fails():
    return {}["layers"]

constant = 3
"""
PARAMETERS = 100 * 32 + 4 * (2 * 32 * 64 + 96) + 33 * 100


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a program, where this process is: it has torch, which a process of its own would import first."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.fixture
def as_data(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*words: object) -> dict[str, Any]:
        main(["estimate-memory", *map(str, words), "--json"])
        data: dict[str, Any] = json.loads(capsys.readouterr().out)
        return data

    return run


def test_a_model_of_ones_own_is_told_in_tables(folder: Path) -> None:
    words = ["--model", "mine:make", "--inputs", "mine:inputs", "--loss", "mine:loss"]
    words += ["--batch_size", "64", "--sequence-length", "16"]
    ran = run_accelerate("estimate-memory", *words, directory=folder)
    assert ran.code == 0, ran.complaints
    assert f"mine:make: Model with {PARAMETERS:,} parameters" in ran.printed
    _, inference, training, _ = ran.printed.split("\n\n")
    for dtype in ("float32", "float16", "int8", "int4"):
        assert f"\n{dtype}" in inference
        assert (f"\n{dtype} " in training) == dtype.startswith("float")
    assert f"{4 * PARAMETERS / 1000:.2f} KB" in inference
    assert f"{(8 * PARAMETERS + 4 * 19) / 1000:.2f} KB" in training
    assert "16-bit copies" in training
    assert "not known" not in ran.printed
    assert "The batch has 64 samples. Activations take at most " in ran.printed
    assert "The total is the peak" in ran.printed
    assert "mixed precision" in ran.printed
    assert max(map(len, ran.printed.splitlines())) <= 120


def test_without_inputs_activations_are_left_out_and_the_way_to_get_them_is_told(folder: Path) -> None:
    ran = run_accelerate("estimate-memory", "--model", "mine:make", "--dtypes", "float32", directory=folder)
    assert ran.code == 0, ran.complaints
    assert "not known" in ran.printed
    assert "The totals are without activations" in ran.printed
    assert "--inputs module:callable" in ran.printed


def test_the_same_as_data_and_sharded(folder: Path, as_data: Callable[..., dict[str, Any]]) -> None:
    words = ["--model", "mine:make", "--inputs", "mine:inputs", "--dtypes", "bfloat16", "--num_processes", 2, "--fsdp"]
    data = as_data(*words)
    assert (data["class"], data["parameters"], data["num_processes"]) == ("Model", PARAMETERS, 2)
    (found,) = data["estimates"]
    training = found["training"]
    assert (training["stored_in"], training["computed_in"]) == ("float32", "bfloat16")
    assert training["weights"] == 2 * PARAMETERS  # every dimension here is even
    assert training["optimizer"] == 4 * PARAMETERS + 4 * 19
    assert training["peak_in"] in ("forward", "backward", "update")
    assert training["most_activations"] >= training["activations"] > 0
    parts = ("weights", "gradients", "optimizer", "activations", "copies", "communication", "temporaries")
    assert training["total"] == sum(training[part] for part in parts)
    assert found["inference"]["total"] > found["inference"]["weights"] == PARAMETERS
    text = run_accelerate("estimate-memory", *words, directory=folder).printed
    assert "on 2 processes, sharded" in text
    assert "Training with Adam per process" in text
    kept = as_data(*words, "--no_reshard_after_forward")["estimates"][0]["training"]
    assert kept["total"] > training["total"]
    pure = as_data(*words, "--pure_precision")["estimates"][0]["training"]
    assert pure["weights"] == PARAMETERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one model"),
        (["there", "--model", "mine:make"], "name one model"),
        (["--model", "mine"], "not of the form module:callable"),
        (["--model", "yours:make"], "'yours' cannot be imported"),
        (["--model", "mine:mak"], "mine has no 'mak'"),
        (["--model", "torch.nn:Linear"], "needs arguments (in_features, out_features), and it is called without"),
        (["--model", "mine:fails"], "mine:fails failed: KeyError: 'layers' ("),
        (["--model", "mine:make", "--inputs", "mine:loss"], "mine:loss needs arguments ("),
        (["--model", "mine:constant"], "is a int and cannot be called"),
        (["--model", "mine:number"], "returned a int"),
        (["--model", "mine:make", "--loss", "mine:loss"], "give that too"),
        (["empty"], "has no config.json"),
        (["broken"], "is damaged"),
        (["strange"], "neither a model_type"),
        (["no/such/folder"], "no model on the hub can have this name"),
    ],
)
def test_mistakes_are_told(folder: Path, words: list[str], message: str) -> None:
    for name, text in (("empty", None), ("broken", "{"), ("strange", '{"x": 1}')):
        (folder / name).mkdir()
        if text is not None:
            (folder / name / "config.json").write_text(text)
    if "/" in "".join(words):
        pytest.importorskip("huggingface_hub")
    with pytest.raises(SystemExit) as ended:
        main(["estimate-memory", *words])
    told = str(ended.value.code)  # a text: Python prints it, without a traceback, and ends with 1
    assert told.startswith("meshwright estimate-memory: ")
    assert message in told


def test_a_hub_that_cannot_be_reached_is_named_with_what_to_do(folder: Path) -> None:
    pytest.importorskip("huggingface_hub")
    ran = run_accelerate("estimate-memory", "someone/model", directory=folder, HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.code == 1
    assert "could not be queried" in ran.complaints
    assert "http://127.0.0.1:9" in ran.complaints
    assert "--model module:callable" in ran.complaints
    assert "Traceback" not in ran.complaints


def test_numbers_that_make_no_sense_are_refused(folder: Path) -> None:
    ran = run_accelerate("estimate-memory", "--model", "mine:make", "--batch_size", 0, directory=folder)
    assert ran.code == 2
    assert "0 is less than 1" in ran.complaints


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from meshwright.commands.estimate_memory import estimate_command_parser as make;"
        "text = make().format_help(); assert '--fsdp' in text; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_the_published_options_are_here() -> None:
    actions = {action.dest: action for action in estimate_command_parser()._actions}
    assert actions["dtypes"].default == ["float32", "float16", "int8", "int4"]
    assert {"--library_name", "--library-name"} <= set(actions["library_name"].option_strings)
    assert {"--trust_remote_code", "--trust-remote-code"} <= set(actions["trust_remote_code"].option_strings)


class _Hub:
    """A hub that answers without a network."""

    class errors:
        class RepositoryNotFoundError(Exception): ...

        class GatedRepoError(RepositoryNotFoundError): ...

        class RevisionNotFoundError(Exception): ...

        class HFValidationError(ValueError): ...

    class constants:
        ENDPOINT = "https://hub.test"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def try_to_load_from_cache(self, name: str, file: str) -> None:
        return None

    def model_info(self, name: str, token: str | None = None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_Hub.errors.GatedRepoError(), "is gated: accept its terms on https://hub.test/a/b"),
        (_Hub.errors.RepositoryNotFoundError(), "nor a model on the hub"),
        (ConnectionError("no way"), "could not be queried for it \\(ConnectionError: no way\\)"),
        (Namespace(library_name="keras"), "is a model of keras"),
    ],
)
def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    monkeypatch.setattr(definitions, "_package", lambda name: _Hub(answer))
    with pytest.raises(definitions.DefinitionError, match=message):
        definitions.create_empty_model("a/b", None)


def test_an_absent_library_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, contents in (("transformers", '{"model_type": "bert"}'), ("timm", '{"architecture": "resnet18"}')):
        (tmp_path / "config.json").write_text(contents)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(definitions.DefinitionError, match=f"pip install {name}"):
            definitions.create_empty_model(str(tmp_path), None)
