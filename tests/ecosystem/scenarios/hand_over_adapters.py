"""Hand over models with adapters of PEFT from meshes; compare with `merge_and_unload` on one process, byte by byte."""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hand_over import MESHES, fresh, make
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from meshwright import Accelerator

PLAIN = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
KINDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "lora": ("llama", [PLAIN]),
    "rank-stabilised": ("llama", [{**PLAIN, "use_rslora": True}]),
    "with biases": ("qwen2", [{**PLAIN, "lora_bias": True, "target_modules": ["q_proj"]}]),
    "dora": ("llama", [{**PLAIN, "use_dora": True}]),
    "two adapters": ("llama", [PLAIN, {**PLAIN, "r": 2, "target_modules": ["q_proj", "v_proj"]}]),
    "whole head": ("llama", [{**PLAIN, "modules_to_save": ["lm_head"]}]),
    "embedding": ("llama", [{**PLAIN, "target_modules": ["q_proj", "embed_tokens"]}]),
    "inputs in rows": ("gpt2", [{"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}]),
    "experts": ("qwen3_moe", [PLAIN | {"target_modules": ["q_proj", "o_proj"]}]),
}


def adapted(kind: str) -> Any:
    """Make a model with adapters that change it."""
    family, configs = KINDS[kind]
    model: Any = make(family)
    names = [f"number{index}" for index in range(len(configs))]
    for name, config in zip(names, configs, strict=True):
        given = LoraConfig(task_type="CAUSAL_LM", **config)
        if name == names[0]:
            model = get_peft_model(model, given, adapter_name=name)
        else:
            model.add_adapter(name, given)
    if len(names) > 1:
        model.base_model.set_adapter(names)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                param.copy_(torch.randn_like(param))
    return model


def write_references(kind: str, folder: Path) -> None:
    """Write the merged model and the adapter, on this process alone."""
    model = adapted(kind)
    if len(KINDS[kind][1]) == 1:
        model.save_pretrained(folder / "adapter")
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder / "merged")


def hand_over(mesh: str, kind: str, folder: Path) -> str:
    """Return "equal", or what differs, or why the mesh refuses the model."""
    model = adapted(kind)
    expected = load_file(folder / "merged" / "model.safetensors")
    try:
        accelerator = Accelerator(cpu=True, **MESHES[mesh][1]())
        if "zero" in mesh:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except (ValueError, NotImplementedError) as error:
        return f"refused: {error}"
    found = differences(accelerator.weights(prepared), expected)
    found += [f"again: {each}" for each in differences(accelerator.weights(prepared), expected)]
    if (folder / "adapter").is_dir():
        alone = next((folder / "adapter").rglob("adapter_model.safetensors"))
        found += [
            f"alone: {each}" for each in differences(accelerator.weights(prepared, adapter="only"), load_file(alone))
        ]
    return "; ".join(found[:3]) or "equal"


def differences(weights: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return what differs."""
    found, names = [], set()
    for name, tensor in weights:
        names.add(name)
        other = expected.get(name)
        if other is None:
            found.append(f"{name} is not expected")
        elif tensor.dtype != other.dtype or not torch.equal(tensor, other):
            found.append(f"{name} is off by {(tensor.float() - other.float()).abs().max()}")
    return found + [f"{name} is missing" for name in expected.keys() - names]


def main() -> None:
    """Try every mesh with every kind."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    kinds, meshes = sys.argv[1].split(","), sys.argv[2].split(",")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in kinds}
        for kind, folder in folders.items():  # before there is a process group, in which one process would write
            write_references(kind, folder)
        for kind, folder in folders.items():
            for mesh in [mesh for mesh in meshes if MESHES[mesh][0] == world_size]:
                with fresh():
                    results[f"{mesh}, {kind}"] = hand_over(mesh, kind, folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"scenario": "hand_over_adapters", **results}))


if __name__ == "__main__":
    main()
