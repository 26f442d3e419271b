"""Squares of all gradients in one fused pass, so that one sum over the ranks gives exact norms.

At ``watch()`` the ranks compare what each holds (``trainer_hooks.step.shards``); a local square is
divided by its number of holders. The sum over ranks then is the global square in DDP (every rank
holds all), FSDP (each holds a part) and their products, without weights from placements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer_hooks.guard.optimizer_state import nonfinite_count
from trainer_hooks.ranks import Ranks
from trainer_hooks.step.shards import (
    Piece,
    align_gradients,
    check_alike,
    local_tensor,
    num_elements,
    shards_of,
    shares,
)
from trainer_hooks.step.squares import Squares
from trainvitals.errors import UsageError


def no_gradients() -> UsageError:
    """Return what is said where the first step brings no gradient on any rank."""
    return UsageError(
        "no parameter of the optimizers has a gradient at the first step",
        hint="step after loss.backward() and before zero_grad(), with the optimizers that hold the "
        "model's parameters",
    )


def scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply the gradients in place: in groups of a device and type, or the fused way is lost."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        alike[grad.device, grad.dtype].append(grad)
    for (device, dtype), group in alike.items():
        torch._foreach_mul_(group, coefficient.to(device, dtype))


class GradNorms:
    """The gradients of all watched parameters and their squares; collective when made."""

    def __init__(
        self, params: dict[str, Tensor], ranks: Ranks, pieces: Mapping[int, Piece] | None = None
    ) -> None:
        self.names = tuple(params)
        self.params: Sequence[Tensor] = tuple(params.values())
        self.device = local_tensor(self.params[0]).device
        self._sharded = [param for param in self.params if hasattr(param, "placements")]
        mine = shards_of(params, pieces or {})
        everyone = ranks.gather(mine)
        check_alike([[name for name, _ in rank] for rank in everyone])
        self.share = torch.tensor(shares(mine, everyone), dtype=torch.float64, device=self.device)
        self.replicated = all(theirs == mine for theirs in everyone)
        self.num_parameters = num_elements(everyone)
        self._where: tuple[list[int], Tensor] | None = None
        self._squares = Squares()

    def align(self) -> None:
        """Lay the gradients of sharded parameters out as these are; may be a collective."""
        align_gradients(self._sharded)

    @torch.no_grad()  # else to_local() builds a graph
    def gradients(self) -> tuple[list[int], list[Tensor]]:
        """Return the positions that have a gradient and those gradients, sparse ones coalesced.

        What is returned is the gradient itself: scaled in place, it is clipped.
        """
        where, grads = [], []
        for i, param in enumerate(self.params):
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse and not grad.is_coalesced():
                grad = param.grad = grad.coalesce()
            local = local_tensor(grad)
            if local.is_sparse:
                local = local._values()
            if local.numel() == 0:
                continue
            where.append(i)
            grads.append(torch.view_as_real(local) if local.is_complex() else local)
        return where, grads

    @torch.no_grad()
    def local_parameters(self) -> list[Tensor]:
        """Return this rank's part of each parameter, complex ones as pairs of numbers."""
        local = [local_tensor(param.detach()) for param in self.params]
        return [torch.view_as_real(p) if p.is_complex() else p for p in local]

    @torch.no_grad()
    def untouched(self) -> list[Tensor]:
        """Return the gradients just as they are: what is clipped where ``gradients`` failed."""
        return [local_tensor(p.grad) for p in self.params if p.grad is not None]

    def squares_into(self, out: Tensor, where: list[int], grads: list[Tensor]) -> None:
        """Write each parameter's share of its square into ``out`` (float64); missing ones are 0.

        No value reaches the host.
        """
        if not grads:
            return
        squares = self._squares.of(grads, self.device)
        if len(grads) == len(self.params):
            torch.mul(squares, self.share, out=out)
        else:
            index = self._index(where)
            out.index_copy_(0, index, squares * self.share[index])

    def _index(self, where: list[int]) -> Tensor:
        """Return the positions on the device: kept, and sent from pinned memory, which waits not.

        Frozen parameters are without a gradient in every step.
        """
        if self._where is None or self._where[0] != where:
            pinned = self.device.type == "cuda"
            index = torch.tensor(where, device="cpu", pin_memory=pinned)
            self._where = where, index.to(self.device, non_blocking=True)
        return self._where[1]

    def nonfinite_parameters(self) -> Tensor:
        """Return, on the device, how many local parameters hold a NaN or Inf; does not wait."""
        with torch.no_grad():
            return nonfinite_count([local_tensor(p) for p in self.params], self.device)
