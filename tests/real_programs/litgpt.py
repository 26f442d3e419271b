"""A loop as litgpt's LoRA: accumulation without synchronizing, frozen weights, a warm-up, DDP."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

from tests.real_programs.data import Sentences
from tests.real_programs.models import GPT, LowRank

gradient_accumulation_iters, max_steps, warmup_steps, eval_interval = 2, 90, 5, 30


def mark_only_lora_as_trainable(model):
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name


@torch.no_grad()
def validate(model, val_dataloader):
    model.eval()
    losses = torch.stack([model(x, y)[1] for x, y in val_dataloader])
    model.train()
    return losses.mean().item()


torch.manual_seed(1337)
model = GPT(dropout=0.0)
model.head = LowRank(model.head)
mark_only_lora_as_trainable(model)
model = DistributedDataParallel(model)
trainable_params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable_params, lr=0.02, weight_decay=0.02, fused=True)
scheduler = SequentialLR(
    optimizer,
    [
        LambdaLR(optimizer, lambda step: step / warmup_steps),
        CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps),
    ],
    milestones=[warmup_steps],
)
data = Sentences()
train_dataloader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
val_dataloader = DataLoader(Sentences(16), batch_size=8)
log = []
step_count = iter_num = epoch = 0
train_iterator = iter(train_dataloader)
while step_count < max_steps:
    iter_num += 1
    try:
        input_ids, targets = next(train_iterator)
    except StopIteration:
        epoch += 1
        train_dataloader.sampler.set_epoch(epoch)
        train_iterator = iter(train_dataloader)
        input_ids, targets = next(train_iterator)
    is_accumulating = iter_num % gradient_accumulation_iters != 0
    with model.no_sync() if is_accumulating else torch.enable_grad():
        _, loss = model(input_ids, targets)
        (loss / gradient_accumulation_iters).backward()
    log.append(loss.item())
    if not is_accumulating:
        nn.utils.clip_grad_norm_(trainable_params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step_count += 1
        if step_count % eval_interval == 0:
            log.append((scheduler.get_last_lr()[0], validate(model, val_dataloader)))
