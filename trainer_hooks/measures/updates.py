"""Norms of the parameters and of the update that led to them, by parameter.

Measured with the gradients of a step, as the parameters still are what it began with: whatever the
optimizers did in between is in the difference to a copy that was made before the last update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_hooks.step.gradients import GradNorms, Squares


class Updates:
    """Measures when told to; waits for nothing."""

    def __init__(self, norms: GradNorms) -> None:
        self._norms = norms
        self._kept: list[Tensor] = []
        self._is_kept = False
        self._squares = Squares()

    @torch.no_grad()
    def weight_squares(self) -> Tensor:
        """Return each parameter's square, this rank's share of it."""
        return self._share_of(self._norms.local_parameters())

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the parameters, into memory that stays taken; call before the update."""
        self._is_kept = False
        now = self._norms.local_parameters()
        if [t.shape for t in self._kept] != [t.shape for t in now]:
            self._kept = [torch.empty_like(tensor) for tensor in now]
        torch._foreach_copy_(self._kept, now)
        self._is_kept = True

    @torch.no_grad()
    def update_squares(self) -> Tensor | None:
        """Return the squares of what the parameters moved by since ``keep``; None if not kept."""
        if not self._is_kept:
            return None
        self._is_kept = False
        torch._foreach_sub_(self._kept, self._norms.local_parameters())
        return self._share_of(self._kept)

    def forget(self) -> None:
        """Drop the copy: the parameters have been put back since."""
        self._is_kept = False

    def _share_of(self, tensors: list[Tensor]) -> Tensor:
        return self._squares.of(tensors, self._norms.device) * self._norms.share
