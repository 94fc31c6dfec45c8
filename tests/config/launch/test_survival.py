"""What `--survive` cannot do is refused before anything starts, and by name."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.config.launch.survival import refuse_survival
from meshwright.errors import UnsupportedSettingError


def refuse(*, method: str = "elastic", num_processes: int = 4, **flags: Any) -> None:
    refuse_survival(LaunchSettings.resolve({"survive": True, **flags}, None), method, num_processes)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"num_processes": 1}, "survive (flag --survive) cannot be used: this launcher starts one process"),
        ({"method": "mpirun"}, "mpirun starts the processes"),
        ({"nnodes": "2:3"}, "a changing number of machines (flag --nnodes)"),
        ({"rdzv_backend": "c10d"}, "a changing number of machines (flag --rdzv_backend)"),
        ({"use_deepspeed": True}, "use_deepspeed (flag --use_deepspeed) spreads a model"),
        ({"use_megatron_lm": True}, "use_megatron_lm (flag --use_megatron_lm)"),
        (
            {"use_parallelism_config": True, "parallelism_config_tp_size": 2},
            "parallelism_config_tp_size (flag --parallelism_config_tp_size)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_launch_that_could_not_replace_its_processes_is_refused(launch: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedSettingError) as refusal:
        refuse(**launch)
    assert said in str(refusal.value)


def test_replicas_of_the_whole_model_are_not_refused() -> None:
    refuse()
    refuse(use_parallelism_config=True, parallelism_config_dp_replicate_size=4)


def test_replicas_that_fsdp_shards_are_not_refused() -> None:
    refuse(
        use_fsdp=True,
        use_parallelism_config=True,
        parallelism_config_dp_replicate_size=2,
        parallelism_config_dp_shard_size=2,
    )
