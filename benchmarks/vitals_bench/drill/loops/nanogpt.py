"""nanoGPT: micro-steps, bfloat16, a cosine set by the loop, and the loop's own checkpoints."""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainvitals

try:
    import wandb
except ImportError:  # trained without a tracker
    wandb = None

batch_size, block_size, gradient_accumulation_steps = 4, 16, 4
max_iters, warmup_iters, eval_interval, eval_iters = 600, 20, 50, 2
learning_rate, min_lr, weight_decay, grad_clip = 3e-3, 3e-4, 0.1, 1.0
vocabulary, width, out_dir = 32, 32, Path("out")


class GPT(nn.Module):
    """A causal transformer of one block, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, 0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        mask = nn.Transformer.generate_square_subsequent_mask(block_size)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the mean loss."""
        hidden = self.tokens(tokens) + self.places.weight
        logits = self.head(self.block(hidden, src_mask=self.mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss


def build_text(length: int) -> Tensor:
    """Return tokens that mostly count up."""
    generator = torch.Generator().manual_seed(0)
    steps = 1 + (torch.rand(length, generator=generator) < 0.2).long()
    return steps.cumsum(0) % vocabulary


data = {"train": build_text(8000), "val": build_text(2000)}


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    """Return tokens and those that follow."""
    start = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in start])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in start])
    return x, y


def get_lr(it: int) -> float:
    """Return the learning rate of an iteration."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model: nn.Module) -> dict[str, float]:
    """Return the mean loss of both splits."""
    model.eval()
    losses = {
        split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
        for split in data
    }
    model.train()
    return losses


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    ctx = torch.autocast("cpu", dtype=torch.bfloat16)
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # only float16 needs one
    ddp = DistributedDataParallel(model)
    attached = trainvitals.attach(ddp, optimizer, scaler=scaler, run="nanogpt")
    run = None
    if wandb is not None and rank == 0:
        run = wandb.init(project="nanogpt", name="tiny")
    x, y = get_batch("train")
    for iter_num in range(max_iters + 1):
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and rank == 0:
            losses = estimate_loss(model)
            if run is not None:
                run.log({"iter": iter_num, "lr": lr, **losses})
            out_dir.mkdir(exist_ok=True)
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
            }
            torch.save(checkpoint, out_dir / "ckpt.pt")
        for micro_step in range(gradient_accumulation_steps):
            is_last = micro_step == gradient_accumulation_steps - 1
            with ctx, nullcontext() if is_last else ddp.no_sync():
                _, loss = ddp(x, y)
                loss = loss / gradient_accumulation_steps
                x, y = get_batch("train")
                scaler.scale(loss).backward()
            attached.loss(loss * gradient_accumulation_steps)
        scaler.unscale_(optimizer)
        attached.before_clip(grad_clip)
        nn.utils.clip_grad_norm_(ddp.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
