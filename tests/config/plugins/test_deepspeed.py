"""`DeepSpeedPlugin`: fields, files and variables are merged into one config, and conflicts are named."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.utils import HfDeepSpeedConfig
from meshwright import DeepSpeedPlugin
from meshwright.config.settings import TrainingSettings


def resolved(plugin: Any = None, **arguments: Any) -> TrainingSettings:
    defaults = {"mixed_precision": None, "gradient_accumulation_steps": 1, "gradient_accumulation_plugin": None}
    return TrainingSettings.from_arguments(deepspeed_plugins=plugin, **{**defaults, **arguments})


def test_fields_become_a_config() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, offload_optimizer_device="cpu")
    zero = plugin.deepspeed_config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]) == (3, {"device": "cpu"})
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()
    assert DeepSpeedPlugin().zero_stage == 2
    assert DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1}).zero_stage == 0


def test_a_config_comes_from_a_file_a_dict_or_base64(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for given in (config, str(file), encoded):
        plugin = DeepSpeedPlugin(hf_ds_config=given)
        assert plugin.zero_stage == 1
        assert plugin.is_auto("bf16.enabled")
    assert config["zero_optimization"] == {"stage": 1}  # the caller's own is not changed
    for text, complaint in (("{", "is damaged"), ("[1]", "must hold keys and values")):
        file.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            DeepSpeedPlugin(hf_ds_config=str(file))
    with pytest.raises(ValueError, match="is not a dict, an existing JSON file or base64"):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "missing.json"))


def test_all_conflicts_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    with pytest.raises(ValueError, match="disagree") as caught:
        DeepSpeedPlugin(hf_ds_config=str(file), zero_stage=3)
    said = str(caught.value)
    assert f"zero_optimization.stage is 2 in {file}, 3 by DeepSpeedPlugin(zero_stage=3)" in said
    assert f"gradient_clipping is 1.0 in {file}, 0.5 by the variable ACCELERATE_GRADIENT_CLIPPING" in said


def test_the_environment_fills_what_the_code_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert resolved().deepspeed is None
    assert DeepSpeedPlugin().zero_stage == 2
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    plugins = resolved().deepspeed
    assert plugins is not None
    plugin = plugins["default"]
    assert (plugin.zero_stage, plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (3, False, True)
    assert plugin.selected


def test_precision_and_accumulation_are_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    settings = resolved(DeepSpeedPlugin(hf_ds_config=config))
    assert (settings.mixed_precision, settings.gradient_accumulation.num_steps) == ("bf16", 4)
    assert settings.origins["mixed_precision"] == "the config given in code"
    with pytest.raises(ValueError, match=r"bf16.enabled is True in the config given in code, False by code, mixed_pre"):
        resolved(DeepSpeedPlugin(hf_ds_config=config), mixed_precision="fp16")
    filled = DeepSpeedPlugin(hf_ds_config={"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
    resolved(filled, mixed_precision="bf16")
    assert filled.deepspeed_config["bf16"]["enabled"] is True
    assert filled.deepspeed_config["fp16"]["enabled"] is False
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 4 in .*, 2 by code"):
        resolved(DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2)


def test_published_questions_about_a_config() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "a": {"b": 0}})
    assert config.is_zero2()
    assert not config.is_zero3()
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("no.such", 7) == 7
    assert config.is_false("a.b")
    assert not config.is_true("a.b")
    config.del_config_sub_tree("zero_optimization.offload_param")
    assert config.config["zero_optimization"] == {"stage": 2}
    with pytest.raises(ValueError, match=r"no.such is not in"):
        config.del_config_sub_tree("no.such", must_exist=True)
    plugin = DeepSpeedPlugin(hf_ds_config={"x": {"y": "auto"}, "z": 1})
    plugin.deepspeed_config_process(**{"x.y": 5})
    assert plugin.get_value("x.y") == 5
    with pytest.raises(ValueError, match="z is 1 in the config given in code, 2 by arguments"):
        plugin.fill_match("z", z=2)


def test_several_plugins_one_of_which_is_chosen() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    settings = resolved(plugins)
    assert settings.deepspeed is not None
    assert [plugin.selected for plugin in settings.deepspeed.values()] == [True, False]
    with pytest.raises(TypeError, match=r"deepspeed_plugins\['teacher'\] must be a DeepSpeedPlugin, not a dict"):
        resolved({"teacher": {}})
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugins["teacher"].select()


def test_deepspeed_is_imported_on_use_only() -> None:
    code = (
        "import sys, accelerate; from accelerate import Accelerator, DeepSpeedPlugin;"
        "from accelerate.utils import DummyOptim, DeepSpeedSchedulerWrapper; DeepSpeedPlugin(zero_stage=2);"
        "print('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
