"""Experts that are spread over the processes: tokens travel to them, and every process keeps its own samples.

    python examples/experts.py
    meshwright launch --cpu --num_processes 2 examples/experts.py

Eight experts learn eight different functions, and a router learns which token needs which. On two processes each holds
four of them. The printed imbalance is the load of the busiest expert over the mean load: 1 is even.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, ParallelismConfig, PartialState, set_seed

EXPERTS, CHOICES, WIDTH = 8, 2, 16


class Experts(nn.Module):
    """Every weight of all experts is one parameter, with the experts first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / 8)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts of each token return."""
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):  # as many as this process holds
            row, choice = torch.where(index == expert)
            hidden = torch.relu(tokens[row] @ self.up[expert])
            output = output.index_add(0, row, hidden @ self.down[expert] * weights[row, choice, None])
        return output


class Model(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the router's scores."""
        scores = self.router(tokens)
        weights, index = scores.softmax(-1).topk(CHOICES)
        return tokens + self.experts(tokens, index, weights), scores


def main() -> None:
    set_seed(0)
    size = PartialState(cpu=True).num_processes
    mesh = ParallelismConfig(dp_shard_size=size, ep_size=size, ep_plan={"experts": "experts"})
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    tokens = torch.randn(1024, WIDTH)
    kinds = tokens[:, :3].sign().add(1).div(2).long() @ torch.tensor([1, 2, 4])
    targets = torch.einsum("nw,nwv->nv", tokens, torch.randn(EXPERTS, WIDTH, WIDTH)[kinds] / 4)
    loader = DataLoader(TensorDataset(tokens, targets), batch_size=64 // size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(8):
        total = torch.zeros(())
        for inputs, wanted in loader:
            outputs, scores = model(inputs)
            loss = nn.functional.mse_loss(outputs, wanted)
            balance = accelerator.load_balancing_loss(scores, top_k=CHOICES)
            accelerator.backward(loss + 0.01 * balance)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() / len(loader)
        mean = accelerator.reduce(total, "mean").item()
        for name, counts in accelerator.expert_counts(model).items():
            imbalance = (counts.max() / counts.float().mean()).item()
            accelerator.print(f"{name}: imbalance {imbalance:.2f}")
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
