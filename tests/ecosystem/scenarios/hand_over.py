"""Hand over models of transformers from meshes; compare with `save_pretrained` on one process, byte by byte.

The arguments are a folder, and the families, as one text with commas. Every mesh that fits the number of processes is
tried, each with every family. What a mesh refuses before `weights()` is reached is reported as such.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright import (
    Accelerator,
    AcceleratorState,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientState,
    OffloadConfig,
    ParallelismConfig,
    PipelineConfig,
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
    "head_dim": 16,
    "shared_expert_intermediate_size": 16,
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe", "glm4_moe", "qwen2_moe")


def _mesh(**sizes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"parallelism_config": ParallelismConfig(**sizes)}


def _fsdp(**fields: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(**fields)}


def _zero(stage: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)}


MESHES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "one": (1, dict),
    "offloaded blocks": (1, lambda: {"offload": OffloadConfig()}),
    "ddp": (2, dict),
    "fsdp": (2, _fsdp()),
    "fsdp compiled": (2, _fsdp()),
    "tp": (2, _mesh(tp_size=2)),
    "pp": (2, _mesh(pp_size=2)),
    "interleaved pp": (
        2,
        lambda: {
            "parallelism_config": ParallelismConfig(
                pp_size=2, pp_handler=PipelineConfig(stages_per_rank=2, schedule="interleaved")
            )
        },
    ),
    "zero2": (2, _zero(2)),
    "zero3": (2, _zero(3)),
    "ep": (2, _mesh(dp_shard_size=2, ep_size=2)),
    "cp": (2, _mesh(cp_size=2)),
    "sp": (2, _mesh(sp_size=2)),
    "fsdp4": (4, _fsdp()),
    "hsdp": (4, _mesh(dp_replicate_size=2, dp_shard_size=2)),
    "fsdp x tp": (4, _mesh(dp_shard_size=2, tp_size=2)),
    "pp x fsdp": (4, _mesh(pp_size=2, dp_shard_size=2)),
    "pp x tp": (4, _mesh(pp_size=2, tp_size=2)),
    "fsdp x ep": (4, _mesh(dp_shard_size=4, ep_size=2)),
    "tp x ep": (4, _mesh(dp_shard_size=2, tp_size=2, ep_size=2)),
}


def make(family: str) -> Any:
    """Make a small model of a family, in fp32, with values that differ everywhere."""
    wanted = {**SMALL, **(EXPERTS if family in WITH_EXPERTS else {})}
    given = AutoConfig.for_model(family).to_dict()
    kept = {name: value for name, value in given.items() if name not in ("layer_types", "mlp_layer_types")}
    config = type(AutoConfig.for_model(family)).from_dict({**kept, **{k: v for k, v in wanted.items() if k in given}})
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        with contextlib.suppress(Exception):  # those that have another name for it
            setattr(config, name, wanted[name])
    config.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    return model


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Let what follows begin without an Accelerator, in the same process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()


def hand_over(mesh: str, family: str, folder: Path, reference: Path) -> str:
    """Return "equal", or what differs, or why the mesh refuses the model."""
    model = make(family)
    try:
        accelerator = Accelerator(cpu=True, **MESHES[mesh][1]())
        if "zero" in mesh:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if mesh.endswith("compiled"):
            prepared = torch.compile(prepared, backend="eager")
    except (ValueError, NotImplementedError, ImportError) as error:
        return f"refused: {error}"
    weights = accelerator.weights(prepared, bucket_size=100_000)
    metas = {meta.name: meta for meta in weights.metadata()}
    expected = load_file(reference / "model.safetensors")
    found: list[str] = []
    names = []
    for name, tensor in weights:
        names.append(name)
        other = expected.get(name)
        meta = metas[name]
        if other is None or (meta.dtype, meta.shape) != (other.dtype, tuple(other.shape)):
            found.append(f"{name}: {meta} instead of {None if other is None else (other.dtype, other.shape)}")
        elif tensor.dtype != other.dtype or not torch.equal(tensor, other):
            found.append(f"{name} has other values")
    if names != list(metas) or [n for group in weights.groups() for n in group] != names:
        found.append("the order is not that of metadata()")
    found += [f"{name} is missing" for name in expected.keys() - set(names)]
    weights.save(folder)
    if accelerator.is_main_process:
        for file in ("model.safetensors", "config.json"):
            if (folder / file).read_bytes() != (reference / file).read_bytes():
                found.append(f"{file} is another")
    return "; ".join(found[:3]) or "equal"


def main() -> None:
    """Try every mesh with every family."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder, families = Path(sys.argv[1]), sys.argv[2].split(",")
    wanted = sys.argv[3].split(",") if len(sys.argv) > 3 else list(MESHES)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    results: dict[str, str] = {}
    references = {family: folder / f"{family}-{os.environ.get('RANK', '0')}" for family in families}
    for family, reference in references.items():  # before there is a process group, in which one process would write
        make(family).save_pretrained(reference)
    for family, reference in references.items():
        for mesh in [mesh for mesh in wanted if MESHES[mesh][0] == world_size]:
            with fresh():
                results[f"{mesh}, {family}"] = hand_over(mesh, family, folder / "handed", reference)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"scenario": "hand_over", **results}))


if __name__ == "__main__":
    main()
