"""Models of transformers and adapters of PEFT, handed over from every mesh: equal to what one process saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sizes import cases

from .libraries import needs_libraries, run_scenario

pytestmark = [needs_libraries]

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "cohere",
    "starcoder2",
    "bloom",
    "opt",
    "falcon",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "glm4_moe",
)
MESHES = {
    1: "one,offloaded blocks",
    2: "ddp,fsdp,fsdp compiled,tp,pp,interleaved pp,ep,cp,sp,zero2,zero3",
    4: "fsdp4,hsdp,fsdp x tp,pp x fsdp,pp x tp,fsdp x ep,tp x ep",
}
ADAPTERS = (
    "lora",
    "rank-stabilised",
    "with biases",
    "dora",
    "two adapters",
    "whole head",
    "embedding",
    "inputs in rows",
    "experts",
)


@pytest.mark.parametrize(
    ("world_size", "families"),
    cases(
        gate=[(2, "gpt_neox"), (2, "qwen3_moe"), (4, "qwen3_moe")],
        nightly=[(size, family) for size in MESHES for family in FAMILIES],
    ),
)
def test_models_are_handed_over_as_one_process_saves_them(world_size: int, families: str, tmp_path: Path) -> None:
    found = run_scenario(
        "hand_over", tmp_path, families, MESHES[world_size], world_size=world_size, directory=tmp_path, time_limit=900
    )
    del found["scenario"]
    refused = {case: result for case, result in found.items() if result.startswith("refused: ")}
    assert {case: result for case, result in found.items() if case not in refused} == dict.fromkeys(
        found.keys() - refused.keys(), "equal"
    )
    assert len(found) - len(refused) >= 1
    if families == "qwen3_moe":
        assert not refused


@pytest.mark.parametrize(
    ("world_size", "adapters"),
    cases(gate=[(2, "lora,dora,embedding")], nightly=[(size, kind) for size in (1, 2, 4) for kind in ADAPTERS]),
)
def test_adapters_are_merged_as_peft_merges_them(world_size: int, adapters: str, tmp_path: Path) -> None:
    meshes = {1: "one", 2: "fsdp,pp,zero3", 4: "fsdp4,hsdp"}[world_size]
    found = run_scenario(
        "hand_over_adapters", adapters, meshes, world_size=world_size, directory=tmp_path, time_limit=900
    )
    del found["scenario"]
    assert found
    for case, result in found.items():
        assert result == "equal" or (case == "pp, inputs in rows" and "tied parameters" in result), case
