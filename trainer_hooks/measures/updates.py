"""Norms of the parameters and of an update to them, by parameter.

Measured around the update of one step, and brought in the pack of the next: so the row of step t
has the norm of the weights that t began with, and of the update that led to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_hooks.norms import GradNorms
from trainer_hooks.squares import Squares


class Updates:
    """Measures one update when told to; waits for nothing."""

    def __init__(self, norms: GradNorms, *, update_norm: bool) -> None:
        self._norms = norms
        self._update_norm = update_norm
        self._kept: list[Tensor] = []
        self._is_kept = False
        self._measured: Tensor | None = None
        self._squares = Squares()

    @property
    def size(self) -> int:
        """Numbers in the pack: one square of each parameter, and one of its update."""
        return len(self._norms.names) * (1 + self._update_norm)

    @torch.no_grad()
    def before_update(self) -> None:
        """Keep a copy of the parameters, in memory that stays taken."""
        if not self._update_norm:
            return
        now = self._norms.local_parameters()
        if [t.shape for t in self._kept] != [t.shape for t in now]:
            self._kept = [torch.empty_like(tensor) for tensor in now]
        torch._foreach_copy_(self._kept, now)
        self._is_kept = True

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure the parameters, and how far they are from the copy."""
        now, device, share = self._norms.local_parameters(), self._norms.device, self._norms.share
        squares = [self._squares.of(now, device) * share]
        if self._update_norm:
            if not self._is_kept:
                return
            self._is_kept = False
            torch._foreach_sub_(self._kept, now)
            squares.append(self._squares.of(self._kept, device) * share)
        self._measured = torch.cat(squares)

    def take(self) -> Tensor | None:
        """Return what was measured around the last update, once."""
        measured, self._measured = self._measured, None
        return measured

    def forget(self) -> None:
        """Drop what was measured: the parameters have been put back since."""
        self._measured, self._is_kept = None, False
