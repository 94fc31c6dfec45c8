"""`--mesh dp=4,tp=2` is the short form of the options of the sizes, for every verb that launches."""

from __future__ import annotations

import pytest

from meshwright.commands.check import check_parser
from meshwright.commands.launch import launch_command_parser
from meshwright.commands.plan import plan_parser
from meshwright.config.environment import PARALLELISM_SIZES
from meshwright.config.launch.options import BY_NAME, MESH_AXES, OPTIONS
from meshwright.config.launch.parser import Parser, explicit_options

VERBS = {"launch": launch_command_parser, "plan": plan_parser, "check": check_parser}


def given(*words: str, verb: str = "launch") -> dict[str, object]:
    """Return the options of a launch that some words say."""
    return explicit_options(VERBS[verb]().parse_args([*words, "train.py"]), OPTIONS)


def test_every_size_has_an_axis() -> None:
    assert set(MESH_AXES.values()) == {f"parallelism_config_{size}" for size in PARALLELISM_SIZES}
    assert set(MESH_AXES.values()) <= set(BY_NAME)


@pytest.mark.parametrize("verb", VERBS)
def test_a_mesh_is_the_options_of_its_sizes(verb: str) -> None:
    long = ("--parallelism_config_dp_replicate_size", "4", "--parallelism_config_tp_size", "2")
    assert given("--mesh", "dp=4, tp=2", verb=verb) == given("--mesh=dp_replicate=4,tp=2", verb=verb)
    assert given("--mesh", "dp=4,tp=2", verb=verb) == given(*long, verb=verb)
    assert given("--mesh", "fsdp=-1,ep=2", verb=verb) == {
        "parallelism_config_dp_shard_size": -1,
        "parallelism_config_ep_size": 2,
    }


def test_the_last_of_two_sizes_holds_as_for_every_option() -> None:
    assert given("--mesh", "tp=2", "--parallelism_config_tp_size", "4") == {"parallelism_config_tp_size": 4}
    assert given("--parallelism_config_tp_size", "4", "--mesh", "tp=2") == {"parallelism_config_tp_size": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tq=2", "axis 'tq' is unknown. Did you mean tp? The axes are dp, fsdp, pp,"),
        ("hsdp=2", "Did you mean fsdp?"),
        ("", "axis '' is unknown. The axes are"),
        ("dp=4,tp", "'tp': expected tp=SIZE, a number of processes, 1 or more.\n"),
        ("dp=0", "'dp=0': expected dp=SIZE, a number of processes, 1 or more, or -1 for what is left."),
        ("tp=-1", "'tp=-1': expected tp=SIZE"),
        ("dp=4 tp=2", "'dp=4 tp=2': expected dp=SIZE"),
        ("dp=2,dp_replicate=2", "the size of 'dp_replicate' is given twice"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_mesh_is_refused(verb: str, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        given(f"--mesh={words}" if words or verb != "check" else "--mesh=,", verb=verb)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_check_needs_no_sizes_for_the_mesh_of_the_launch() -> None:
    for words in (["--mesh", "train.py"], ["--mesh", "--num_processes", "2", "train.py"]):
        args = check_parser().parse_args(words)
        assert (args.mesh, args.training_script) == (True, "train.py")
    assert "parallelism_config_tp_size" not in explicit_options(args, OPTIONS)
    assert not check_parser().parse_args(["train.py"]).mesh


def test_the_help_shows_the_short_form() -> None:
    parser = launch_command_parser()
    assert isinstance(parser, Parser)
    shown = " ".join(parser.format_help().split())
    assert "--mesh AXIS=N,... the mesh, as dp=4,tp=2; axes: dp, fsdp, pp, cp, tp, sp, ep" in shown
    assert "--parallelism_config_tp_size" not in shown
