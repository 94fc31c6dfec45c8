from __future__ import annotations

import sys

import pytest

from accelerate.utils import compare_versions, imports, is_torch_version
from accelerate.utils.imports import is_numpy_available, is_tensorboard_available, is_wandb_available


def test_every_question_has_an_answer() -> None:
    questions = {name: ask for name, ask in vars(imports).items() if name.startswith("is_")}
    del questions["is_torch_version"]
    assert len(questions) > 50
    assert {name for name, ask in questions.items() if not isinstance(ask(), bool)} == set()


def test_a_package_is_there_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not is_wandb_available()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert not is_tensorboard_available()
    assert is_numpy_available()
    assert not is_numpy_available(min_version="99")
    assert not imports.is_megatron_lm_available()


def test_devices_are_asked_through_torch() -> None:
    assert not imports.is_npu_available(check_device=True)
    assert imports.is_torch_distributed_available()


def test_versions_are_compared() -> None:
    assert is_torch_version(">=", "2.7")
    assert not is_torch_version("<", "2.7")
    assert compare_versions("numpy", "!=", "0.1")
    with pytest.raises(ValueError, match="must be one of >, >="):
        compare_versions("numpy", "~=", "1.0")
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        compare_versions("no_such_package", ">", "1.0")


def test_a_function_that_needs_a_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)

    @imports.deepspeed_required
    def train() -> int:
        return 1

    with pytest.raises(ImportError, match=r"train needs the package deepspeed: pip install deepspeed"):
        train()
