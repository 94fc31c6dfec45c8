"""transformers and PEFT: models with device maps compute what the plain model computes; LoRA trained, saved, loaded."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import SENTENCES, copy_of, difference, from_all_ranks, llama, report, tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
words = tokenizer()
inputs = words(SENTENCES[:3], padding=True, return_tensors="pt")
plain = llama(len(words), num_layers=4).eval()
here = f"rank-{accelerator.process_index}"
plain.save_pretrained("model", max_shard_size="20KB")  # which only rank 0 does
accelerator.wait_for_everyone()


def loaded(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained("model", **options).eval()


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def off_by(model: Any) -> float:
    """Return how far a model's outputs are from the plain one's, in a forward pass and in generated tokens."""
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=words.pad_token_id)
    same = torch.equal(tokens, plain.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=1))
    return float((outputs(model) - outputs(plain)).abs().max()) if same else float("inf")


layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
disk_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk", **layers}
maps = {
    "one place": {"device_map": {"": "cpu"}},
    "auto": {"device_map": "auto"},
    "auto, little memory": {"device_map": "auto", "max_memory": {"cpu": "60KB"}, "offload_folder": f"{here}/auto"},
    "disk": {"device_map": disk_map, "offload_folder": f"{here}/disk"},
}
placed: dict[str, Any] = {}
for name, options in maps.items():
    model = loaded(**options)
    places = getattr(model, "hf_device_map", {})
    placed[name] = {"off_by": off_by(model), "places": sorted({str(place) for place in places.values()})}

# LoRA, trained by an Accelerator, saved, and put on base models that have a device map
torch.manual_seed(0)
adapted = get_peft_model(
    llama(len(words), num_layers=4), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
base_before = {name: value for name, value in copy_of(adapted).items() if "lora" not in name}
optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
loader = DataLoader([words(text)["input_ids"] for text in SENTENCES if len(text.split()) == 6], batch_size=4,
                    collate_fn=torch.tensor)  # fmt: skip
model, optimizer, loader = accelerator.prepare(adapted, optimizer, loader)
losses = []
for _ in range(3):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(f"{here}/adapter", state_dict=accelerator.get_state_dict(model))
unwrapped.eval()
trained = outputs(unwrapped)
restored = {
    name: PeftModel.from_pretrained(loaded(**maps[name]), f"{here}/adapter").eval() for name in ("one place", "auto")
}
base_after = {name: value for name, value in copy_of(unwrapped).items() if "lora" not in name}

report(
    placed=from_all_ranks(placed),
    lora={
        "losses": losses,
        "base_moved": difference(base_before, base_after),
        "off_by": {name: float((outputs(model) - trained).abs().max()) for name, model in restored.items()},
        "changed_outputs": float((trained - outputs(plain)).abs().max()),
        "ranks_agree": max(difference(copy_of(unwrapped), other) for other in from_all_ranks(copy_of(unwrapped))),
    },
)
