"""A loop as nanoGPT's: micro-steps, a gradient scaler, the rate set by hand, evaluation every N."""

import math

import torch

from tests.real_programs.data import text
from tests.real_programs.models import GPT

batch_size, block_size, gradient_accumulation_steps = 8, 12, 2
max_iters, warmup_iters, eval_interval, eval_iters = 90, 5, 30, 2
learning_rate, min_lr, weight_decay, grad_clip = 1e-2, 1e-3, 0.1, 1.0
dtype = "float16"

torch.manual_seed(1337)
tokens = text()
data = {"train": tokens[:1600], "val": tokens[1600:]}
ctx = torch.autocast("cpu", dtype=torch.bfloat16)


def get_batch(split):
    start = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in start])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in start])
    return x, y


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [
    {"params": matrices, "weight_decay": weight_decay},
    {"params": vectors, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


log = []
x, y = get_batch("train")
iter_num = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        log.append(estimate_loss())
    for _micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    log.append(loss.item() * gradient_accumulation_steps)
    iter_num += 1
    if iter_num > max_iters:
        break
