"""fp8 through TransformerEngine, which needs CUDA: tested with a stand-in of its published interface."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.utils import apply_fp8_autowrap, contextual_fp8_autocast, convert_model, has_transformer_engine_layers
from meshwright import Accelerator, TERecipeKwargs
from meshwright.config.enums import FP8BackendType

from . import transformer_engine_stand_in as stand_in


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 5))
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), inner)


def kinds(model: nn.Module) -> list[str]:
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    own = {stand_in.Linear: "te.Linear", stand_in.LayerNorm: "te.LayerNorm"}
    return [own.get(type(module), type(module).__name__) for module in leaves]


def test_layers_are_replaced_and_keep_their_parameters_with_a_stand_in() -> None:
    model, batch = net(), torch.randn(2, 16)
    expected, params = model(batch), dict(model.named_parameters())
    convert_model(model)
    assert kinds(model) == ["te.Linear", "te.LayerNorm", "te.Linear", "Linear"], "5 is no multiple of 16"
    assert has_transformer_engine_layers(model)
    assert all(param is params[name] for name, param in model.named_parameters())
    torch.testing.assert_close(model(batch), expected)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    torch.testing.assert_close(model(batch), expected)
    convert_model(model, _convert_ln=False)
    assert kinds(model) == ["te.Linear", "LayerNorm", "te.Linear", "Linear"]


def test_forward_passes_run_in_its_autocast_by_the_recipe_with_a_stand_in() -> None:
    recipe = TERecipeKwargs(margin=2, fp8_format="E4M3", use_autocast_during_eval=True)
    model = net()
    assert apply_fp8_autowrap(model, recipe) is model
    model.eval()(torch.randn(2, 16))
    [(enabled, made)] = stand_in.AUTOCASTS
    assert enabled
    assert (made.margin, made.fp8_format) == (2, stand_in.Format.E4M3)
    forward = contextual_fp8_autocast(model.forward, None)
    forward(model, torch.randn(2, 16))
    assert [enabled for enabled, _ in stand_in.AUTOCASTS[1:]] == [False, True], "in evaluation only if asked for"
    apply_fp8_autowrap(net(), TERecipeKwargs(use_mxfp8_block_scaling=True))(torch.randn(2, 16))
    assert stand_in.AUTOCASTS[-1] == (True, stand_in.MXFP8BlockScaling())


def test_a_model_trains_through_it_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setenv("ACCELERATE_FP8_AMAX_HISTORY_LEN", "16")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.fp8_backend is FP8BackendType.TE
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.detach().clone()
    output = model(torch.randn(2, 16))
    assert output.dtype == torch.float32
    accelerator.backward(output.sum())
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    [(enabled, recipe)] = stand_in.AUTOCASTS
    assert (enabled, recipe.amax_history_len) == (True, 16)
