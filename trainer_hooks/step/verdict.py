"""The verdict on a step, taken on the device from reduced numbers: the same on every rank."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.step.reduce_vector import RANK_FIELDS, ROOT_FIELDS, PackLayout
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    LOSS_OUTLIER,
    NORM_OUTLIER,
    OVERFLOW,
    RANK_FAILED,
    WITHHELD,
)

SHORT_FROM = 1.8e19
"""The root of float32's largest number."""

_SUMMED = [RANK_FIELDS.index(name) for name in ("weighted_loss", "weight", "failed", "overflow")]
_LIMITS = ("loss_limit", "grad_norm_limit")
_WORDS = ("withhold_first", "withhold_left")
assert ROOT_FIELDS[:4] == _LIMITS + _WORDS, "the verdict compares both numbers at once"

_FACTS = (BAD_LOSS, BAD_GRADIENTS, OVERFLOW, WITHHELD, LOSS_OUTLIER, NORM_OUTLIER, RANK_FAILED)
_NUM_BAD = _FACTS.index(LOSS_OUTLIER)
"""The first so many facts keep an update back."""


class Verdict(NamedTuple):
    """Device tensors, all 0-dimensional float64."""

    bad: Tensor
    """Exactly 0.0 or 1.0: whether the update must not be applied."""
    bits: Tensor
    loss: Tensor
    grad_norm: Tensor
    overflow: Tensor
    """0.0 or 1.0: whether the gradient scaler's own flag was up on any rank."""
    in_row: Tensor
    """0.0 or 1.0: whether this step was a finite outlier, or stood behind one and was not finite or
    not whole. The next step's verdict takes it, as the host does not know yet."""
    measured: Tensor
    """True where at least one rank could measure; else the norm says nothing."""

    def derived(self) -> Tensor:
        """Return the numbers that go to the host beside the pack: bits, loss, norm."""
        return torch.stack((self.bits, self.loss, self.grad_norm))


def judge_on_device(layout: PackLayout, pack: Tensor, in_row: Tensor) -> Verdict:
    """Return the verdict on the reduced pack. Pure; no value reaches the host.

    A loss or norm that is not finite is bad at once. A finite one above rank 0's limit is withheld
    where it follows another one, or where rank 0 says so, while it allows for more.
    Where a rank's prepare failed the numbers are short of its part, so the finite rules abstain. A
    scaler's overflow keeps the update back but is no fault, whatever the norm.

    Args:
        layout: of the pack.
        pack: the reduced numbers.
        in_row: that of the verdict before.
    """
    sums = layout.slots(pack).sum(dim=0)
    weighted_loss, weight, failed, overflows = (sums[i] for i in _SUMMED)
    limits = pack[layout.root : layout.root + len(_LIMITS)]
    first, left = pack[layout.root + len(_LIMITS) : layout.root + 4].unbind()
    has_loss, overflow = weight != 0, overflows != 0
    has_numbers = torch.stack((has_loss, ~overflow))
    whole, measured = failed == 0, failed != layout.world_size
    # Replicas each bring an equal part: without one of them the others' parts stand for it.
    part = torch.where(measured, 1.0 - failed / layout.world_size, 1.0)
    norm = (pack[: layout.num_params].sum() / part).sqrt()
    # Both numbers at once: each operation is a kernel of its own. NaN and Inf times 0 are NaN.
    values = torch.stack((torch.where(has_loss, weighted_loss / weight, 0.0), norm))
    finite = values * 0.0 == 0.0
    nonfinite = ~finite & has_numbers
    outlier = (values > limits) & finite & has_numbers & whole
    is_outlier = outlier.any()
    withheld = is_outlier & (left > 0) & ((in_row != 0) | (first != 0))
    facts = torch.cat((nonfinite, torch.stack((overflow, withheld)), outlier, ~whole[None]))
    unclear = facts[:3].any() | ~whole
    return Verdict(
        facts[:_NUM_BAD].any().to(torch.float64),
        (facts * _bits(pack.device)).sum(),
        values[0],
        norm,
        overflow.to(torch.float64),
        (is_outlier | (unclear & (in_row != 0))).to(torch.float64),
        measured,
    )


@functools.cache
def _bits(device: torch.device) -> Tensor:
    """Return what each fact is written as; kept: only the first step waits until it is sent."""
    return torch.tensor(_FACTS, dtype=torch.float64, device=device)


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return max(1, (norm + 1e-6) / max_norm): one over the factor of ``clip_grad_norm_``.

    A norm whose square float32 cannot hold may be short of the truth (see
    ``trainer_hooks.step.squares``), and what it divides still be huge: nothing is left of such
    gradients. Torch's own norm is Inf there, and its clip leaves nothing either.
    """
    divisor = torch.clamp((norm + 1e-6) / max_norm, min=1.0)
    return divisor.masked_fill(norm >= SHORT_FROM, torch.inf)
