"""Spread the experts of a model over processes: `ExpertParallel`.

[Note: the mesh of experts] The ep axis adds no processes: it is a view of those that share a copy of the model, the
innermost first. `ep_size` neighbours hold all experts between them, each some of them. Processes with the same experts
shard them further by FSDP2 (`ep_shard`), or copy them (`ep_replicate`): experts are FSDP2 units of their own, on a mesh
of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ....errors import UnsupportedSettingError
from ....runtime.group.mesh import Mesh
from ...modules.averaging import broadcast_parameters
from ...modules.wrapping import parameters_in
from .dispatch import SpreadForward, TokenExchange
from .plans import experts_of, num_experts_of


class ExpertParallel:
    """The experts of models on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        experts = mesh.experts
        self.ep: DeviceMesh = experts["ep"]
        self.holders: DeviceMesh = experts["ep_replicate", "ep_shard"]
        """The processes that hold the same experts as this one."""
        self.num_shards = self.holders.size(1)
        tp = mesh.axis("tp") if mesh.size("tp") > 1 else None
        self.exchange = TokenExchange(ep=self.ep, tp=tp, factor=self.holders.size() / mesh.num_token_ranks)
        if mesh.sharding is None and self.holders.size() > 1:
            raise UnsupportedSettingError(
                f"ep_size={mesh.size('ep')} with tp_size={mesh.size('tp')} and no axis of data",
                "several processes would hold the same experts, and nothing sums their gradients.",
                f"Say ep_size={mesh.size('tp')}, or add dp_shard_size.",
            )

    def spread(self, model: nn.Module) -> list[SpreadForward]:
        """Keep this process's experts of a model, in place; return the forward passes of the modules that hold them."""
        if any(param.is_meta for param in model.parameters()):
            raise UnsupportedSettingError(
                "ep_size > 1 with a model on the meta device",
                "experts are spread before weights are made.",
                "Make or load the model on every process.",
            )
        spread = []
        for name, module in experts_of(model, self.mesh.config.ep_plan, self.ep.size()).items():
            spread.append(SpreadForward(name, module, num_experts_of(module), self.exchange))
            self._keep_own(module)
            module.forward = spread[-1]
        return spread

    def _keep_own(self, module: nn.Module) -> None:
        size, rank = self.ep.size(), self.ep.get_local_rank()
        if hasattr(module, "num_experts"):
            module.num_experts = num_experts_of(module) // size  # type: ignore[assignment]
        for owner in module.modules():
            for name, param in owner._parameters.items():
                if param is not None:
                    own = param.detach().chunk(size)[rank].clone()
                    spread = DTensor.from_local(own, self.ep, [Shard(0)], run_check=False)
                    owner._parameters[name] = nn.Parameter(spread, requires_grad=param.requires_grad)

    def shard(
        self, spread: Sequence[SpreadForward], options: Mapping[str, Any], ignored: Iterable[nn.Module]
    ) -> set[nn.Parameter]:
        """Shard experts over the processes that hold the same ones; return parameters that stay as they are."""
        whole = set(parameters_in(ignored))
        for forward in spread:
            if not whole.isdisjoint(forward.module.parameters()):
                raise UnsupportedSettingError(
                    f"ignored_modules with {forward.name}",
                    "its experts are spread (ep_size), and ignored modules stay whole on every process.",
                    "Leave it out of ignored_modules, or out of ep_plan.",
                )
        policy = options.get("mp_policy")
        if self.holders.size() == 1 and not isinstance(options["offload_policy"], CPUOffloadPolicy):
            for forward in spread:  # FSDP2 would only copy them
                forward.dtype = None if policy is None else policy.param_dtype
            return set(parameters_in(forward.module for forward in spread))
        own = dict(options)
        own["mesh"] = self.holders if self.holders.size(0) > 1 else self.holders["ep_shard"]
        own["reshard_after_forward"] = bool(options["reshard_after_forward"])  # a number is of the dense mesh
        if policy is not None:  # the router's weights stay as they are
            own["mp_policy"] = replace(policy, cast_forward_inputs=False)
        for forward in spread:
            fully_shard(forward.module, shard_placement_fn=self._placement, **own)
        return set()

    def _placement(self, param: nn.Parameter) -> Shard:
        """Return the first dimension that the processes with the same experts divide."""
        shape = param.to_local().shape if isinstance(param, DTensor) else param.shape
        for dim, size in enumerate(shape):
            if size % self.num_shards == 0:
                return Shard(dim)
        raise UnsupportedSettingError(
            f"ep_size={self.ep.size()} on this mesh",
            f"{self.num_shards} processes would shard a parameter with experts of {tuple(shape)}, and no dimension of "
            "it is a multiple of that.",
            "Choose a larger ep_size.",
        )

    def copy_from_first(self, params: Iterable[nn.Parameter], device: torch.device) -> None:
        """Give experts that several processes copy the values of the first of them."""
        if self.holders.size(0) > 1:
            broadcast_parameters(params, self.holders["ep_replicate"].get_group(), device)
