"""`meshwright check`: what belongs to which check, and what a launch would not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.commands.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mesh", "--kill_at", "3", "train.py"), "--kill_at belongs to --resume."),
        (("--json", "result.json", "train.py"), "--json belongs to --mesh."),
        (("--steps", "3", "train.py"), "--steps belongs to --mesh and --resume."),
        (("--resume", "--report", "report.md", "train.py"), "--report belongs to --machine."),
        (("--machine", "train.py"), "--machine checks this machine without a script: leave train.py out."),
        (("--cpu",), "SCRIPT is missing"),
        (("--mesh", "--resume", "train.py"), "not allowed with argument --mesh"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", [("check", "--mesh"), ("plan",)])
def test_a_flag_that_the_launch_would_not_read_is_refused(
    verb: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        main([*verb, "--cpu", "--num_processes", "2", "--fsdp_version", "2", str(script)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "fsdp_version = 2 (flag --fsdp_version) has no effect: it is read by FSDP only (--use_fsdp)." in told


@pytest.mark.parametrize("verb", ["verify-parallel", "verify-resume"])
def test_there_is_one_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "train.py"])
    assert f"meshwright: {verb} is unknown." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["launch", "--check", "train.py"])
    assert "--check is unknown" in capsys.readouterr().err
