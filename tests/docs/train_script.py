"""`train.py` of the pages: a small run that resumes, whatever arguments it is given."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, ProjectConfiguration, set_seed

accelerator = Accelerator(project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=1))
set_seed(0)
inputs = torch.randn(320, 4)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
for step, (source, target) in enumerate(loader):
    loss = nn.functional.mse_loss(model(source), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == 9:
        accelerator.save_state()
accelerator.print(f"trained on {accelerator.num_processes} processes, loss {loss.item():.3f}")
accelerator.end_training()
