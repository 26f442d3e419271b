"""The sum of squares of every gradient, in one pass, exact enough to decide on; nothing waits.

A gradient of 1e30 must stay a finite outlier, though its square is Inf in float32, and float32 sums
of millions of squares drift (torch's own norm of 25M elements is .3 % off on the CPU). On a GPU the
pass is bound by memory, so it adds up in float64. On the CPU that would cost four passes, so there
each block of ``BLOCK`` elements is multiplied by itself in float32 while the blocks are added up in
float64; the block's plain sum, taken while it is in the cache, tells a square that overflowed from
an element that is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements multiplied at once: 1 MiB in float32, which a core's cache holds."""

SMALL = 4096
"""Up to here a float64 norm costs less than starting two kernels."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which gradients are summed in blocks, and where the numbers belong."""

    key: tuple[int, ...]
    whole: list[int]
    """Gradients whose norm is taken at once, in float64."""
    blocked: list[int]
    whole_index: Tensor
    owner_index: Tensor
    """For every block, the gradient it is a part of."""


class Squares:
    """Sums squares; keeps the plan of the last step, since shapes seldom change."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def of(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sum of squares of each gradient, float64 of shape (len(grads),).

        Not finite exactly where an element is not finite, or where elements above 1e38 add up. A
        square beyond float32 comes out of the block's plain sum: exact for a lone outlier, never
        below float32's largest number.
        """
        if device.type != "cpu":
            each = torch._foreach_norm(list(grads), 2.0, dtype=torch.float64)
            return torch.stack([norm.to(device) for norm in each]).square_()
        plan = self._planned(grads)
        out = torch.zeros(len(grads), dtype=torch.float64, device=device)
        if plan.whole:
            each = torch._foreach_norm([grads[i] for i in plan.whole], 2.0, dtype=torch.float64)
            out.index_copy_(0, plan.whole_index, torch.stack(each).square_())
        if plan.blocked:
            out.index_add_(0, plan.owner_index, _block_squares([grads[i] for i in plan.blocked]))
        return out

    def _planned(self, grads: Sequence[Tensor]) -> _Plan:
        # Half precision has no sum of its own that could be trusted: those go the slow way.
        key = tuple(
            grad.numel() if grad.dtype in (torch.float32, torch.float64) else 0 for grad in grads
        )
        if self._plan is None or self._plan.key != key:
            whole = [i for i, numel in enumerate(key) if numel <= SMALL]
            blocked = [i for i, numel in enumerate(key) if numel > SMALL]
            owners = [i for i in blocked for _ in range(-(-key[i] // BLOCK))]
            self._plan = _Plan(
                key,
                whole,
                blocked,
                torch.tensor(whole, dtype=torch.int64, device="cpu"),
                torch.tensor(owners, dtype=torch.int64, device="cpu"),
            )
        return self._plan


def _block_squares(grads: Sequence[Tensor]) -> Tensor:
    """Return the square of every block, float64, in order."""
    squares, sums = [], []
    for grad in grads:
        for block in grad.reshape(-1).split(BLOCK):
            squares.append(torch.dot(block, block))
            sums.append(block.sum())
    square, total = torch.stack(squares).double(), torch.stack(sums).double()
    overflowed = ~torch.isfinite(square) & torch.isfinite(total)
    return torch.where(overflowed, total.square().clamp_(min=_LARGEST), square)
