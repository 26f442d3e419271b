"""A byte-level GPT with about 250,000 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the demo GPT's block for ``x`` of shape (batch, time, width)."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy (nats per byte) of ``tokens`` (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss
