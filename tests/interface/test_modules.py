"""Every module that accelerate 1.15 has can be imported here, or has a reason why not."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.differential.side_by_side import REFERENCE

OWN_TESTS = "for accelerate 1.x's own tests"
KEYS = "keys and cursors of its own menus"
LEFT_OUT = {
    "accelerate.commands.config.sagemaker": "SageMaker's launcher is not here",
    "accelerate.commands.menu.cursor": KEYS,
    "accelerate.commands.menu.helpers": KEYS,
    "accelerate.commands.menu.input": KEYS,
    "accelerate.commands.menu.keymap": KEYS,
    "accelerate.test_utils.examples": OWN_TESTS,
    "accelerate.test_utils.scripts": OWN_TESTS,
}
PUBLISHED = [
    "accelerate.checkpointing",
    "accelerate.commands.config.config_utils",
    "accelerate.commands.estimate",
    "accelerate.commands.menu.selection_menu",
    "accelerate.commands.merge",
    "accelerate.commands.tpu",
    "accelerate.commands.utils",
    "accelerate.memory_utils",
    "accelerate.utils.rich",
    "accelerate.utils.torch_xla",
]
LIST = "import pkgutil, accelerate; print(*(m.name for m in pkgutil.walk_packages(accelerate.__path__, 'accelerate.')))"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


@pytest.mark.parametrize("module", PUBLISHED)
def test_published_paths_are_there(module: str) -> None:
    assert _is_there(module)


@pytest.mark.skipif(REFERENCE is None, reason="set MESHWRIGHT_REFERENCE_PYTHON to accelerate 1.15's")
def test_modules_of_1_15_are_there_or_left_out_for_a_reason(tmp_path: Path) -> None:
    listed = subprocess.run(
        [str(REFERENCE), "-Wignore", "-c", LIST], capture_output=True, text=True, cwd=tmp_path, env={}
    )
    names = listed.stdout.split()
    assert "accelerate.accelerator" in names, listed.stderr
    left_out = [name for name in names if not _is_there(name)]
    excused = [name for name in left_out if any(name == known or name.startswith(f"{known}.") for known in LEFT_OUT)]
    assert left_out == excused
    assert not any(map(_is_there, LEFT_OUT))


def test_a_registered_object_is_written_and_read_alone(tmp_path: Path) -> None:
    from accelerate.checkpointing import load_custom_state, save_custom_state

    saved, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    save_custom_state(saved, tmp_path, index=1)
    load_custom_state(loaded, str(tmp_path), index=1)
    assert (tmp_path / "custom_checkpoint_1.pkl").is_file()
    assert torch.equal(saved.weight, loaded.weight)


def test_the_machine_is_described_for_tests() -> None:
    from accelerate.test_utils.testing import device_count, get_backend, torch_device

    kind, count, allocated = get_backend()
    assert (kind, count) == (torch_device, device_count)
    assert allocated() >= 0


def test_options_are_taken_with_underscores_and_dashes_and_those_given_are_noted() -> None:
    from accelerate.commands.utils import CustomArgumentParser

    parser = CustomArgumentParser("program")
    parser.add_argument("file_name", nargs="?")
    parser.add_argument("--num_processes", "-n", type=int, default=3)
    group = parser.add_argument_group("paths", "Where files are.")
    group.add_argument("--log_dir", default="logs")
    assert "--log-dir" in parser.format_help()
    for spelled in ("--log_dir", "--log-dir"):
        args = parser.parse_args(["train.py", spelled, "here", "-n", "3"])
        assert (args.file_name, args.num_processes, args.log_dir) == ("train.py", 3, "here")
        assert args.nondefault == {"file_name", "num_processes", "log_dir"}
    assert parser.parse_args(["train.py"]).nondefault == {"file_name"}


def test_usages_leave_out_the_placeholder_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    from accelerate.commands.config.config_utils import DYNAMO_BACKENDS, SubcommandHelpFormatter

    parser = argparse.ArgumentParser("tool <command> [<args>] config", formatter_class=SubcommandHelpFormatter)
    assert parser.format_usage() == "usage: tool config [-h]\n"
    parser.add_subparsers().add_parser("update", formatter_class=SubcommandHelpFormatter)
    with pytest.raises(SystemExit):
        parser.parse_args(["update", "--help"])
    assert capsys.readouterr().out.startswith("usage: tool config update [-h]\n")
    assert "INDUCTOR" in DYNAMO_BACKENDS
    assert "NO" not in DYNAMO_BACKENDS


def test_torch_xla_is_installed_on_colab_only() -> None:
    from accelerate.utils import install_xla

    with pytest.raises(RuntimeError, match="Colab"):
        install_xla()


def test_names_of_timm_models_on_the_hub_have_a_prefix() -> None:
    from accelerate.commands.estimate import add_timm_hub_prefix

    names = ["resnet50", "hf-hub:timm/resnet50", "hf_hub:a/b", "local-dir:/path/to/model"]
    assert [add_timm_hub_prefix(name) for name in names] == names
    assert add_timm_hub_prefix("timm/resnet50") == "hf-hub:timm/resnet50"


def test_plugins_are_found_beside_the_accelerator() -> None:
    from accelerate import accelerator, utils

    assert accelerator.DataLoaderConfiguration is utils.DataLoaderConfiguration
    assert accelerator.GradientAccumulationPlugin is utils.GradientAccumulationPlugin


def test_layers_for_casting_are_named_beside_the_other_constants() -> None:
    from accelerate.utils import constants

    assert issubclass(nn.Linear, constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    assert not issubclass(nn.LayerNorm, constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    with pytest.raises(AttributeError, match="has no attribute 'NOTHING'"):
        _ = constants.NOTHING


def test_what_is_left_out_of_a_file_of_variables_is_logged_by_the_published_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from accelerate.utils.environment import convert_dict_to_env_variables

    assert convert_dict_to_env_variables({"GOOD": "1", "BAD": "<x"}) == ["GOOD=1\n"]
    assert [record.name for record in caplog.records] == ["accelerate.utils.environment"]


def test_an_old_kernel_that_is_simulated_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate.utils import check_os_kernel

    monkeypatch.setattr("platform.system", lambda: "Linux")
    for release, expected in (("5.4.0-35-generic", 1), ("5.5.0", 0), ("6.1.0-1", 0)):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        caplog.clear()
        check_os_kernel()
        assert len(caplog.records) == expected, release
        assert not expected or ("5.4.0" in caplog.text and "5.5.0" in caplog.text)
