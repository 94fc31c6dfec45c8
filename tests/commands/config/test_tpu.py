"""`meshwright tpu-config`: the command that runs on the hosts of a TPU pod, as accelerate 1.15 prints it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from meshwright.commands.cli import main

POD = ("--tpu_name", "pod", "--tpu_zone", "zone")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (["--command", "echo a", "--command", "ls", "pwd"], "echo a; ls; pwd"),
        (["--command_file", "FOLDER/commands"], "echo one; echo two"),
        (["--command", "ls", "--install_accelerate"], "pip install accelerate -U; ls"),
        (
            ["--command", "ls", "--install_accelerate", "--accelerate_version", "1.0.0"],
            "pip install accelerate==1.0.0; ls",
        ),
    ],
)
def test_commands_are_run_on_every_host_as_1_15_does(
    words: list[str], commands: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "commands").write_text("echo one\necho two\n")
    main(["tpu-config", *POD, *(word.replace("FOLDER", str(tmp_path)) for word in words), "--debug"])
    said = f"Running gcloud compute tpus tpu-vm ssh pod --zone zone --command cd /usr/share; {commands} --worker all\n"
    assert capsys.readouterr().out == said


def test_what_is_left_out_comes_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: 'NO'\ntpu_name: mine\ntpu_zone: here\ncommands: [a, b]\n")
    main(["tpu-config", "--config_file", str(file), "--use_alpha", "--debug"])
    said = capsys.readouterr().out
    assert said.startswith(
        "Running gcloud alpha compute tpus tpu-vm ssh mine --zone here --command cd /usr/share; a; b "
    )


def test_it_runs_gcloud_and_reports_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="gcloud is not installed"):
        main(["tpu-config", *POD, "--command", "ls"])

    def fail(words: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(7, words)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(SystemExit) as ended:
        main(["tpu-config", *POD, "--command", "ls"])
    assert ended.value.code == 7


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([*POD], "--command"),
        (["--tpu_zone", "z", "--command", "ls"], "give --tpu_name"),
        (["--tpu_name", "n", "--command", "ls"], "give --tpu_zone"),
    ],
)
def test_what_is_missing_is_named(words: list[str], missing: str) -> None:
    with pytest.raises(SystemExit, match=missing):
        main(["tpu-config", *words, "--debug"])


@pytest.mark.parametrize("name", ["--ssh-flag=-oProxyCommand=touch stolen", "a\x1b[2J", "a b", "-x", "a\nb"])
def test_a_name_that_is_an_option_of_gcloud_or_of_the_terminal_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for tpu, zone in ((name, "zone"), ("pod", name)):
        file.write_text(yaml.safe_dump({"tpu_name": tpu, "tpu_zone": zone}))
        with pytest.raises(SystemExit, match=r"is no name|has control characters") as refused:
            main(["tpu-config", "--config_file", str(file), "--command", "ls", "--debug"])
        assert str(refused.value).isprintable()


def test_a_version_is_one_word_of_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--install_accelerate", "--accelerate_version", "1; touch stolen", "--command", "ls\x1b[2J"]
    main(["tpu-config", *POD, *words, "--debug"])
    said = capsys.readouterr().out
    assert "pip install 'accelerate==1; touch stolen'; ls·[2J" in said
