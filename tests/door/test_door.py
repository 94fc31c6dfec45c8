"""Every door opens `accelerate` as meshwright's, here and in what is started, with theirs installed and without."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.door.environments import TELLS, Environment, link_distributions, run_notebook
from tests.ranks.pool import free_port
from tests.sizes import at_night

OPENED = "`import accelerate` is meshwright's"


def is_ours(told: dict[str, Any], environment: Environment) -> bool:
    """Tell whether a process has said that its accelerate is meshwright's."""
    places = (environment.packages, environment.packages / "meshwright" / "overlay")  # of the drop-in, and of a door
    return (
        told.get("file") in [str(place / "accelerate" / "__init__.py") for place in places]
        and told["version"].endswith("+meshwright.1")
        and told["packages"] == ["accelerate"]
        and told["same"]
    )


def their_source(environment: Environment, scratch: Path) -> str:
    """Return a folder with their package, as a source tree on PYTHONPATH is, or nothing where they are not there."""
    if not (environment.packages / "accelerate").is_dir():
        return ""
    (scratch / "theirs").mkdir()
    (scratch / "theirs" / "accelerate").symlink_to(environment.packages / "accelerate")
    return str(scratch / "theirs")


DOORS = {
    "python -m meshwright": lambda environment: [environment.python, "-m", "meshwright", TELLS],
    "meshwright.install()": lambda environment: [
        environment.python,
        "-c",
        "import meshwright, runpy, sys; meshwright.install(); sys.path.insert(0, sys.argv[1].rpartition('/')[0]);"
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
        TELLS,
    ],
    "meshwright launch": lambda environment: [environment.program("meshwright"), "launch", "--cpu", TELLS],
}


VARIABLE = {"MESHWRIGHT_DOOR": "1"}
LAUNCHED = ("ray", "ipykernel", "jupyter_client")


@pytest.mark.parametrize("door", DOORS)
def test_the_door_is_open_in_this_process_and_in_all_that_it_starts(
    door: str, environment: Environment, tmp_path: Path
) -> None:
    source = their_source(environment, tmp_path)
    done = environment.run(*DOORS[door](environment), "every", tmp_path, source, at=tmp_path)
    told = done.told
    started = told.pop("started")
    assert is_ours(told, environment), told
    assert {name: said for name, said in started.items() if not is_ours(said, environment)} == {}
    assert done.complaints.count(OPENED) == 1, "it says so once, and children are silent"
    assert not any(OPENED in said.get("complaints", "") for said in started.values())


def test_the_door_of_a_notebook(environment: Environment, tmp_path: Path) -> None:
    link_distributions(environment, ["ipykernel"])
    cells = [
        "%load_ext meshwright",
        f"%run {TELLS}",
        f"import sys; answers = !{{sys.executable}} {TELLS}\nprint(answers[-1])",
        "%load_ext meshwright\n%reload_ext meshwright",
    ]
    shown = run_notebook(environment, cells, tmp_path)
    assert shown[0].count(OPENED) == 1
    assert len(shown[0].splitlines()) == 1
    assert is_ours(json.loads(shown[1]), environment)
    assert is_ours(json.loads(shown[2]), environment)
    assert OPENED not in shown[3]


@pytest.mark.nightly
@pytest.mark.parametrize("door", [*DOORS, "MESHWRIGHT_DOOR=1"])
def test_what_launchers_and_servers_start_is_behind_the_door(
    door: str, environment: Environment, tmp_path: Path
) -> None:
    link_distributions(environment, LAUNCHED)
    command = DOORS[door](environment) if door in DOORS else [environment.python, TELLS]
    done = environment.run(*command, "far", at=tmp_path, HOME=str(tmp_path), **({} if door in DOORS else VARIABLE))
    assert_all_are_ours(done.told, environment)


@pytest.mark.nightly
def test_what_a_notebook_starts_is_behind_the_door(environment: Environment, tmp_path: Path) -> None:
    link_distributions(environment, LAUNCHED)
    shown = run_notebook(environment, ["%load_ext meshwright", f"%run {TELLS} far"], tmp_path)
    assert_all_are_ours(json.loads(shown[1].splitlines()[-1]), environment)


@pytest.mark.nightly
def test_what_launchers_and_servers_start_has_the_dropin_distribution(dropped_in: Environment, tmp_path: Path) -> None:
    link_distributions(dropped_in, LAUNCHED)
    told = dropped_in.run(dropped_in.python, TELLS, "far", at=tmp_path, HOME=str(tmp_path)).told
    assert_all_are_ours(told, dropped_in)
    assert told["file"] == str(dropped_in.packages / "accelerate" / "__init__.py")


def assert_all_are_ours(told: dict[str, Any], environment: Environment) -> None:
    """Fail unless a process and all that it has started have said that their accelerate is meshwright's."""
    started = told.pop("started")
    assert is_ours(told, environment), told
    assert {name: said for name, said in started.items() if not is_ours(said, environment)} == {}
    assert set(started) >= {"torchrun", "launch", "spawn", "notebook"}
    assert ("Ray" in started) == (find_spec("ray") is not None)


@pytest.mark.parametrize("environment", ["theirs", at_night("without_theirs")], indirect=True)
@pytest.mark.parametrize(
    "door", ["python -m meshwright", *map(at_night, ["meshwright launch", "meshwright.install()"])]
)
def test_every_name_through_a_door_is_the_object_of_meshwright(
    door: str, environment: Environment, tmp_path: Path
) -> None:
    told = environment.run(*DOORS[door](environment), "names", at=tmp_path).told
    assert told["others"] == []
    assert is_ours(told, environment)


@pytest.mark.nightly
def test_every_name_of_the_dropin_distribution_is_the_object_of_meshwright(
    dropped_in: Environment, tmp_path: Path
) -> None:
    assert dropped_in.tell("names", at=tmp_path)["others"] == []


@pytest.mark.nightly
def test_every_name_in_a_notebook_is_the_object_of_meshwright(with_theirs: Environment, tmp_path: Path) -> None:
    link_distributions(with_theirs, ["ipykernel"])
    shown = run_notebook(with_theirs, ["%load_ext meshwright", f"%run {TELLS} names"], tmp_path)
    assert json.loads(shown[1].splitlines()[-1])["others"] == []


def test_one_line_is_said_however_many_processes_there_are(with_theirs: Environment, tmp_path: Path) -> None:
    program = "import accelerate, os\nprint(accelerate.__version__, 'of', os.environ['RANK'])\n"
    (tmp_path / "train.py").write_text(program)
    command = [with_theirs.program("meshwright"), "launch", "--cpu", "--num_processes", 2, "train.py"]
    done = with_theirs.run(*command, at=tmp_path)
    assert done.code == 0, done.complaints
    assert (done.printed + done.complaints).count(OPENED) == 1
    assert sorted(line.rpartition(" ")[2] for line in done.printed.splitlines() if "+meshwright." in line) == ["0", "1"]


@pytest.mark.parametrize("place", ["accelerate.py", "accelerate/__init__.py"])
def test_a_local_file_that_is_hidden_is_named(place: str, with_theirs: Environment, tmp_path: Path) -> None:
    script, local = tmp_path / "scripts" / "train.py", tmp_path / "scripts" / place
    local.parent.mkdir(parents=True)
    local.write_text("raise SystemExit('imported')")
    script.write_text(TELLS.read_text())
    for command in ([with_theirs.python, "-m", "meshwright"], [with_theirs.program("meshwright"), "launch", "--cpu"]):
        done = with_theirs.run(*command, script.relative_to(tmp_path), at=tmp_path)
        assert is_ours(done.told, with_theirs)
        assert f"{local} is not imported." in done.complaints


def test_a_source_tree_of_theirs_is_named(with_theirs: Environment, tmp_path: Path) -> None:
    source = their_source(with_theirs, tmp_path)
    done = with_theirs.run(with_theirs.python, "-m", "meshwright", TELLS, at=tmp_path, PYTHONPATH=source)
    assert is_ours(done.told, with_theirs)
    assert f"{source}/accelerate/__init__.py is not imported." in done.complaints


def test_the_flags_of_python_stay(with_theirs: Environment, tmp_path: Path) -> None:
    (tmp_path / "flags.py").write_text("import sys; print(sys.flags.isolated, sys.flags.optimize, sys.argv)")
    for flags in (["-I", "-O", "-m", "meshwright"], ["-OIm", "meshwright"], ["-OImmeshwright"]):
        done = with_theirs.run(with_theirs.python, *flags, "flags.py", "-m", "x", at=tmp_path)
        assert done.printed == "1 1 ['flags.py', '-m', 'x']\n", done.complaints


@pytest.mark.parametrize("value", ["", "0"])
def test_the_variable_can_close_the_door(value: str, with_theirs: Environment, tmp_path: Path) -> None:
    program = "import importlib.util; print(importlib.util.find_spec('accelerate').origin)"
    done = with_theirs.run(with_theirs.python, "-c", program, at=tmp_path, MESHWRIGHT_DOOR=value)
    assert done.printed.strip() == str(with_theirs.packages / "accelerate" / "__init__.py")


def test_the_door_is_before_an_editable_install_of_theirs(without_theirs: Environment, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "accelerate").mkdir(parents=True)
    (tmp_path / "theirs" / "accelerate" / "__init__.py").write_text("raise SystemExit('imported')")
    finder = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(tmp_path / "theirs")!r}]) if name == "accelerate" else None
sys.meta_path.insert(0, Editable)
"""
    ways = {
        "__editable__.accelerate-1.15.0.pth": f"{tmp_path / 'theirs'}\n",
        "aaa_editable_finder.py": finder,
        "aaa_editable.pth": "import aaa_editable_finder\n",
    }
    for name, text in ways.items():
        (without_theirs.packages / name).write_text(text)
    try:
        done = without_theirs.run(without_theirs.python, "-m", "meshwright", TELLS, at=tmp_path)
    finally:
        for name in ways:
            (without_theirs.packages / name).unlink()
    assert is_ours(done.told, without_theirs)


@pytest.mark.nightly
def test_torchrun_starts_ranks_behind_the_door(environment: Environment, tmp_path: Path) -> None:
    torchrun = [environment.python, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    done = environment.run(*torchrun, TELLS, "names", at=tmp_path, MESHWRIGHT_DOOR="1")
    told = [json.loads(line) for line in done.printed.splitlines() if line.startswith("{")]
    assert [is_ours(one, environment) for one in told] == [True, True]
    (tmp_path / "train.py").write_text("import meshwright\nmeshwright.install()\nimport accelerate\n")
    done = environment.run(*torchrun, "train.py", at=tmp_path)
    assert (done.code, done.complaints.count(OPENED)) == (0, 1)
