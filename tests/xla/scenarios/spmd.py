"""Train over an SPMD mesh of four XLA devices: sharded, in copies, saved and resumed. Prints one line."""

from __future__ import annotations

import json
from typing import Any

import torch

from meshwright import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.runtime.devices import xla
from task import Run, equal

STEPS = 10


def specs(run: Run) -> dict[str, str]:
    return {name: xla.sharding_of(param) for name, param in run.model.named_parameters()}


def moment_specs(run: Run) -> dict[str, str]:
    return {
        name: xla.sharding_of(run.optimizer.state[param]["exp_avg"]) for name, param in run.model.named_parameters()
    }


def sharded() -> dict[str, Any]:
    run = Run(fsdp_plugin=FullyShardedDataParallelPlugin())
    losses = run.train(STEPS)
    found = {
        "losses": losses,
        "late": run.late_compilations(),
        "specs": specs(run),
        "moments": moment_specs(run),
        "names": list(run.accelerator.get_state_dict(run.model)),
        "type": run.accelerator.distributed_type.value,
        "processes": run.accelerator.num_processes,
        "plugin": type(run.accelerator.state.fsdp_plugin).__name__,
    }
    run.accelerator.save_state("checkpoint")
    weights, moments = run.weights(), run.moments()
    after = run.train(4)
    again = Run(fsdp_plugin=FullyShardedDataParallelPlugin())
    again.accelerator.resume("checkpoint")
    found["resumed"] = {
        "weights": equal(again.weights(), weights),
        "moments": all(map(torch.equal, again.moments(), moments)),
        "specs": specs(again),
        "moment_specs": moment_specs(again),
        "losses": [after, again.train(4)],
        "samples": again.seen == run.seen[STEPS:],
    }
    return found


def copies() -> dict[str, Any]:
    """Train with other meshes."""
    hybrid = Run(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    found = {"hybrid": [hybrid.train(STEPS), specs(hybrid)["first.weight"]]}
    plain = Run()
    return {**found, "copies": [plain.train(STEPS), specs(plain)["first.weight"]]}


def refused() -> dict[str, str]:
    found = {}
    for name, settings in (
        ("tp", {"parallelism_config": ParallelismConfig(tp_size=4)}),
        ("sizes", {"parallelism_config": ParallelismConfig(dp_shard_size=3)}),
        ("offload", {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)}),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            Accelerator(**settings)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    AcceleratorState._reset_state(reset_partial_state=True)
    wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    wrapped.device_ids = [0, 1]
    try:
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(wrapped)
    except ValueError as error:
        found["wrapped"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps({part.__name__: part() for part in (sharded, copies, refused)}))
