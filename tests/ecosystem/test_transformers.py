"""transformers and PEFT: Trainer, and models with device maps, on our package; Trainer also beside accelerate 1.15."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from tests.sizes import PROFILE, at_night, on_two_processes

from .libraries import REPOSITORY, folder, needs_libraries, run_scenario, run_with_torchrun

pytestmark = [needs_libraries]


@on_two_processes
def test_trainer_trains_evaluates_predicts_saves_and_resumes(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("trainer", "plain", world_size=world_size, directory=tmp_path)
    assert found["wrapped"] == ("BertForSequenceClassification" if world_size == 1 else "DistributedDataParallel")
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["resumed_losses"] == found["losses"], "a resumed run carries the history and repeats the rest"
    assert found["resumed_off_by"] == 0.0
    assert found["evaluated"]["eval_count"] == 29, "every sample once, though 29 is no multiple"
    assert found["evaluated"]["eval_accuracy"] == 1.0
    assert found["predicted"] == [29, 3]
    assert found["predictions_off_by"] < 1e-6
    assert found["accumulated"]["moved"] > 1e-2
    assert found["accumulated"]["off_by"] < 1e-5
    assert found["bf16"]["dtype"] == "torch.float32"
    assert found["bf16"]["losses"] != found["losses"]
    assert found["bf16"]["losses"] == pytest.approx(found["losses"], rel=0.02)


def test_trainer_shards_with_fsdp(tmp_path: Path) -> None:
    found = run_scenario("trainer", "fsdp", world_size=2, directory=tmp_path)
    assert found["kinds"] == ["DTensor"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["resumed_losses"] == found["losses"]
    assert found["resumed_off_by"] == 0.0
    assert found["evaluated"] == 29
    assert found["ddp_off_by"] < 1e-6, "as by DDP"
    assert found["saved_off_by"] < 1e-6


@pytest.mark.parametrize(("world_size", "tolerance"), [at_night(1, 0.0), at_night(2, 1e-6)])
def test_trainer_ends_and_evaluates_as_with_accelerate_1_15(world_size: int, tolerance: float, tmp_path: Path) -> None:
    ended, evaluated = {}, []
    for name, path in {"ours": {}, "reference": {"PYTHONPATH": folder("reference")}}.items():
        file = tmp_path / f"{name}.pt"
        found = run_with_torchrun("trainer_parameters", file, world_size=world_size, directory=tmp_path, **path)
        assert found["processes"] == world_size
        ended[found["version"]] = torch.load(file, weights_only=True)
        evaluated.append(found["evaluated"])
    assert list(ended) == [importlib.metadata.version("accelerate"), "1.15.0"]
    ours, theirs = ended.values()
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= tolerance
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6), "also where the last batch is not full"


@on_two_processes
def test_models_with_device_maps_compute_the_same_and_carry_adapters(world_size: int, tmp_path: Path) -> None:
    found = run_scenario("device_maps", world_size=world_size, directory=tmp_path)
    assert len(found["placed"]) == world_size
    for placed in found["placed"]:
        assert {name: result["off_by"] for name, result in placed.items()} == dict.fromkeys(placed, 0.0)
        assert placed["disk"]["places"] == placed["auto, little memory"]["places"] == ["cpu", "disk"]
    lora = found["lora"]
    assert lora["losses"][-1] < 0.95 * lora["losses"][0]
    assert lora["base_moved"] == 0.0
    assert lora["ranks_agree"] == 0.0
    assert lora["changed_outputs"] > 1e-2
    assert max(lora["off_by"].values()) < 1e-6


@pytest.mark.parametrize("world_size", [at_night(2), 4])
def test_models_train_by_their_own_plans_of_tensor_parallelism(world_size: int, tmp_path: Path) -> None:
    architectures = ["Qwen3", "Gemma3", "Qwen3Moe", "DeepseekV3"] if world_size == 2 else ["Qwen3", "Gemma3"]
    found = run_scenario("tensor_parallel", *architectures, world_size=world_size, directory=tmp_path)
    for architecture in architectures:
        assert max(found[architecture].values()) < 1e-5, found


def test_experts_are_split_also_where_transformers_applies_plans_by_name_which_is_simulated(tmp_path: Path) -> None:
    architectures = ["Mixtral"] if PROFILE == "gate" else ["Mixtral", "Qwen3Moe", "DeepseekV3"]
    changed = ["Mixtral:colwise", "Mixtral:"]
    found = run_scenario(
        "tensor_parallel", *architectures, *changed, world_size=2, directory=tmp_path, PLANS_BY_NAME="1"
    )
    assert "multiply gates of some columns with the values of others" in found["Mixtral:colwise"]
    assert "splits model.layers.0.mlp.experts." in found["Mixtral:"]
    assert "has no style by which it computes with a part" in found["Mixtral:"]
    for architecture in architectures:
        assert max(found[architecture].values()) < 1e-5, found


def test_experts_train_by_their_own_plans_as_on_one_process(tmp_path: Path) -> None:
    ways: list[tuple[str, int, dict[str, int]]] = [
        ("Mixtral", 2, {"dp_shard_size": 2, "ep_size": 2}),
        ("GptOss", 2, {"dp_shard_size": 2, "ep_size": 2}),
    ]
    if PROFILE == "nightly":
        both = {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}
        every = {**both, "cp_size": 2}
        ways += [
            ("Qwen3Moe", 4, both),
            ("Mixtral", 4, both),
            ("Mixtral", 4, {"dp_shard_size": 2, "cp_size": 2, "ep_size": 4}),
            ("Mixtral", 4, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
            ("Qwen3Moe", 4, {"dp_shard_size": 4, "ep_size": 2}),
            ("GptOss", 4, {"dp_shard_size": 4, "ep_size": 4}),
            ("Mixtral", 8, every),
            ("Qwen3Moe", 8, every),
        ]
    words = [word for architecture, size, sizes in ways for word in (architecture, size, json.dumps(sizes))]
    options = {"world_size": 1, "directory": tmp_path, "PYTHONPATH": str(REPOSITORY)}
    found = run_scenario("expert_parallel", *words, "Mixtral", 2, "{}", **options)["found"]  # type: ignore[arg-type]
    router = found.pop()
    assert router.pop("of their means") > 1e-3, "what each process computes alone is another loss"
    for way, off_by in zip([*ways, "router"], [*found, router], strict=True):
        assert max(off_by.values()) < 1e-5, (way, off_by)


@pytest.mark.parametrize("world_size", [2, at_night(4)])
def test_models_that_transformers_has_spread_train_as_they_are_or_are_refused(world_size: int, tmp_path: Path) -> None:
    architectures = ["Qwen3"] if PROFILE == "gate" else ["Qwen3", "Gemma3", "Qwen3Moe", "DeepseekV3", "Mixtral"]
    scenarios = str(REPOSITORY / "tests" / "ecosystem" / "scenarios")
    found = run_scenario(
        "loaded_spread", *architectures, world_size=world_size, directory=tmp_path, PYTHONPATH=scenarios
    )
    used = {2: {"tp under tp", "fsdp under none", "fsdp under fsdp"}, 4: {"fsdp x tp under fsdp x tp"}}[world_size]
    for way, outcome in found.items():
        if way.partition(": ")[2] in used:
            assert max(outcome.values()) < 1e-5, (way, outcome)
        elif way != "scenario":
            assert "was spread before prepare()" in outcome, (way, outcome)
            assert "ParallelismConfig(" in outcome, (way, outcome)


def test_memory_is_estimated_as_the_model_uses_it(tmp_path: Path) -> None:
    found = run_scenario("estimates", world_size=1, directory=tmp_path)
    data = found["of_the_folder"]
    assert data["class"] == "LlamaForCausalLM"
    assert data["estimates"] == found["of_the_file"]["estimates"]
    single, half, quarter = data["estimates"]
    assert single["inference"]["weights"] == found["weights"]
    assert single["largest_layer"] >= found["one_layer"]
    assert quarter["inference"]["weights"] < half["inference"]["weights"] < single["inference"]["weights"]
    assert single["left_out"] is None
    assert single["training"]["most_activations"] == pytest.approx(found["kept"], rel=0.1)
    assert 0 < half["training"]["most_activations"] < single["training"]["most_activations"]


def test_a_llama_trains_on_parts_of_sequences_by_the_documented_recipe(tmp_path: Path) -> None:
    found = run_scenario("context_parallel", world_size=2, directory=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert max(found["off_by"].values()) < 1e-5, found["off_by"]
    assert found["norm"] > 0.1


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_packed_documents_windows_sinks_and_padding_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    lengths = (137, 2041, 89) if PROFILE == "nightly" else (13, 41, 9)
    found = run_scenario("packed_sequences", *lengths, world_size=world_size, directory=tmp_path, time_limit=1200.0)
    results = found["results"]
    assert {share for name, share in results.items() if "moved" in name} == {50.0}
    assert max(off_by for name, off_by in results.items() if "moved" not in name) < 1e-5, results


def test_masks_inside_of_simulated_functions_of_another_version_are_carried_or_refused(tmp_path: Path) -> None:
    found = run_scenario("wrapped_masks", world_size=2, directory=tmp_path)
    assert max(found["off_by"].values()) < 1e-5, found
    for refusal in found["refusals"].values():
        assert "its attention has a mask of its own" in refusal, found


def test_a_llama_trains_by_settings_of_megatron_as_on_one_process(tmp_path: Path) -> None:
    ways: list[tuple[int, dict[str, object]]] = [
        (2, {"tp_degree": 2, "sequence_parallelism": True}),
        (4, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}),
    ]
    if PROFILE == "nightly":
        both = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4}
        ways += [
            (2, {"tp_degree": 2}),
            (2, {"pp_degree": 2, "num_micro_batches": 2}),
            (2, {"use_distributed_optimizer": True, "recompute_granularity": "full", "optimizer_cpu_offload": True}),
            (4, {"tp_degree": 2, "use_distributed_optimizer": True, "sequence_parallelism": True}),
            (4, {**both, "sequence_parallelism": True, "recompute_activations": True}),
            (4, {**both, "sequence_parallelism": True, "num_layers_per_virtual_pipeline_stage": 1}),
            (4, {"pp_degree": 2, "use_distributed_optimizer": True, "num_micro_batches": 4}),
        ]
    words = [word for world_size, fields in ways for word in (world_size, json.dumps(fields))]
    results = run_scenario("megatron", *words, world_size=1, directory=tmp_path)["found"]
    whole = 39200
    for (world_size, fields), found in zip(ways, results, strict=True):
        assert max(found["off_by"].values()) < 1e-5, (fields, found)
        assert found["norm"] > 0.5, "gradients were clipped"
        assert found["type"] == "MEGATRON_LM"
        degree = int(str(fields.get("tp_degree", 1))) * int(str(fields.get("pp_degree", 1)))
        assert found["batch"] == 2 * (world_size // degree) * int(str(fields.get("num_micro_batches", 1)))
        assert found["held"] < 0.6 * whole, "every process holds a part"
