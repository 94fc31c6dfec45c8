"""Installing, using and uninstalling meshwright changes no file of Hugging Face's accelerate."""

from __future__ import annotations

from pathlib import Path

from tests.door.environments import TELLS, Environment, install, make_environment, pip


def test_no_file_of_theirs_changes(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "it", theirs=True)
    before, packages = environment.theirs(), {entry.name for entry in environment.packages.iterdir()}
    assert len(before) > 90
    install(environment, wheel)
    assert environment.theirs() == before
    for command in (["-m", "meshwright", TELLS], ["-m", "meshwright", "env"]):
        assert environment.run(environment.python, *command, at=tmp_path).code == 0
    assert environment.theirs() == before
    assert "accelerate 1.15.0\n" in pip(environment, "list", "--format", "freeze").replace("==", " ")
    pip(environment, "uninstall", "--yes", "meshwright")
    assert environment.theirs() == before
    assert {entry.name for entry in environment.packages.iterdir()} - {"__pycache__"} == packages
    assert not list((environment.root / "bin").glob("meshwright*"))


def test_their_commands_are_ours_behind_the_door(with_theirs: Environment, tmp_path: Path) -> None:
    def say(*words: str) -> str:
        done = with_theirs.run(with_theirs.program(words[0]), *words[1:], at=tmp_path, MESHWRIGHT_DOOR="1")
        assert done.code == 0, done.complaints
        return done.printed

    assert say("accelerate", "--version").startswith("meshwright ")
    assert "usage: accelerate launch" in say("accelerate", "launch", "--help")
    assert "usage: accelerate estimate-memory" in say("accelerate", "estimate-memory", "--help")
    for command in ("launch", "estimate-memory", "merge-weights", "config"):
        assert "usage: accelerate" in say(f"accelerate-{command}", "--help")
    script = tmp_path / "train.py"
    script.write_text("import accelerate; print(accelerate.__version__)")
    assert say("accelerate-launch", "--cpu", "train.py").endswith("+meshwright.1\n")
    assert say("python", "-m", "accelerate.commands.launch", "--cpu", "train.py").endswith("+meshwright.1\n")
