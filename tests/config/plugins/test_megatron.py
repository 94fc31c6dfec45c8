"""Megatron-LM's settings: what each becomes on torch's engines, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.utils import MegatronLMDummyScheduler
from meshwright import Accelerator, FullyShardedDataParallelPlugin, MegatronLMPlugin, TorchTensorParallelPlugin
from meshwright.config.plugins import megatron
from meshwright.config.plugins.parallelism import AXES, ParallelismConfig
from meshwright.config.settings import TrainingSettings
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.modules.dtensors import local
from tests.parallel.mesh.experts import moe
from tests.parallel.ways import train
from tests.ranks import ranks

PAGE = Path(__file__).parents[3] / "docs" / "megatron.md"
FIELDS = [each.name for each in fields(MegatronLMPlugin)]


def resolved(**arguments: Any) -> TrainingSettings:
    return TrainingSettings.from_arguments(
        mixed_precision=None, gradient_accumulation_steps=1, gradient_accumulation_plugin=None, **arguments
    )


def sizes(plugin: MegatronLMPlugin, num_processes: int) -> dict[str, int]:
    config = plugin.parallelism().fitted(num_processes)
    return {axis: config.size(axis) for axis in config.active_mesh_dims}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dp_replicate": 16}),
        ({"tp_degree": 2}, {"dp_replicate": 8, "tp": 2}),
        ({"tp_degree": 2, "pp_degree": 4}, {"pp": 4, "dp_replicate": 2, "tp": 2}),
        ({"tp_degree": 4, "use_distributed_optimizer": True}, {"dp_shard": 4, "tp": 4}),
        ({"context_parallel_size": 2, "use_custom_fsdp": True}, {"dp_shard": 8, "cp": 2}),
    ],
)
def test_degrees_become_axes_of_a_mesh_and_the_rest_sees_different_samples(
    given: dict[str, Any], expected: dict[str, int]
) -> None:
    assert sizes(MegatronLMPlugin(**given), 16) == expected


@pytest.mark.parametrize(
    ("given", "schedule", "microbatches"),
    [
        ({}, "gpipe", 1),
        ({"num_micro_batches": 4}, "1f1b", 4),
        ({"num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 2}, "interleaved", 4),
    ],
)
def test_micro_batches_and_virtual_stages_choose_the_schedule(
    given: dict[str, Any], schedule: str, microbatches: int
) -> None:
    handler = MegatronLMPlugin(pp_degree=2, **given).parallelism().pp_handler
    assert handler is not None
    assert (handler.schedule, handler.microbatches) == (schedule, microbatches)
    stages = handler.fitted(8, 2)
    assert stages.stages_per_rank == (2 if schedule == "interleaved" else 1)


def test_layers_that_do_not_fill_the_virtual_stages_are_refused_with_numbers_that_do() -> None:
    handler = MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=3).parallelism().pp_handler
    assert handler is not None
    with pytest.raises(ValueError, match=r"8 blocks on 2 processes .* Numbers that work: 1, 2"):
        handler.fitted(8, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"use_distributed_optimizer": True}, (False, False, False)),
        ({"use_custom_fsdp": True}, (True, False, False)),
        ({"recompute_activations": True}, (False, True, False)),
        ({"recompute_granularity": "selective"}, (False, True, False)),
        ({"optimizer_cpu_offload": True, "use_distributed_optimizer": True}, (False, False, True)),
    ],
)
def test_memory_settings_become_those_of_fsdp2(given: dict[str, Any], expected: tuple[bool, ...] | None) -> None:
    sharding = MegatronLMPlugin(**given).sharding()
    found = sharding and (sharding.reshard_after_forward, sharding.activation_checkpointing, sharding.offloads)
    assert found == expected


def test_fields_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved().megatron is None
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "true")
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "0.25")
    plugin = resolved().megatron
    assert plugin is not None
    assert (plugin.tp_degree, plugin.sequence_parallelism, plugin.max_norm) == (2, True, 0.25)
    assert MegatronLMPlugin(tp_degree=4).tp_degree == 4, "code comes first"
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    with pytest.raises(ValueError, match="MEGATRON_LM_TP_DEGREE='two' is not a valid int"):
        MegatronLMPlugin()


def test_every_field_is_translated_refused_or_without_effect_and_on_the_page() -> None:
    known = {**megatron._BECOMES, **megatron._REFUSED, **megatron._WITHOUT_EFFECT, "is_train_batch_min": ""}
    assert sorted(known) == sorted(FIELDS)
    page = PAGE.read_text()
    assert [name for name in FIELDS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", megatron._REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=rf"MegatronLMPlugin\({name}=2\) cannot be used: .*\. .*\.$"):
        MegatronLMPlugin(**{name: 2})


def test_what_has_no_effect_is_said_and_what_runs_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    plugin = MegatronLMPlugin(tp_degree=2, tensorboard_dir="logs", sequence_parallelism=True)
    with caplog.at_level(logging.INFO):
        plugin.log_translation()
    said = {record.getMessage(): record.levelno for record in caplog.records}
    assert said["MegatronLMPlugin: tp_degree=2: tp_size=2, by the plan that the model carries"] == logging.INFO
    [warned] = [message for message, level in said.items() if level == logging.WARNING]
    assert warned.startswith("MegatronLMPlugin: tensorboard_dir=logs: has no effect")
    alone = MegatronLMPlugin(sequence_parallelism=True).translation()
    assert [row[2] for row in alone if row[0] == "sequence_parallelism"] == [
        "has no effect: layers are not split (tp_degree is 1)"
    ]


@pytest.mark.parametrize("name", megatron._SIZES)
def test_sizes_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"MegatronLMPlugin\({name}=0\): expected a whole number"):
        MegatronLMPlugin(**{name: 0})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "FSDP"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "a ParallelismConfig"),
        ({"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}, "a torch_tp_plugin"),
    ],
)
def test_two_ways_to_distribute_a_model_are_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Megatron-LM's settings and .*{said}.* leave one of them out"):
        resolved(megatron_lm_plugin=MegatronLMPlugin(), **other)


def test_plugins_of_another_class_are_refused() -> None:
    for argument in ("megatron_lm_plugin", "torch_tp_plugin"):
        with pytest.raises(TypeError, match=f"`{argument}` must be a .*Plugin object, not a int"):
            resolved(**{argument: 2})


def test_the_older_plugin_of_tensor_parallelism_becomes_a_mesh() -> None:
    config = resolved(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2)).parallelism
    assert config is not None
    assert (config.fitted(4).tp_size, config.dp_replicate_size) == (2, 2)
    with pytest.raises(ValueError, match="torch_tp_plugin and parallelism_config"):
        resolved(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2), parallelism_config=ParallelismConfig())
    with pytest.raises(ValueError, match="needs an axis tp of that size"):
        TorchTensorParallelPlugin(tp_size=2, torch_device_mesh=object())


@pytest.mark.parametrize(
    ("sizes", "fitted"),
    [
        ({"cp": 2, "ep": 2}, {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2}),
        ({"tp": 4, "pp": 2}, {"dp_replicate": 2, "pp": 2, "tp": 2}),
        ({"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ({"dp_shard": -1}, {"dp_shard": 4, "tp": 2}),
        ({"dp_replicate": 4}, {"dp_replicate": 4, "tp": 2}),
    ],
)
def test_the_older_plugin_leaves_the_other_axes_to_the_environment(
    sizes: dict[str, int], fitted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for axis, size in {"dp_replicate": 1, "dp_shard": 1, **sizes}.items():  # the launcher sets them all
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", str(size))
    config = TorchTensorParallelPlugin(tp_size=2).parallelism().fitted(8)
    assert {axis: config.size(axis) for axis in (*AXES, "ep") if config.size(axis) > 1} == fitted


def test_experts_are_spread_as_the_plugin_says_and_not_as_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "4")
    assert MegatronLMPlugin().parallelism().ep_size == 1
    plugin = MegatronLMPlugin(expert_model_parallel_size=2, tp_degree=2)
    assert plugin.parallelism().fitted(8).expert_sizes == (4, 1, 2)
    assert ("expert_model_parallel_size", "2", "ep_size=2, by the plan that the model carries") in plugin.translation()


@ranks(2)
def test_a_model_with_experts_is_spread_by_the_plan_that_it_carries() -> None:
    net = moe.model()
    net._ep_plan = {"blocks.*.experts.up": "grouped_gemm"}  # type: ignore[assignment]
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(expert_model_parallel_size=2))
    net = accelerator.prepare(net)
    assert len(local(accelerator.unwrap_model(net).blocks[0].experts.up)) == moe.EXPERTS // 2


def rates(style: str, steps: int, **options: Any) -> list[float]:
    plugin = MegatronLMPlugin(lr_decay_style=style, min_lr=0.01)
    Accelerator(cpu=True, megatron_lm_plugin=plugin)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = MegatronLMDummyScheduler(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(round(schedule.get_last_lr()[0], 6))
        optimizer.step()
        schedule.step()
    return found


def test_the_schedule_warms_up_and_decays_to_the_lowest_rate() -> None:
    assert rates("linear", 7, total_num_steps=5, warmup_num_steps=2) == [0.0, 0.05, 0.1, 0.07, 0.04, 0.01, 0.01]
    assert rates("cosine", 4, total_num_steps=2) == [0.1, 0.055, 0.01, 0.01]
    assert rates("constant", 3, warmup_num_steps=1) == [0.0, 0.1, 0.1]
    with pytest.raises(ValueError, match="needs total_num_steps, the steps of its linear decay"):
        rates("linear", 1)
    with pytest.raises(UnsupportedSettingError, match="lr_decay_style='inverse-square-root'"):
        MegatronLMPlugin(lr_decay_style="inverse-square-root")


@ranks(2)
def test_a_step_takes_several_batches_of_the_loader_and_clips() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3, gradient_clipping=0.5)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    assert accelerator.distributed_type == "MEGATRON_LM"
    assert accelerator.state.megatron_lm_plugin is plugin
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    loader = torch.utils.data.DataLoader(torch.arange(24.0).unsqueeze(1), batch_size=2)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert (plugin.micro_batch_size, plugin.data_parallel_size, plugin.global_batch_size) == (2, 2, 12)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [6, 6]
    accelerator.backward(-1000 * model(batches[0]).mean())
    optimizer.step()
    torch.testing.assert_close(accelerator.unwrap_model(model).weight.item(), 0.5)
    with pytest.raises(ValueError, match="makes its batches itself"):
        accelerator.prepare(torch.utils.data.DataLoader([1, 2], batch_size=None))  # type: ignore[arg-type]
    none = MegatronLMPlugin(gradient_clipping=0.0)
    assert none.max_norm is None


@ranks(2)
def test_offload_without_shards_is_refused() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, optimizer_cpu_offload=True)
    with pytest.raises(UnsupportedSettingError, match="optimizer_cpu_offload of Megatron-LM"):
        Accelerator(cpu=True, megatron_lm_plugin=plugin)


@pytest.mark.nightly
def test_sequences_are_split_by_context_parallel_size_and_train_as_on_one_process() -> None:
    plugin = MegatronLMPlugin(context_parallel_size=2, gradient_clipping=0.0)
    [expected] = train("one")
    for losses in train("cp2", parallelism_config=None, megatron_lm_plugin=plugin):
        assert losses == pytest.approx(expected, abs=1e-5)
