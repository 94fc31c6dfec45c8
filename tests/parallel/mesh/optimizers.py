"""Optimizers of every kind by name, and a comparison of each with one process."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Maker = Callable[[nn.Module], Optimizer]


class Lookahead(Optimizer):
    """Keeps another optimizer, and a list of slow weights beside the parameters."""

    def __init__(self, inner: Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.slow = [[param.detach().clone() for param in group["params"]] for group in inner.param_groups]
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for slow, group in zip(self.slow, self.param_groups, strict=True):
                for own, param in zip(slow, group["params"], strict=True):
                    own.lerp_(param, 0.5)
                    param.copy_(own)


class LookaheadOfItsOwn(Optimizer):
    """Keeps another optimizer with groups of its own, and slow weights by parameter."""

    def __init__(self, inner: Optimizer) -> None:
        params = [param for group in inner.param_groups for param in group["params"]]
        super().__init__(params, {"alpha": 0.5})
        self.inner = inner
        self.slow = {param: param.detach().clone() for param in params}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for param, own in self.slow.items():
            own.lerp_(param, 0.5)
            param.copy_(own)


class Sam(Optimizer):
    """Climbs along the gradient, computes another one there, and steps with that by another optimizer."""

    def __init__(self, params: Iterable[Tensor], inner: type[Optimizer], radius: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"radius": radius, **options})
        self.base_optimizer = inner(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        square = sum(_number(param.grad.pow(2).sum()) for param in params)
        for param in params:
            self.state[param]["climb"] = climb = param.grad * (self.param_groups[0]["radius"] / (square**0.5 + 1e-12))
            param.add_(climb)
        with torch.enable_grad():
            closure()
        for param in params:
            param.sub_(self.state[param]["climb"])
        self.base_optimizer.step()
        return loss


class Momentum(Optimizer):
    """Keeps its parameters in a place of its own, and what it knows of them in dictionaries of its own."""

    def __init__(self, params: Iterable[Tensor], keeps: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.keeps = keeps
        params = [param for group in self.param_groups for param in group["params"]]
        self._params: Any = {
            "list": lambda: list(params),
            "tuple": lambda: (tuple(params), len(params)),
            "weak": lambda: [weakref.ref(param) for param in params],
            "object": lambda: Holder(params),
            "slots": lambda: SlotsHolder(params),
            "closure": lambda: lambda: params,
            "default argument": lambda: lambda kept=params: kept,
            "dict": lambda: dict(enumerate(params)),
            "set": lambda: set(params),
        }.get(keeps, lambda: None)()
        self.buffers: dict[Any, Tensor] = {}
        self.scales = {id(param): 1.0 + number for number, param in enumerate(params)}
        self.decays: dict[Tensor, float] = defaultdict(float, dict.fromkeys(params, 0.01))

    def own(self) -> list[Tensor]:
        kept = self._params
        if self.keeps == "tuple":
            return list(kept[0])
        if self.keeps == "weak":
            return [param for each in kept if (param := each()) is not None]
        if self.keeps == "dict":
            return list(kept.values())
        return list(kept()) if callable(kept) else list(getattr(kept, "params", kept))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.own():
            if param.grad is None:
                continue
            buffer = self.buffers.setdefault(param, torch.zeros_like(param))
            buffer.mul_(0.9).add_(param.grad).add_(param, alpha=self.decays[param])
            param.add_(buffer, alpha=-0.02 * self.scales[id(param)])


class Holder:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params


class SlotsHolder:
    """Keeps parameters, and refuses to be changed, as a frozen dataclass with slots."""

    __slots__ = ("params",)

    def __init__(self, params: Iterable[Tensor]) -> None:
        object.__setattr__(self, "params", list(params))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Averages(Optimizer):
    """Pulls parameters to averages that it keeps: in pairs with them, by their names, or by their ids."""

    def __init__(self, params: Iterable[tuple[str, Tensor]], keeps: str) -> None:
        named = dict(params)
        super().__init__(named.values(), {"lr": 0.1})
        self.named, self.averages = named, {name: param.detach().clone() for name, param in named.items()}
        self.pairs = [(param, self.averages[name], 0.5) for name, param in named.items()]
        self.by_id = {id(param): self.averages[name] for name, param in named.items()}
        for kept in {"pairs", "averages", "by_id"} - {keeps}:
            delattr(self, kept)
        self.keeps = keeps

    def average_of(self, name: str, param: Tensor) -> Tensor:
        if self.keeps == "pairs":
            return next(average for other, average, _ in self.pairs if other is param)
        return self.averages[name] if self.keeps == "averages" else self.by_id[id(param)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for name, param in self.named.items():
            param.add_(param.grad, alpha=-0.1)
            average = self.average_of(name, param)
            average.lerp_(param, 0.5)
            param.copy_(average)


class Flat(Optimizer):
    """Keeps all parameters in one vector, of which they are views."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        super().__init__(params, {})
        self.flat = torch.cat([param.detach().reshape(-1) for param in params])
        start = 0
        for param in params:
            param.data = self.flat[start : start + param.numel()].view_as(param)
            start += param.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self.flat.sub_(torch.cat([param.grad.reshape(-1) for param in params]), alpha=0.1)


class LocalNorms(Optimizer):
    """Divides by the norm of what is here, which is another one for a part."""

    def __init__(self, params: Iterable[Tensor], joint: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.joint = joint

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        squares = [_here(param.grad).pow(2).sum() for param in params]
        for param, square in zip(params, squares, strict=True):
            norm = sum(squares) if self.joint else square
            _here(param).sub_(_here(param.grad) / (1 + norm), alpha=0.1)


class Signed(Optimizer):
    """Steps by the sign of a momentum."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    param.add_(momentum.mul_(0.9).add_(param.grad, alpha=0.1).sign(), alpha=-group["lr"])
        return loss


class Lars(Optimizer):
    """Steps by the ratio of the norms of a parameter and its gradient, or of their means of squares."""

    def __init__(self, params: Iterable[Tensor], means: bool) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.means = means

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self.means:
                    ratio = (param.pow(2).mean().sqrt() / (param.grad.pow(2).mean().sqrt() + 1e-6)).clamp(max=10.0)
                    param.sub_(param.grad * ratio * group["lr"])
                else:
                    ratio = _number(param.norm() / (param.grad.norm() + 1e-6))
                    param.add_(param.grad, alpha=-group["lr"] * ratio)


class Breaking(Optimizer):
    """Uses an operation that torch does not spread."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    scale = torch.ones(param.shape, dtype=param.dtype)
                    param.sub_(param.grad * scale.mul_(0.1))


def _here(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _number(tensor: Any) -> float:
    return float(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "lr": 2e-2, "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0},
    ]


def _of_torch(name: str, **options: Any) -> Maker:
    return lambda net: getattr(torch.optim, name)(net.parameters(), **options)


def _schedule_free(net: nn.Module, **options: Any) -> Optimizer:
    import schedulefree

    optimizer: Any = schedulefree.AdamWScheduleFree(net.parameters(), lr=1e-2, **options)
    optimizer.train()
    return optimizer


def _eight_bits(net: nn.Module) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(net.parameters(), lr=1e-2)


COMPILING: dict[str, Maker] = {"AdamW8bit": _eight_bits}
"""Optimizers that are compiled, which takes their first step most of a minute on a CPU."""
RIGHT: dict[str, Maker] = {
    "AdamW in groups": lambda net: AdamW(_groups(net)),
    "AdamW foreach": lambda net: AdamW(_groups(net), foreach=True),
    "AdamW fused": lambda net: AdamW(_groups(net), fused=True),
    "SGD fused": _of_torch("SGD", lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": _of_torch("Adagrad", lr=1e-2, fused=True),
    "AMSGrad": _of_torch("AdamW", lr=1e-2, amsgrad=True, maximize=True),
    "a tensor as rate": lambda net: AdamW(net.parameters(), lr=torch.tensor(1e-2)),
    "an empty group": lambda net: AdamW([{"params": []}, {"params": list(net.parameters())}], lr=1e-2),
    "some parameters": lambda net: AdamW(list(net.parameters())[2:], lr=1e-2),
    "the last layer": lambda net: AdamW(list(net.children())[-1].parameters(), lr=1e-2),
    "sign": lambda net: Signed(net.parameters()),
    "norms": lambda net: Lars(net.parameters(), means=False),
    "means of squares": lambda net: Lars(net.parameters(), means=True),
    "reversed": lambda net: AdamW(list(net.parameters())[::-1], lr=1e-2),
    "Nesterov": _of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD in a closure": _of_torch("SGD", lr=0.1),
    "sign in a closure": lambda net: Signed(net.parameters()),
    "Adadelta": _of_torch("Adadelta"),
    "Adafactor": _of_torch("Adafactor"),
    "Adagrad": _of_torch("Adagrad", initial_accumulator_value=0.1),
    "Adam": _of_torch("Adam", lr=1e-2),
    "Adamax": _of_torch("Adamax", lr=1e-2),
    "ASGD": _of_torch("ASGD"),
    "NAdam": _of_torch("NAdam"),
    "RAdam": _of_torch("RAdam"),
    "RMSprop": _of_torch("RMSprop", lr=1e-3, centered=True, momentum=0.9),
    "Rprop": _of_torch("Rprop"),
    "Muon": lambda net: torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=1e-2),
    "schedule-free": _schedule_free,
    "schedule-free foreach": lambda net: _schedule_free(net, foreach=True),
    "Lookahead": lambda net: Lookahead(SGD(net.parameters(), lr=0.1, momentum=0.9)),
    "Lookahead in groups": lambda net: Lookahead(AdamW(_groups(net))),
    "Lookahead by parameter": lambda net: LookaheadOfItsOwn(Adam(net.parameters(), lr=1e-2)),
    "Lookahead of Rprop": lambda net: LookaheadOfItsOwn(torch.optim.Rprop(net.parameters())),
    "SAM": lambda net: Sam(net.parameters(), SGD, lr=0.1, momentum=0.9),
    **{
        f"own {kind}": lambda net, kind=kind: Momentum(net.parameters(), kind)
        for kind in ("list", "tuple", "weak", "object", "slots", "closure", "default argument", "dict", "set")
    },
    **{
        f"averages in {kind}": lambda net, kind=kind: Averages(net.named_parameters(), kind)
        for kind in ("pairs", "averages", "by_id")
    },
}
"""What equals one process however parameters are spread."""
REFUSED: dict[str, tuple[Maker, str]] = {
    "LBFGS": (_of_torch("LBFGS", lr=0.5, max_iter=3), "DDP"),
    "LBFGS Wolfe": (_of_torch("LBFGS", lr=1.0, max_iter=4, line_search_fn="strong_wolfe"), "DDP"),
    "flat": (lambda net: Flat(net.parameters()), "DDP"),
    "local norms": (lambda net: LocalNorms(net.parameters()), "step_full_tensors"),
    "local norms of all": (lambda net: LocalNorms(net.parameters(), joint=True), "DDP"),
    "breaking": (lambda net: Breaking(net.parameters()), "step_full_tensors"),
    "Lookahead of local norms": (lambda net: LookaheadOfItsOwn(LocalNorms(net.parameters())), "DDP"),
}
"""What equals one process under DDP, and is refused on DTensors with this remedy."""
IN_CLOSURES = ("LBFGS", "LBFGS Wolfe", "SAM", "SGD in a closure", "sign in a closure")
"""What steps by a closure that computes the gradients."""
