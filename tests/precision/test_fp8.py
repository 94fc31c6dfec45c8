"""fp8 through torchao: which layers are converted, how close it is to wider formats, and what does not change."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate.utils import FP8BackendType, convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers
from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers
from meshwright import (
    Accelerator,
    AORecipeKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    KwargsHandler,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from meshwright.errors import UnsupportedSettingError
from meshwright.precision import fp8
from tests.ranks import ranks

IN, OUT = 32, 16
FEATURES = 64
CONVERTED = ["2", "4.0"]
TOLERANCE = 0.05  # of the loss at any of 20 steps; 0.030 was measured against fp32 and 0.024 against bf16


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 20))
    return nn.Sequential(
        nn.Linear(IN, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, FEATURES),
        nn.ReLU(),
        inner,
        nn.ReLU(),
        nn.Linear(20, OUT),
    )


def fp8_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def losses(precision: str, steps: int = 20, **options: Any) -> list[float]:
    """Learn a fixed function, with the same data whatever the number format and the number of processes."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(IN, OUT, generator=generator)
    trace = []
    share = 64 // accelerator.num_processes
    for _ in range(steps):
        inputs = torch.randn(64, IN, generator=generator)[accelerator.process_index * share :][:share]
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ teacher))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.append(accelerator.reduce(loss.detach(), "mean").item())
    return trace


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return losses("no")


def test_training_stays_near_the_wider_formats(expected: list[float]) -> None:
    trace = losses("fp8")
    assert trace == pytest.approx(expected, rel=TOLERANCE)
    assert trace == pytest.approx(losses("bf16"), rel=TOLERANCE)
    assert trace != losses("bf16"), "nothing was rounded to fp8"
    assert trace[-1] < 0.8 * trace[0]


def test_layers_are_exchanged_and_everything_else_stays() -> None:
    own = make_model()
    parameters, names = list(own.parameters()), list(own.state_dict())
    seen: list[str] = []
    own[2].register_forward_hook(lambda *_: seen.append("hook"))
    own[2].note = "mine"
    own.eval()
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    optimizer = accelerator.prepare(torch.optim.SGD(own.parameters(), lr=0.1))  # before the model, and still its own
    model = accelerator.prepare(own)
    assert model is own
    assert fp8_names(own) == CONVERTED
    assert has_ao_layers(own)
    assert list(own.state_dict()) == names
    assert all(new is old for new, old in zip(own.parameters(), parameters, strict=True))
    assert (own[2].note, own[2].training) == ("mine", False)
    out = model(torch.randn(16, IN))
    assert out.dtype == torch.float32
    assert seen == ["hook"]
    before = own[2].weight.clone()
    accelerator.backward(out.square().mean())
    optimizer.step()
    assert not torch.equal(own[2].weight, before)
    assert own[2].weight.dtype == torch.float32


def test_the_rest_computes_in_bf16() -> None:
    model = Accelerator(cpu=True, mixed_precision="fp8").prepare(make_model())
    dtypes: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    model(torch.randn(4, IN))
    assert dtypes == [torch.bfloat16]


def test_names_and_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = accelerator.prepare(make_model(seed=1))
    assert accelerator.unwrap_model(model) is model
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "weights")
    from safetensors.torch import load_file

    plain = make_model(seed=2)
    plain.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    other = Accelerator(cpu=True, mixed_precision="no")
    loaded = other.prepare(make_model(seed=3))
    other.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(torch.ones(2, IN)), model(torch.ones(2, IN)))


def test_converted_layers_are_logged_once_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="meshwright"):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
        model = accelerator.prepare(make_model())
        accelerator.prepare(model)
    [told] = [record.message for record in caplog.records if "compute in fp8" in record.message]
    assert told == (
        "2 linear layers of Sequential compute in fp8: 2, 4.0. Left in bf16: 0 (it is the first linear layer); "
        "4.2 (its sizes do not divide by 16); 6 (it is the last linear layer)."
    )


def test_a_model_without_a_fitting_layer_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"converts no layer of Linear, which runs in bf16: .* the model itself"):
        Accelerator(cpu=True, mixed_precision="fp8").prepare(nn.Linear(16, 16))


class Special(nn.Linear):
    """A linear layer with ways of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_subclassed_layers_are_not_converted(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Special(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    model[1].forward = lambda x: x  # type: ignore[method-assign]
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name != "3")
    with pytest.warns(UserWarning, match="converts no layer of Sequential") as told:
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(model)
    text = str(told[0].message)
    assert "0 (it is a Special, whose own ways would be lost)" in text
    assert "1 (its forward was replaced)" in text
    assert "2.out_proj (it is a NonDynamicallyQuantizableLinear" in text
    assert "3 (module_filter_func leaves it out)" in text


def test_a_filter_and_a_config_of_ones_own() -> None:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    recipe = AORecipeKwargs(config=config, module_filter_func=lambda module, name: name in ("0", "2"))
    model = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(make_model())
    assert fp8_names(model) == ["0", "2"]
    used = model[2].config
    assert used.emulate, "there is no hardware for it here"
    assert dataclasses.replace(used, emulate=False) == config
    assert model(torch.randn(16, IN)).isfinite().all()


def test_a_device_without_fp8_arithmetic_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fp8._log_emulation.cache_clear()
    Accelerator(cpu=True, mixed_precision="fp8").prepare(make_model())
    assert "This cpu has no fp8 arithmetic" in caplog.text


def test_a_model_that_has_fp8_layers_is_left_alone() -> None:
    model = make_model()
    convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "6")
    assert fp8_names(Accelerator(cpu=True, mixed_precision="fp8").prepare(model)) == ["6"]
    again = Accelerator(cpu=True, mixed_precision="fp8").prepare(make_model())
    assert fp8_names(Accelerator(cpu=True, mixed_precision="fp8").prepare(again)) == CONVERTED


def test_shards_are_not_gathered_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    with pytest.warns(UserWarning, match="enable_fsdp_float8_all_gather has no effect"):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert type(accelerator.prepare(make_model())[2].weight) is nn.Parameter


def test_tied_layers_stay_tied() -> None:
    shared = nn.Linear(FEATURES, FEATURES)
    model = nn.Sequential(nn.Linear(IN, FEATURES), shared, nn.ReLU(), shared, nn.Linear(FEATURES, OUT))
    prepared = Accelerator(cpu=True, mixed_precision="fp8").prepare(model)
    assert fp8_names(prepared)
    assert prepared[1].weight is prepared[3].weight is shared.weight
    prepared(torch.randn(4, IN)).sum().backward()
    assert shared.weight.grad is not None


# --- helpers --------------------------------------------------------------------------------------------------------


def test_the_published_filters() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 17)), nn.ReLU())
    assert find_first_last_linear_layers(model) == ("0", "2.1")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert not filter_linear_layers(model[0], "0", ["0"])
    assert filter_linear_layers(model[0], "a.b.c", ["b"])
    assert not filter_linear_layers(nn.Linear(16, 8), "x", [])
    assert not filter_linear_layers(nn.Linear(8, 16), "x", [])
    assert filter_linear_layers(nn.Conv2d(16, 3, 1), "x", [])
    square = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    assert [filter_first_and_last_linear_layers(square, name) for name in "012"] == [False, True, False]


def test_converting_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model)
    assert fp8_names(model) == ["1"]
    assert has_ao_layers(model)


# --- what was asked for ---------------------------------------------------------------------------------------------


def test_the_fp8_backend_is_reported() -> None:
    recipe = AORecipeKwargs()
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert accelerator.fp8_backend is FP8BackendType.AO
    assert accelerator.ao_recipe_handler is recipe
    assert accelerator.mixed_precision == "fp8"
    assert accelerator.scaler is None
    assert Accelerator(cpu=True, mixed_precision="no").fp8_backend is FP8BackendType.NO


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [
        (TERecipeKwargs(fp8_format="HYBRID"), "TransformerEngine"),
        (MSAMPRecipeKwargs(opt_level="O2"), "MS-AMP"),
        (FP8RecipeKwargs(), "TransformerEngine"),
        (FP8RecipeKwargs(backend="msamp"), "MS-AMP"),
    ],
)
def test_other_engines_are_refused(recipe: KwargsHandler, engine: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"fp8 through {engine} .*code.*pip install torchao"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def test_the_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    with pytest.raises(UnsupportedSettingError, match=r"environment variable ACCELERATE_FP8_BACKEND"):
        Accelerator(cpu=True)
    assert Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()]).fp8_backend is FP8BackendType.AO
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    assert Accelerator(cpu=True).prepare(make_model())[2].config.pad_inner_dim is False
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TF")
    with pytest.raises(
        ValueError, match=r"'TF' \(from environment variable .*\) is unknown: choose one of TE, MSAMP, AO"
    ):
        Accelerator(cpu=True)


def test_recipes_are_for_fp8_and_one_at_a_time() -> None:
    with pytest.warns(UserWarning, match=r"AORecipeKwargs, which has no effect with mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])
    with pytest.raises(ValueError, match="AORecipeKwargs and TERecipeKwargs: give one recipe"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(), AORecipeKwargs()])


def test_without_torchao_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)  # as Python does where an import is forbidden
    with pytest.raises(UnsupportedSettingError, match=r"through torchao, .* Run `pip install torchao`, or use bf16"):
        Accelerator(cpu=True, mixed_precision="fp8")
    assert not has_ao_layers(make_model())


# --- together with the rest -----------------------------------------------------------------------------------------


def test_fp8_is_compiled() -> None:
    torch._dynamo.reset()
    plain = losses("fp8", steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own tracing
        compiled = losses("fp8", steps=4, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
    assert compiled == pytest.approx(plain, rel=1e-3)


@ranks(2)
def test_two_processes_train_as_one(expected: list[float]) -> None:
    # Each process finds the scales of its own half of the batch, so that not the bits but the losses agree.
    assert losses("fp8") == pytest.approx(expected, rel=TOLERANCE)
    accelerator = Accelerator(mixed_precision="fp8")
    model = accelerator.prepare(make_model())
    assert fp8_names(model.module) == CONVERTED
    accelerator.backward(model(torch.randn(8, IN) * (1 + accelerator.process_index)).square().mean())
    here, there = accelerator.gather(model.module[2].weight.grad[None])
    assert torch.equal(here, there)
    assert list(accelerator.get_state_dict(model)) == list(make_model().state_dict())


@ranks(2)
def test_sharded_models_compute_in_fp8() -> None:
    def sharded(precision: str) -> list[float]:
        return losses(precision, steps=6, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))

    assert sharded("fp8") == pytest.approx(sharded("bf16"), rel=TOLERANCE)
    accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(make_model())
    assert fp8_names(model) == CONVERTED
    whole = accelerator.get_state_dict(model)
    assert list(whole) == (list(make_model().state_dict()) if accelerator.is_main_process else [])
