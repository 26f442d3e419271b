"""Two small trainings, and the faults that are put into them: a character model and a small CNN.

After a prototype of the rule, whose doses these are. Each fault is what its name says, done to the
real objects of a real loop: the parameters, the optimizer's state, its groups, a rank's batch, the
gradients before or after they are averaged.
"""

from __future__ import annotations

import ast
import inspect
import os
import struct
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = 700
CLIP, WEIGHT_DECAY = 1.0, 0.1
LOUD = (
    "nan_grad", "inf_act", "weights_x10", "v_zero", "grad_x100", "rank_garbage5",
    "labels_shuffled5", "lr_x30_on", "lr_x30_3", "lr_x30_unlogged", "bitflip_bit30", "loader_stall",
    "loss_overflow", "frozen_layer", "row_exploded",
)  # fmt: skip
QUIETER = (
    "row_garbage", "wd_off", "clip_off", "bitflip_random", "rank_grad_x20", "drift_0.5%",
    "drift_2%",
)  # fmt: skip
FAULTS = LOUD + QUIETER
PASSING = (
    "nan_grad", "inf_act", "grad_x100", "rank_garbage5", "labels_shuffled5", "loader_stall",
    "loss_overflow", "row_garbage", "rank_grad_x20", "mild_grad_x5", "mild_rank_half_garbage5",
    "mild_labels_half5", "mild_rank_grad_x3", "mild_act_x3",
)  # fmt: skip
"""Faults over within 5 steps: with 10 clean steps behind it, none is a cause of anything."""
MILD = (
    "mild_weights_x1.2", "mild_grad_x5", "mild_lr_x3_unlogged", "mild_rank_half_garbage5",
    "mild_labels_half5", "mild_v_div10", "mild_rank_grad_x3", "mild_act_x3",
)  # fmt: skip
MODELS = ("gpt", "cnn")
Batch = tuple[Tensor, Tensor]
Truth = tuple[str, str]
"""What is to be named: a subject, and a layer or ``rank:N``; empty where it is of all."""


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states behind the block."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return hidden


class CharModel(nn.Module):
    """Two blocks over 96 characters."""

    def __init__(self, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(96, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 96)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next character at each place."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@dataclass(frozen=True, slots=True)
class Training:
    """A model with its data."""

    model: nn.Module
    rate: float
    batch_of: Callable[[int, int, bool], Batch]
    """By step and rank; the last says whether it is the other task."""
    garbage: Callable[[Batch, torch.Generator, int], Batch]
    """Replaces so many of a batch's samples."""
    losses: Callable[[Tensor, Tensor], Tensor]
    """The loss of each sample."""
    exploding: tuple[str, int]
    """Layer and row of the fault ``row_exploded``."""
    size: int

    @property
    def layers(self) -> list[str]:
        """The layers that faults strike: those with a matrix."""
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d)
        ]


def generator(seed: int, step: int, salt: int) -> torch.Generator:
    """Return a generator of its own for each step and purpose."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step * 7919 + salt * 104_729) % 2**31)


def make(name: str, seed: int) -> Training:
    """Return one of the two trainings."""
    torch.manual_seed(seed)
    return _text(seed) if name == "gpt" else _images(seed)


def _text(seed: int) -> Training:
    text = "".join(inspect.getsource(module) for module in (ast, inspect, typing, os))
    codes = torch.tensor([min(max(ord(c) - 31, 0), 95) for c in text if ord(c) < 127])
    model = CharModel()

    def batch_of(step: int, rank: int, other: bool) -> Batch:
        starts = torch.randint(0, len(codes) - 34, (8,), generator=generator(seed, step, rank))
        rows = codes[starts[:, None] + torch.arange(33)]
        rows = 95 - rows.flip(1) if other else rows
        return rows[:, :-1], rows[:, 1:]

    def garbage(batch: Batch, draws: torch.Generator, num: int) -> Batch:
        x, y = batch[0].clone(), batch[1].clone()
        for part in (x, y):
            part[:num] = torch.randint(0, 96, part[:num].shape, generator=draws)
        return x, y

    def losses(out: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(len(y), -1).mean(1)

    common = int(torch.bincount(codes).argmax())
    return Training(model, 2e-3, batch_of, garbage, losses, ("tokens", common), 8)


def _images(seed: int) -> Training:
    layers = (
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8),
    )  # fmt: skip
    patterns = torch.randn(8, 1, 12, 12, generator=generator(seed, 0, 99))

    def batch_of(step: int, rank: int, other: bool) -> Batch:
        draws = generator(seed, step, rank)
        y = torch.randint(0, 8, (16,), generator=draws)
        x = patterns[y] + 1.2 * torch.randn(16, 1, 12, 12, generator=draws)
        noisy = torch.rand(16, generator=draws) < 0.1
        y = torch.where(noisy, torch.randint(0, 8, (16,), generator=draws), y)
        return x, (y + 3) % 8 if other else y

    def garbage(batch: Batch, draws: torch.Generator, num: int) -> Batch:
        x = batch[0].clone()
        x[:num] = torch.randn(x[:num].shape, generator=draws) * 10
        return x, batch[1]

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, reduction="none")

    return Training(nn.Sequential(*layers), 3e-3, batch_of, garbage, losses, ("0", 3), 16)


# ---------------------------------------------------------------------------------- faults


class Fault(NamedTuple):
    """One fault: what, from which step on, to whom, and when somebody asks."""

    name: str
    step: int
    layer: str
    rank: int
    draw: int
    asked_at: int

    @property
    def truth(self) -> Truth:
        """What moved first."""
        of_rank = f"rank:{self.rank}"
        fixed: dict[str, Truth] = {
            "v_zero": ("optimizer", self.layer), "mild_v_div10": ("optimizer", self.layer),
            "row_garbage": ("data", of_rank), "rank_garbage5": ("data", of_rank),
            "mild_rank_half_garbage5": ("data", of_rank), "labels_shuffled5": ("data", ""),
            "mild_labels_half5": ("data", ""), "rank_grad_x20": ("rank", of_rank),
            "mild_rank_grad_x3": ("rank", of_rank), "wd_off": ("config", ""),
            "clip_off": ("config", ""), "loader_stall": ("loader", ""),
            "loss_overflow": ("loss", ""),
        }  # fmt: skip
        if "lr_x" in self.name:
            return ("lr", "")
        return fixed.get(self.name, ("layer", self.layer))


def plan(
    seed: int, faults: tuple[str, ...], training: Training, between: tuple[int, int]
) -> list[Fault]:
    """Draw where and when each fault strikes, in the order of their steps."""
    drawn = []
    for i, fault in enumerate(faults):
        draws = np.random.default_rng([seed, i, 11, len(training.layers), len(faults)])
        layer, rank = str(draws.choice(training.layers)), int(draws.integers(4))
        step, draw = int(draws.integers(*between)), int(draws.integers(1 << 30))
        late = int(draws.integers(5, 31)) + (50 if fault.startswith("drift") else 0)
        late = 5 + late % 5 if fault in PASSING else late
        layer = training.exploding[0] if fault == "row_exploded" else layer
        drawn.append(Fault(fault, step, layer, rank, draw, step + late))
    return sorted(drawn, key=lambda fault: fault.step)


class Injector:
    """Does to a training what a fault is, at its steps; nothing before them."""

    def __init__(
        self, training: Training, optimizer: torch.optim.AdamW, rank: int, seed: int
    ) -> None:
        self._training, self._optimizer = training, optimizer
        self._rank, self._seed = rank, seed
        self._modules = dict(training.model.named_modules())
        self.fault: Fault | None = None
        self._age = -1
        for name, module in self._modules.items():
            module.register_forward_hook(self._of(name))
        optimizer.register_step_pre_hook(lambda *_: self._scale_rates(1.0))
        optimizer.register_step_post_hook(lambda *_: self._scale_rates(-1.0))

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._age = -1 if self.fault is None else step - self.fault.step

    def _is(self, *names: str, steps: int = 1) -> bool:
        return self.fault is not None and self.fault.name in names and 0 <= self._age < steps

    @property
    def _params(self) -> list[Tensor]:
        assert self.fault is not None
        return list(self._modules[self.fault.layer].parameters())

    @torch.no_grad()
    def before_forward(self) -> None:
        """Change parameters, optimizer state and settings."""
        fault = self.fault
        if fault is None or self._age < 0:
            return
        factor = {"weights_x10": 10.0, "mild_weights_x1.2": 1.2}.get(fault.name)
        if factor is not None and self._age == 0:
            torch._foreach_mul_(self._params, factor)
        if fault.name.startswith("drift"):
            torch._foreach_mul_(self._params, 1 + float(fault.name[6:-1]) / 100)
        if self._is("v_zero", "mild_v_div10"):
            for param in self._params:
                self._optimizer.state[param]["exp_avg_sq"].div_(
                    10.0 if "10" in fault.name else torch.inf
                )
        if self._is("row_exploded"):
            self._params[0][self._training.exploding[1]] *= 100
        if self._is("bitflip_bit30", "bitflip_random"):
            self._flip(30 if fault.name.endswith("30") else 23 + fault.draw // 7 % 7)
        if self._is("wd_off", steps=STEPS):
            self._optimizer.param_groups[0]["weight_decay"] = 0.0
        if self._is("lr_x30_on", steps=STEPS) or self._is("lr_x30_3", steps=3):
            self._optimizer.param_groups[0]["lr"] *= 30

    def _flip(self, bit: int) -> None:
        assert self.fault is not None
        flat = max(self._params, key=lambda param: param.numel()).view(-1)
        at = self.fault.draw % flat.numel()
        (word,) = struct.unpack("I", struct.pack("f", flat[at].item()))
        (flat[at],) = struct.unpack("f", struct.pack("I", word ^ (1 << bit)))

    def _scale_rates(self, sign: float) -> None:
        """Apply another rate than the one that is recorded."""
        factor = 30.0 if self._is("lr_x30_unlogged", steps=STEPS) else 1.0
        factor = 3.0 if self._is("mild_lr_x3_unlogged", steps=STEPS) else factor
        self._optimizer.param_groups[0]["lr"] *= factor**sign

    def batch(self, batch: Batch, step: int) -> Batch:
        """Return this rank's batch, spoilt or not."""
        if self.fault is None or self._age < 0:
            return batch
        salt, size = 50 + self._rank, self._training.size
        num = 1 if self._is("row_garbage") else 0
        num = size if self._is("rank_garbage5", steps=5) else num
        num = size // 2 if self._is("mild_rank_half_garbage5", steps=5) else num
        if num and self._rank == self.fault.rank:
            batch = self._training.garbage(batch, generator(self._seed, step, salt), num)
        rows = size if self._is("labels_shuffled5", steps=5) else 0
        rows = size // 2 if self._is("mild_labels_half5", steps=5) else rows
        if rows:
            y = batch[1].clone()
            flat = y[:rows].flatten()
            order = torch.randperm(len(flat), generator=generator(self._seed, step, salt + 40))
            y[:rows] = flat[order].view_as(y[:rows])
            batch = batch[0], y
        return batch

    def _of(self, name: str) -> Callable[..., Any]:
        def change(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            fault = self.fault
            if fault is None or fault.layer != name:
                return None
            if self._is("mild_act_x3", steps=5):
                return output * 3
            if self._is("inf_act") and fault.rank == self._rank:
                output = output.clone()
                output.view(-1)[5] = torch.inf
                return output
            return None

        return change

    def scaled(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss that is recorded, and the one that goes backward."""
        if self._is("loss_overflow"):
            loss = loss * 1e30 * 1e30
        factor = 20.0 if self._is("rank_grad_x20") else 1.0
        factor = 3.0 if self._is("mild_rank_grad_x3") else factor
        is_own = self.fault is not None and self.fault.rank == self._rank
        return loss, loss * factor if is_own else loss

    @torch.no_grad()
    def after_backward(self) -> None:
        """Change gradients that were averaged already, alike on all ranks."""
        if self.fault is None or self._age < 0:
            return
        grads = [param.grad for param in self._params if param.grad is not None]
        factor = {"grad_x100": 100.0, "mild_grad_x5": 5.0}.get(self.fault.name)
        if factor is not None and self._age == 0:
            torch._foreach_mul_(grads, factor)
        if self._is("frozen_layer", steps=STEPS):
            torch._foreach_zero_(grads)
        if self._is("nan_grad"):
            flat = grads[0].view(-1)
            flat[self.fault.draw % flat.numel()] = torch.nan

    @property
    def clip(self) -> float:
        """What the loop clips to."""
        return 1e9 if self._is("clip_off", steps=STEPS) else CLIP

    @property
    def stalls(self) -> bool:
        """Whether the loader does."""
        return self._is("loader_stall", steps=3)
