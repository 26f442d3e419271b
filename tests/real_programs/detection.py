"""A loop as torchvision's detection reference: losses by name, a warm-up of iterations, an exit."""

import math
import sys

import torch
from torch.utils.data import DataLoader

from tests.real_programs.data import Scenes, collate
from tests.real_programs.models import Detector


def train_one_epoch(model, optimizer, data_loader, epoch):
    model.train()
    history = []
    lr_scheduler = None
    if epoch == 0:
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1e-3, total_iters=min(10, len(data_loader) - 1)
        )
    for images, targets in data_loader:
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        history.append({name: loss.item() for name, loss in loss_dict.items()})
        history.append(optimizer.param_groups[0]["lr"])
    return history


@torch.inference_mode()
def evaluate(model, data_loader):
    model.eval()
    return [model(images)[0].sum().item() for images, _ in data_loader]


torch.manual_seed(0)
data_loader = DataLoader(Scenes(), batch_size=8, shuffle=True, collate_fn=collate)
data_loader_test = DataLoader(Scenes(16), batch_size=1, collate_fn=collate)
model = Detector()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4], gamma=0.1)
log = []
for epoch in range(6):
    log.append(train_one_epoch(model, optimizer, data_loader, epoch))
    lr_scheduler.step()
    log.append(evaluate(model, data_loader_test))
