"""Settings: code before environment before default, each value with its origin, and honest refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch.utils.data import DataLoader

from meshwright import Accelerator, DataLoaderConfiguration
from meshwright.config.enums import PrecisionType
from meshwright.config.plugins.compilation import TorchDynamoPlugin
from meshwright.config.plugins.handlers import GradientAccumulationPlugin
from meshwright.config.settings import TrainingSettings, resolve_data_order


def resolved(
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
) -> TrainingSettings:
    return TrainingSettings.from_arguments(
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_accumulation_plugin=gradient_accumulation_plugin,
        dynamo_plugin=dynamo_plugin,
    )


def test_without_anything_the_defaults_hold_and_say_so() -> None:
    settings = resolved()
    assert settings.mixed_precision == "no"
    assert settings.gradient_accumulation.num_steps == 1
    assert settings.origins == {"mixed_precision": "default", "gradient_accumulation_steps": "default"}


def test_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    settings = resolved()
    assert (settings.mixed_precision, settings.gradient_accumulation.num_steps) == ("bf16", 3)
    assert settings.origins == {
        "mixed_precision": "environment variable ACCELERATE_MIXED_PRECISION",
        "gradient_accumulation_steps": "environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    }


def test_code_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    settings = resolved("no", 2)
    assert (settings.mixed_precision, settings.gradient_accumulation.num_steps) == ("no", 2)
    assert settings.origins == {"mixed_precision": "code", "gradient_accumulation_steps": "code"}
    assert resolved(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=5)).origins == {
        "mixed_precision": "environment variable ACCELERATE_MIXED_PRECISION",
        "gradient_accumulation_steps": "code",
    }


def test_explain_prints_each_value_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert resolved(PrecisionType.FP16).explain().splitlines() == [
        "mixed_precision = fp16  (code)",
        "gradient_accumulation_steps = 3  (environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS)",
    ]


def test_settings_do_not_change_once_they_are_made() -> None:
    with pytest.raises(AttributeError):
        resolved().mixed_precision = "bf16"  # type: ignore[misc]


def test_an_unknown_number_format_is_refused_with_its_origin_and_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"mode: fp17 \(from code\). Choose one of no, fp8, fp16, bf16"):
        resolved("fp17")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match=r"mode: half \(from environment variable ACCELERATE_MIXED_PRECISION\)"):
        resolved()


def test_whose_order_the_data_has_is_chosen_by_code_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_data_order(None) == "one-process"
    monkeypatch.setenv("MESHWRIGHT_DATA_ORDER", "accelerate-1")
    assert resolve_data_order(None) == "accelerate-1"
    assert resolve_data_order("one-process") == "one-process"
    monkeypatch.setenv("MESHWRIGHT_DATA_ORDER", "accelerate")
    with pytest.raises(
        ValueError, match=r"'accelerate' \(from environment variable MESHWRIGHT_DATA_ORDER\). Choose one"
    ):
        resolve_data_order(None)
    loaders = DataLoaderConfiguration(order="random")
    with pytest.raises(ValueError, match=r"'random' \(from code\). Choose one of one-process, accelerate-1"):
        Accelerator(cpu=True, dataloader_config=loaders).prepare(DataLoader(range(4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_accumulation_steps": 0}, r"must be 1 or more, not 0 \(code\)"),
        ({"gradient_accumulation_steps": -2}, "must be 1 or more, not -2"),
        ({"gradient_accumulation_steps": 1.5}, "must be 1 or more, not 1.5"),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin()}, "needs num_steps"),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=0)}, "must be 1 or more, not 0"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
            "You can only pass one of `gradient_accumulation_steps`",
        ),
    ],
)
def test_impossible_accumulation_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(**arguments)


def test_impossible_accumulation_from_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0")
    with pytest.raises(ValueError, match=r"not 0 \(environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        resolved()


def test_configuration_is_read_without_torch() -> None:
    program = """
import sys
import meshwright.config.enums, meshwright.config.environment
import meshwright.config.plugins.handlers, meshwright.config.settings
import meshwright.errors, meshwright.runtime.process
meshwright.config.settings.TrainingSettings.from_arguments(
    mixed_precision="bf16", gradient_accumulation_steps=2, gradient_accumulation_plugin=None
).explain()
meshwright.config.plugins.handlers.DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs()
meshwright.runtime.process.ProcessInfo.from_environment()
print(sorted({"torch", "numpy", "safetensors"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_what_the_code_leaves_out_of_a_compile_plugin_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    told = resolved().compilation
    assert told.to_kwargs() == {"backend": "inductor", "mode": "max-autotune", "fullgraph": True}
    assert told.use_regional_compilation is True
    settings = resolved(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", fullgraph=False))
    assert settings.compilation.to_kwargs() == {"backend": "aot_eager", "mode": "max-autotune"}
    explained = settings.explain()
    assert "dynamo_backend = aot_eager  (code)" in explained
    assert "dynamo_mode = max-autotune  (environment variable ACCELERATE_DYNAMO_MODE)" in explained
    assert "dynamo_use_dynamic = None  (default)" in explained


def test_an_unknown_compile_backend_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not resolved().compilation.compiles
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductr")
    with pytest.raises(ValueError, match=r"environment variable ACCELERATE_DYNAMO_BACKEND.*'INDUCTR' is not a Dynamo"):
        resolved()


def test_a_compile_plugin_has_the_environments_values_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TorchDynamoPlugin()
    assert (plain.backend, plain.mode, plain.fullgraph, plain.dynamic) == ("NO", "default", False, None)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "no")
    plugin = TorchDynamoPlugin(mode="max-autotune")
    assert (plugin.backend, plugin.mode, plugin.fullgraph, plugin.dynamic) == ("AOT_EAGER", "max-autotune", True, False)
    assert plugin.to_kwargs() == {"backend": "aot_eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False}
