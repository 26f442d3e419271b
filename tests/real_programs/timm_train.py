"""A loop as timm's: a scaler that clips and steps by itself, mixup, channels-last, its own EMA."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.real_programs.data import Images
from tests.real_programs.models import convnet


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        averages = self.module.state_dict().values()
        for average, value in zip(averages, model.state_dict().values(), strict=True):
            average.copy_(self.decay * average + (1.0 - self.decay) * value)


class CosineUpdates:
    """Not one of torch's: it is told the number of updates, and writes the rates itself."""

    def __init__(self, optimizer, updates):
        self.optimizer, self.updates = optimizer, updates
        self.base = [group["lr"] for group in optimizer.param_groups]

    def step_update(self, num_updates):
        share = torch.cos(torch.tensor(num_updates / self.updates * torch.pi)).item()
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * 0.5 * (1.0 + share)


def mixup(images, target):
    lam = torch.distributions.Beta(0.8, 0.8).sample()
    soft = nn.functional.one_hot(target, 3).float()
    return images * lam + images.flip(0) * (1 - lam), soft * lam + soft.flip(0) * (1 - lam)


def train_one_epoch(epoch, model, loader):
    model.train()
    num_updates = epoch * ((len(loader) + accum_steps - 1) // accum_steps)
    optimizer.zero_grad()
    for batch_idx, (images, target) in enumerate(loader):
        last_batch = batch_idx == len(loader) - 1
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        images, target = mixup(images, target)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model(images), target) / accum_steps
        loss_scaler(
            loss, optimizer, clip_grad=clip_grad, parameters=model.parameters(),
            need_update=need_update,
        )  # fmt: skip
        log.append(loss.item() * accum_steps)
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        model_ema.update(model)
        lr_scheduler.step_update(num_updates=num_updates)


torch.manual_seed(42)
accum_steps, clip_grad, epochs = 2, 1.0, 9
loader = DataLoader(Images(), batch_size=8, shuffle=True)
model = convnet().to(memory_format=torch.channels_last)
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-3)
loss_scaler = NativeScaler()
model_ema = ModelEma(model)
lr_scheduler = CosineUpdates(optimizer, epochs * 10)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
log = []
for epoch in range(epochs):
    train_one_epoch(epoch, model, loader)
