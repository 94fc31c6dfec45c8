"""Train on one XLA device: beside plain torch on the CPU, with checkpoints, and what is refused. Prints one line."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accelerate.utils import is_torch_xla_available
from meshwright import Accelerator, AcceleratorState, patch_environment, set_seed
from meshwright.runtime.devices import xla
from task import BATCH_SIZE, Model, Run, data, equal, largest_difference, loss_of

STEPS = 50


def on_cpu(*, accumulation: int = 1, clip: float | None = None) -> list[float]:
    """Return the losses of a plain loop. The 6 batches of an epoch are a window of 4 and one of 2."""
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)
    losses: list[float] = []
    while len(losses) < STEPS:
        for number, (_, inputs, targets) in enumerate(loader, start=1):
            loss = loss_of(model, inputs, targets)
            (loss / accumulation).backward()
            if number % accumulation == 0 or number == len(loader):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:STEPS]


def traces() -> dict[str, Any]:
    """Compare the losses of 50 micro-batches; count graphs."""
    found = {}
    for name, ours, plain, warm_up in (  # the third step of accumulation is the tenth micro-batch
        ("fp32", {}, {}, 3),
        ("accumulation", {"gradient_accumulation_steps": 4}, {"accumulation": 4}, 10),
        ("clipping", {"clip": 0.01}, {"clip": 0.01}, 3),
    ):
        expected = on_cpu(**plain)
        run = Run(**ours)
        found[name] = {"off_by": largest_difference(run.train(STEPS), expected), "late": run.late_compilations(warm_up)}
    bf16 = Run(mixed_precision="bf16")
    found["bf16"] = {"losses": bf16.train(8), "fp32": on_cpu()[:8], "dtype": str(bf16.model.head.weight.dtype)}
    found["losses"] = Run().train(10)
    return found


def saving() -> dict[str, Any]:
    """Save in the middle of an epoch and continue in a new run; compare with a run that was not interrupted."""
    run = Run()
    run.train(9)
    run.accelerator.save_state("checkpoint")
    run.accelerator.save_state("background", wait=False)
    run.accelerator.save_model(run.model, "model")
    run.accelerator.save(run.model.state_dict(), "state.bin")
    weights, moments = run.weights(), run.moments()
    noise = torch.rand(4, device=run.accelerator.device).tolist()
    losses = run.train(7)
    run.accelerator.checkpointer.wait()
    report: dict[str, Any] = {"objects": run.accelerator.gather_for_metrics([1, 2], use_gather_object=True)}
    for name in ("checkpoint", "background"):
        again = Run()
        assert not equal(again.weights(), weights)
        again.accelerator.resume(name)
        report[name] = {
            "weights": equal(again.weights(), weights),
            "moments": all(map(torch.equal, again.moments(), moments)),
            "noise": torch.rand(4, device=again.accelerator.device).tolist() == noise,
            "losses": again.train(7) == losses,
            "samples": again.seen == run.seen[9:],
            "tied": again.model.last.weight is again.model.first.weight,
        }
    saved = load_file("model/model.safetensors")
    report["model"] = {
        "names": sorted(saved),
        "equal": all(torch.equal(saved[name], weights[name]) for name in saved),
        "plain": equal(torch.load("state.bin"), weights),
    }
    return report


def state() -> dict[str, Any]:
    run = Run(clip=1.0)
    inputs = run.loader.dataset.tensors[1][:BATCH_SIZE].to(run.accelerator.device)
    run.accelerator.backward(run.model(inputs).sum())
    run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
    synced = [run.accelerator.gradient_state.is_xla_gradients_synced]
    run.optimizer.step()
    synced.append(run.accelerator.gradient_state.is_xla_gradients_synced)
    here = run.accelerator.state
    names = [str(here.device), here.distributed_type.value, here.backend, here.num_processes]
    return {"synced": synced, "state": names, "available": [is_torch_xla_available(), is_torch_xla_available(True)]}


def evaluation() -> dict[str, Any]:
    """Evaluate without a step in 6 batches: one graph each, which is compiled once."""
    run = Run()
    run.train(3)
    before, total, count = xla.compilations(), torch.zeros((), device=run.accelerator.device), 0
    for _, inputs, targets in run.loader:
        with torch.no_grad():
            total += loss_of(run.model, inputs, targets)
        count += len(run.accelerator.gather_for_metrics(inputs))
    return {"mean": total.item() / 6, "count": count, "graphs": xla.compilations() - before}


def shapes() -> list[str]:
    """Train on batches whose length changes; return the warnings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    loader = DataLoader([{"words": torch.randn(length, 1)} for length in range(2, 11)], batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch["words"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught if "XLA compiled" in str(warning.message)]


def refused() -> dict[str, str]:
    """Return the reasons of what is refused."""
    found = {}
    for name, settings, variables in (
        ("fp16", {"mixed_precision": "fp16"}, {}),
        ("fp8", {"mixed_precision": "fp8"}, {}),
        ("compile", {"dynamo_backend": "inductor"}, {}),
        ("torchrun", {}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            with patch_environment(**variables):
                Accelerator(**settings)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def switched_off() -> list[str]:
    """Return the devices of runs that do not use XLA."""
    found = []
    for variables, settings in (({"USE_TORCH_XLA": "0"}, {}), ({}, {"cpu": True})):
        AcceleratorState._reset_state(reset_partial_state=True)
        with patch_environment(**variables):
            found.append(f"{Accelerator(**settings).device} {is_torch_xla_available()}")
    return found


if __name__ == "__main__":
    os.environ.pop("XLA_USE_SPMD", None)
    parts = (traces, saving, state, evaluation, shapes, refused, switched_off)
    print(json.dumps({part.__name__: part() for part in parts}))
