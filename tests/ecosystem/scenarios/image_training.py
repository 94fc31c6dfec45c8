"""timm: its model, loss, optimizer, schedule, clipping and model average, in a loop like its training script's."""

from __future__ import annotations

import vision  # noqa: F401  (declares what torchvision asks for when it is imported)

# isort: split
import timm
import torch
from sklearn.datasets import load_digits
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy, dispatch_clip_grad
from tiny import copy_of, difference, from_all_ranks, report
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 3

set_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
digits = load_digits()
images = torch.tensor(digits.images[:320], dtype=torch.float32)[:, None].repeat(1, 3, 4, 4) / 16
labels = torch.tensor(digits.target[:320])
train_loader = DataLoader(TensorDataset(images[:256], labels[:256]), batch_size=32, shuffle=True, drop_last=True)
eval_loader = DataLoader(TensorDataset(images[256:301], labels[256:301]), batch_size=16)

model = timm.create_model("test_vit", num_classes=10, img_size=32, patch_size=8)
optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
average = ModelEmaV3(model, decay=0.9)
schedule, num_epochs = create_scheduler_v2(
    optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=1, updates_per_epoch=len(train_loader)
)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
train_loss, eval_loss = LabelSmoothingCrossEntropy(0.1), torch.nn.CrossEntropyLoss()

history, num_updates = [], 0
for epoch in range(num_epochs):
    model.train()
    losses = AverageMeter()
    for inputs, targets in train_loader:
        with accelerator.autocast():
            loss = train_loss(model(inputs), targets)
        accelerator.backward(loss)
        dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        average.update(accelerator.unwrap_model(model), step=num_updates)
        num_updates += 1
        losses.update(accelerator.reduce(loss.detach(), "mean").item(), inputs.size(0))
        schedule.step_update(num_updates=num_updates, metric=losses.avg)
    history.append(losses.avg)
    schedule.step(epoch + 1)

model.eval()
top1, counted = AverageMeter(), 0
with torch.inference_mode():
    for inputs, targets in eval_loader:
        outputs, answers = accelerator.gather_for_metrics((model(inputs), targets))
        top1.update(accuracy(outputs, answers)[0].item(), len(answers))
        counted += len(answers)

final = copy_of(accelerator.unwrap_model(model))
report(
    losses=history,
    counted=counted,
    top1=top1.avg,
    learning_rate=optimizer.param_groups[0]["lr"],
    average_moved=difference(final, copy_of(average.module)),
    ranks_off_by=max(difference(final, theirs) for theirs in from_all_ranks(final)),
)
