"""Right training scripts of many kinds: `right_script.py KIND`. None of them may be called wrong."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from meshwright import Accelerator, set_seed

KIND = sys.argv[1]


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(12, generator=generator), "y": torch.randn(3, generator=generator)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(Samples()[index] for index in range(96))


class Backwards(Sampler[int]):
    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Iterator[int]:
        return iter(range(95, -1, -1))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Model(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, outputs)
        self.norm = nn.BatchNorm1d(24) if KIND == "batch_norm" else nn.Identity()
        self.dropout = nn.Dropout(0.3 if KIND == "dropout" else 0.0)
        if KIND == "spectral_norm":
            self.middle = nn.utils.parametrizations.spectral_norm(self.middle)
        if KIND == "weight_norm":
            self.middle = nn.utils.parametrizations.weight_norm(self.middle)
        if KIND == "tied":
            self.again = nn.Linear(24, 24)
            self.again.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.up(x)))
        x = checkpoint(self.block, x, use_reentrant=False) if KIND == "checkpointing" else self.block(x)
        return self.down(self.dropout(x))  # type: ignore[no-any-return]

    def block(self, x: Tensor) -> Tensor:
        if KIND == "autograd_function":
            return torch.tanh(Product.apply(x, self.middle.weight) + self.middle.bias)  # type: ignore[no-untyped-call]
        x = torch.tanh(self.middle(x))
        return torch.tanh(self.again(x)) if KIND == "tied" else x


def make_loader() -> DataLoader[Any]:
    if KIND == "stream":
        return DataLoader(Stream(), batch_size=4)
    if KIND == "sampler":
        return DataLoader(Samples(), batch_size=4, sampler=Backwards())
    if KIND == "batch_sampler":
        return DataLoader(Samples(), batch_sampler=BatchSampler(Backwards(), 4, drop_last=True))
    return DataLoader(Samples(), batch_size=8 if KIND == "split_batches" else 4, shuffle=True)


class Training:
    """One run of the script."""

    def __init__(self) -> None:
        set_seed(3)
        steps = 2 if KIND in ("accumulate", "num_items") else 1
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, split_batches=KIND == "split_batches")
        model = Model()
        if KIND == "frozen":
            model.up.requires_grad_(False)
        optimizer = self.make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        self.plain_scheduler = scheduler
        prepared = self.accelerator.prepare(model, optimizer, make_loader(), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.inner = self.accelerator.unwrap_model(self.model)
        self.average = copy.deepcopy(self.inner)
        self.evaluated = self.accelerator.prepare(DataLoader(Samples(), batch_size=10))
        self.noise = torch.Generator().manual_seed(5)
        if KIND == "gan":
            critic = Model(1)
            self.critic, self.critic_optimizer = self.accelerator.prepare(
                critic, torch.optim.Adam(critic.parameters(), lr=1e-2)
            )
        if KIND == "gradient_hook":
            self.inner.middle.weight.register_hook(lambda gradient: gradient * 2)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if KIND == "lbfgs":
            return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(self) -> None:
        first: Any = None
        for step, batch in enumerate(self.loader):
            first = first or batch
            x, y = (first if KIND == "one_batch" else batch).values()
            with self.accelerator.accumulate(self.model):
                if KIND in ("closure", "lbfgs"):
                    self.optimizer.step(lambda x=x, y=y: self.closure(x, y))
                    continue
                if KIND == "gan":
                    self.train_critic(x, y)
                self.backward(x, y, step)
                if KIND == "trigger" and step == 3:
                    self.accelerator.set_trigger()
                if KIND == "trigger" and self.accelerator.check_trigger():
                    break
                self.change_gradients()
                self.optimizer.step()
                (self.plain_scheduler if KIND == "plain_scheduler" else self.scheduler).step()
                self.optimizer.zero_grad()
            self.after_step(x)
            if KIND == "early_break" and step == 1:
                break
        self.accelerator.end_training()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def closure(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        self.accelerator.backward(loss)
        return loss

    def backward(self, x: Tensor, y: Tensor, step: int) -> None:
        accelerator = self.accelerator
        if KIND == "no_sync":
            with accelerator.no_sync(self.model):
                accelerator.backward(self.loss(x[:2], y[:2]) / 2)
            accelerator.backward(self.loss(x[2:], y[2:]) / 2)
        elif KIND == "two_losses":
            output = self.model(x)
            accelerator.backward(F.mse_loss(output, y), retain_graph=True)
            accelerator.backward(0.1 * output.abs().mean())
        elif KIND == "two_outputs":
            one, other = self.loss(x, y), self.loss(x + 1, y)
            accelerator.backward(one)
            accelerator.backward(other)
        elif KIND == "num_items":
            kept = x[:, 0] > 0
            losses = (self.model(x) - y).square().mean(-1)[kept]
            accelerator.backward(losses.sum(), num_items=kept.sum())
        elif KIND == "raw_backward":
            self.loss(x, y).backward()  # type: ignore[no-untyped-call]
        else:
            accelerator.backward(self.other_loss(x, y, step))

    def other_loss(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        if KIND == "two_forwards":
            return self.loss(x, y) + self.loss(x + 1, y)
        if KIND == "loss_weight":
            return self.loss(x, y) * (0.5 if step % 2 else 1.0)
        if KIND == "distillation":
            with torch.no_grad():
                target = self.model(x)
            return self.loss(x, y) + self.loss(x + 0.1, target)
        if KIND == "diffusion":
            level = torch.rand(len(x), 1)
            return self.loss(x * (1 - level) + torch.randn_like(x) * level, y)
        if KIND == "gan":
            return self.loss(x, y) - 0.1 * self.critic(x.detach() + self.model(x).mean()).mean()
        if KIND == "gradient_penalty":
            x = x.requires_grad_(True)
            output = self.inner(x)
            (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            return self.loss(x, y) + 0.1 * slope.square().mean().detach()
        return self.loss(x, y)

    def train_critic(self, x: Tensor, y: Tensor) -> None:
        fake = self.model(x).detach().mean()
        self.accelerator.backward(F.softplus(self.critic(x + fake)).mean() + F.softplus(-self.critic(x)).mean())
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    def change_gradients(self) -> None:
        gradients = [param.grad for param in self.inner.parameters() if param.grad is not None]
        if KIND == "gradient_noise":
            for gradient in gradients:
                gradient.add_(torch.randn(gradient.shape, generator=self.noise), alpha=1e-2)
        if KIND == "clamp":
            for gradient in gradients:
                gradient.clamp_(-0.01, 0.01)
        if KIND == "clip_norm":
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
        if KIND == "clip_value":
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)

    def after_step(self, x: Tensor) -> None:
        if KIND == "ema":
            with torch.no_grad():
                for kept, param in zip(self.average.parameters(), self.inner.parameters(), strict=True):
                    kept.lerp_(param, 0.1)
        if KIND == "evaluation":
            self.model.eval()
            with torch.no_grad():
                for batch in self.evaluated:
                    self.accelerator.gather_for_metrics(self.model(batch["x"]))
            self.model.train()
        if KIND == "metrics":
            self.accelerator.gather(x.mean())
            self.accelerator.reduce(x.mean(), "mean")


if __name__ == "__main__":
    Training().run()
