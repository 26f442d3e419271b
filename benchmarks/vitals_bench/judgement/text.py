"""A tiny GPT on Python's own standard library: new text, memorised text, and what may befall it."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitals_bench.judgement.tasks import Batch, Poison, Task

SYMBOLS = 96
MODULES = ("argparse", "ast", "inspect", "typing", "pathlib", "tarfile", "subprocess")
CONTEXT = 32
EXAMPLES = 8
MEMORISED = 400
"""Characters of text, about, from which two batches are taken that are learnt by heart."""


@cache
def corpus() -> Tensor:
    """Return the text of some modules of the standard library as numbers below SYMBOLS."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [root / f"{name}.py" for name in MODULES]
    text = "".join(path.read_text(errors="ignore") for path in paths if path.exists())
    return torch.tensor([min(max(ord(c) - 31, 0), SYMBOLS - 1) for c in text if ord(c) < 127])


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout where it is asked for."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for ``x`` of shape (batch, time, width)."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, time, width)))
        return cast(Tensor, x + self.drop(self.down(functional.gelu(self.up(self.norm2(x))))))


class Gpt(nn.Module):
    """Predicts the next symbol; ``tied`` shares the two embeddings, as GPT-2 does."""

    def __init__(
        self, *, width: int = 32, layers: int = 2, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=not tied)
        if tied:
            self.head.weight = self.symbols.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if tied else 0.05)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return logits for ``symbols`` of shape (batch, time)."""
        x = self.drop(self.symbols(symbols) + self.places.weight[: symbols.shape[1]])
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Text; the other task of ``hard``, ``blocks`` and ``new`` is the text in a secret alphabet."""

    memorise: bool = False
    """Two batches again and again, each example with a mark of its own: the loss goes to 0."""
    hard: float = 0.0
    """Share of batches in the secret alphabet."""
    every: int = 0
    """Every so many batches one in the secret alphabet."""
    burst: int = 0
    """Three consecutive batches in the secret alphabet per ``burst`` batches."""
    blocks: int = 0
    """Batches after which the alphabet changes, and changes back."""
    curriculum: int = 0
    """First batches, of a series that is easy to continue."""
    short: int = 0
    """First batches, of a quarter of the context."""
    new: int = 0
    """Batch from which on all text is in the secret alphabet."""
    dropout: float = 0.0
    tied: bool = False

    @property
    def changes(self) -> tuple[int, ...]:
        """The alphabet, the length or the difficulty changes here."""
        blocks = range(self.blocks, self.steps, self.blocks) if self.blocks else ()
        return *blocks, *(step for step in (self.curriculum, self.short, self.new) if step)

    def model(self) -> nn.Module:
        """Return the untrained GPT."""
        return Gpt(dropout=self.dropout, tied=self.tied)

    def batch(self, index: int) -> Batch:
        """Return symbols and the symbols after them."""
        window = self._window(index)
        if self._is_secret(index):
            alphabet = torch.Generator().manual_seed(self.seed + 5)
            window = torch.randperm(SYMBOLS, generator=alphabet)[window]
        if not self.is_evaluation(index):
            if index < self.curriculum:
                window = (window[:, :1] + torch.arange(window.shape[1])) % SYMBOLS
            if index < self.short:
                window = window[:, : CONTEXT // 4 + 1]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _window(self, index: int) -> Tensor:
        text, generator = corpus(), self.generator(index)
        if not self.memorise:
            most = len(text) - 40 - CONTEXT - 1
            begins = torch.randint(0, most, (EXAMPLES,), generator=generator)
            return text[begins[:, None] + torch.arange(CONTEXT + 1)]
        place = torch.Generator().manual_seed(self.seed + 5)
        begin = int(torch.randint(0, len(text) - 5_000, (1,), generator=place))
        second = index % 2
        begins = begin + torch.arange(EXAMPLES) * 40 + 320 * second
        window = text[begins[:, None] + torch.arange(CONTEXT + 1)].clone()
        window[:, 0] = torch.arange(EXAMPLES) + EXAMPLES * second
        return window

    def _is_secret(self, index: int) -> bool:
        if self.is_evaluation(index):
            hard = self.hard or self.every or self.burst
            return bool(self.new or (self.blocks and index % 2) or (hard and index % 4 == 0))
        return (
            self.chance(index, self.hard)
            or (self.every > 0 and index % self.every == self.every - 1)
            or (self.burst > 0 and index % self.burst >= self.burst - 3)
            or (self.blocks > 0 and bool(index // self.blocks % 2))
            or (self.new > 0 and index >= self.new)
        )

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of each example's symbols."""
        logits = model(batch[0])
        each = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")
        return each.view(len(batch[0]), -1).mean(1)

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return shuffled targets, one symbol that is always followed by another, or noise."""
        symbols, targets = batch
        generator = self.generator(index, 9)
        if kind == "shuffle":
            order = torch.randperm(targets.numel(), generator=generator)
            return symbols, targets.flatten()[order].view_as(targets)
        if kind == "const":
            return torch.full_like(symbols, 7), torch.full_like(targets, 90)
        noise = torch.randint(0, SYMBOLS, (2, *symbols.shape), generator=generator)
        return noise[0], noise[1]
