"""The door refuses to be half open, and names the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.door.environments import Environment, link_distributions, run_notebook
from tests.sizes import at_night

INSTALL = "import meshwright\nmeshwright.install()\n"


def refused(environment: Environment, program: str, at: Path, **variables: str) -> str:
    """Run a script that fails, and return the last of its complaints."""
    (at / "train.py").write_text(program)
    done = environment.run(environment.python, "train.py", at=at, **variables)
    assert done.code == 1
    return done.complaints.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("import torch\nimport accelerate as acc", "line 2: import accelerate as acc"),
        at_night("from accelerate.utils import set_seed", "line 1: from accelerate.utils import set_seed"),
        at_night("import transformers\nimport os\nfrom transformers import Trainer", "line 3: from transformers"),
        at_night("import helper", "line 1: import helper"),
    ],
)
def test_theirs_was_imported_before(statement: str, line: str, with_theirs: Environment, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import accelerate")
    said = refused(with_theirs, f"{statement}\n{INSTALL}", tmp_path)
    assert "accelerate 1.15.0 is imported already, from" in said
    assert f"train.py, {line}" in said
    assert "before that" in said


@pytest.mark.parametrize(
    ("statement", "package"),
    [("import transformers", "transformers"), at_night("from diffusers import DDPMScheduler", "diffusers")],
)
def test_a_library_was_imported_before_that_has_found_none(
    statement: str, package: str, without_theirs: Environment, tmp_path: Path
) -> None:
    said = refused(without_theirs, f"import os\n{statement}\n{INSTALL}", tmp_path)
    assert f"{package} is imported already, and has found that accelerate is not installed" in said
    assert f"train.py, line 2: {statement}" in said


def test_a_cell_of_a_notebook_is_named(with_theirs: Environment, tmp_path: Path) -> None:
    link_distributions(with_theirs, ["ipykernel"])
    shown = run_notebook(with_theirs, ["%matplotlib --list", "import accelerate", "%load_ext meshwright"], tmp_path)
    assert "accelerate 1.15.0 is imported already" in shown[2]
    assert "cell 2, line 1: import accelerate" in shown[2].replace("\n", " ")


def test_ray_is_initialized_of_which_only_a_stand_in_is_here(without_theirs: Environment, tmp_path: Path) -> None:
    stand_in = """
from types import SimpleNamespace
def is_initialized():
    return True
def get_runtime_context():
    return SimpleNamespace(runtime_env={"env_vars": {variables}})
"""
    (tmp_path / "ray.py").write_text(stand_in.replace("{variables}", "{}"))
    said = refused(without_theirs, f"import ray\n{INSTALL}", tmp_path)
    assert "before ray.init()" in said
    (tmp_path / "ray.py").write_text(stand_in.replace("{variables}", "{'MESHWRIGHT_DOOR': '1'}"))
    done = without_theirs.run(without_theirs.python, "train.py", at=tmp_path)
    assert done.code == 0, done.complaints


def test_no_interpreter_would_open_the_door_of_a_target_folder(with_theirs: Environment, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for entry in with_theirs.packages.glob("*meshwright*"):
        if not entry.name.endswith((".pth", ".start")):
            (target / entry.name).symlink_to(entry)
    kept = with_theirs.packages / "meshwright.pth"
    text = kept.read_text()
    kept.unlink()
    try:
        said = refused(with_theirs, INSTALL, tmp_path, PYTHONPATH=str(target))
        done = with_theirs.run(with_theirs.python, "-m", "meshwright", "train.py", at=tmp_path, PYTHONPATH=str(target))
        (tmp_path / "native.py").write_text("import meshwright, sys; print('accelerate' in sys.modules)")
        launch = (with_theirs.python, "-m", "meshwright", "launch", "--cpu", "native.py")
        native = with_theirs.run(*launch, at=tmp_path, PYTHONPATH=str(target), MESHWRIGHT_DOOR="0")
    finally:
        kept.write_text(text)
    assert f"meshwright lies in {target}" in said
    assert "meshwright dropin --wheel" in said
    assert done.code == 1
    assert done.complaints.startswith("meshwright: meshwright lies in")
    assert (native.code, native.printed.split()) == (0, ["False"]), native.complaints
