"""The verdict on a step, taken on the device from reduced numbers: the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.pack import RANK_FIELDS, ROOT_FIELDS, PackLayout
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    LOSS_OUTLIER,
    NORM_OUTLIER,
    OVERFLOW,
    RANK_FAILED,
)

NUM_DERIVED = 3

_FIELD = {name: i for i, name in enumerate(RANK_FIELDS)}
_ROOT = {name: i for i, name in enumerate(ROOT_FIELDS)}


class Verdict(NamedTuple):
    """Device tensors, all 0-dimensional float64."""

    bad: Tensor
    """Exactly 0.0 or 1.0: whether the update must not be applied."""
    bits: Tensor
    loss: Tensor
    grad_norm: Tensor
    overflow: Tensor
    """0.0 or 1.0: whether the gradient scaler's own flag was up on any rank."""
    measured: Tensor
    """True where at least one rank could measure; else the norm says nothing."""

    def derived(self) -> Tensor:
        """Return the numbers that go to the host beside the pack: bits, loss, norm."""
        return torch.stack((self.bits, self.loss, self.grad_norm))


def judge_on_device(layout: PackLayout, pack: Tensor) -> Verdict:
    """Return the verdict on the reduced pack. Pure; no value reaches the host.

    A loss or norm that is not finite is bad at once; a finite one only above rank 0's limit. Where
    a rank's prepare failed the numbers are short of its part, so the finite rules abstain. A
    scaler's overflow keeps the update back but is no fault.
    """
    slots, root = layout.slots(pack), pack[layout.root : layout.ranks]
    sums = slots.sum(dim=0)
    weight = sums[_FIELD["weight"]]
    has_loss = weight != 0
    loss = sums[_FIELD["weighted_loss"]] / torch.where(has_loss, weight, torch.ones_like(weight))
    failed = sums[_FIELD["failed"]]
    whole, measured = failed == 0, failed < layout.world_size
    # Replicas each bring an equal part: without one of them the others' parts stand for it.
    part = torch.where(measured, 1.0 - failed / layout.world_size, torch.ones_like(failed))
    norm = (pack[: layout.num_params].sum() / part).sqrt()
    overflow = sums[_FIELD["overflow"]] > 0
    bits = (
        (has_loss & ~torch.isfinite(loss)) * BAD_LOSS
        + (~torch.isfinite(norm) & ~overflow) * BAD_GRADIENTS
        + (has_loss & whole & (loss > root[_ROOT["loss_limit"]])) * LOSS_OUTLIER
        + (whole & torch.isfinite(norm) & (norm > root[_ROOT["grad_norm_limit"]])) * NORM_OUTLIER
        + overflow * OVERFLOW
        + (~whole) * RANK_FAILED
    )
    bad = (bits & (RANK_FAILED - 1)) != 0
    return Verdict(
        bad.to(torch.float64),
        bits.to(torch.float64),
        loss,
        norm,
        overflow.to(torch.float64),
        measured,
    )


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return max(1, (norm + 1e-6) / max_norm): one over the factor of ``clip_grad_norm_``."""
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)
