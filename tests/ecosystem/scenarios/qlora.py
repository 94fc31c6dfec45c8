"""QLoRA: train adapters of peft over a frozen quantised model, sharded by FSDP2; save, resume and load them.

`qlora.py QUANTISATION` runs on one process without sharding, and on several with it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from tiny import difference, from_all_ranks, llama, report
from torch import Tensor

from accelerate import Accelerator
from accelerate.utils import BnbQuantizationConfig, FullyShardedDataParallelPlugin, load_and_quantize_model

VOCABULARY, STEPS = 64, 8


def quantised(how: str) -> Any:
    """Return a small frozen model with quantised layers, the same on every process."""
    model = llama(VOCABULARY, tie_word_embeddings=False)
    model.requires_grad_(False)
    if how.startswith("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
        quantize_(model.model.layers, int4 if how == "torchao int4" else Int8WeightOnlyConfig())
        return model
    bits: dict[str, Any] = (
        {"load_in_8bit": True}
        if how == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "fp32",
            "bnb_4bit_use_double_quant": how == "nf4 twice",
        }
    )
    return load_and_quantize_model(model, BnbQuantizationConfig(**bits, torch_dtype="fp32"))


def with_adapters(how: str) -> Any:
    """Return the model with fresh adapters."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(quantised(how), config)


def prepared(accelerator: Accelerator, how: str) -> tuple[Any, Any]:
    """Return a prepared model and its optimizer."""
    accelerator.free_memory()
    model = with_adapters(how)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    """Make steps on one batch, of which every process has its share; return the losses over all of it."""
    rows = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(2))
    own = rows.chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def adapters_of(accelerator: Accelerator, model: Any) -> dict[str, Tensor]:
    """Return a copy of the adapters of a model; nothing on other processes than the first."""
    state = accelerator.get_state_dict(model)
    if not state:
        return {}
    adapters = get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)
    return {name: value.clone() for name, value in adapters.items()}


def main(how: str) -> None:
    """Train, save and go on; go on from the save; load what peft saved."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if sharded else None)
    model, optimizer = prepared(accelerator, how)
    held = sum(param.to_local().nbytes if hasattr(param, "to_local") else param.nbytes for param in model.parameters())
    losses = train(accelerator, model, optimizer)

    accelerator.save_state("state")
    adapters, state = adapters_of(accelerator, model), accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("adapters", state_dict=state)
    went_on = train(accelerator, model, optimizer)

    model, optimizer = prepared(accelerator, how)
    accelerator.load_state("state")
    resumed_adapters = adapters_of(accelerator, model)
    resumed = train(accelerator, model, optimizer)

    loaded = {}
    if accelerator.is_main_process:
        loaded = get_peft_model_state_dict(PeftModel.from_pretrained(quantised(how), "adapters"))
    accelerator.wait_for_everyone()
    found = {
        "losses": losses,
        "went_on": went_on,
        "resumed": resumed,
        "held": from_all_ranks(held),
        "largest_adapter": max((float(value.abs().max()) for value in adapters.values()), default=0.0),
        "resumed_differ_by": difference(adapters, resumed_adapters) if adapters else None,
        "loaded_differ_by": difference(adapters, loaded) if adapters else None,
    }
    report(**found)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
