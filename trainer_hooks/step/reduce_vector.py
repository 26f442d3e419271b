"""The one vector the ranks sum in a step: its layout, its filling, and its reading on the host.

    squares of every parameter | rank 0's words | RANK_FIELDS of rank 0 | of rank 1 | ... | sampled

The last part is there where signals were opted in (``trainer_hooks.measures.sampled``).

A rank writes its own slots and leaves the others zero, so a sum is also a gather: maximum, spread
and culprit come out of the same collective. Above MAX_SLOTS ranks, neighbours share a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer_hooks.ranks import Ranks

MAX_SLOTS = 1024

RANK_FIELDS = (
    "weighted_loss",  # loss times weight
    "weight",  # 0 where the rank has no loss
    "bad_squares",  # 1 where this rank's own gradients are not finite
    "overflow",  # the gradient scaler's own flag
    "failed",  # the rank's prepare failed: its numbers do not count
    "num_gradients",
    "nonfinite_params",
    "norm_before_clip",  # where the loop clips by itself and gives it; shared by all ranks
    "snapshot_wrong",  # what is wrong with the snapshot that was just taken: 0 is nothing
    "digest",  # of the last verdict: a mismatch is an incident
    "terminating",  # the rank was sent SIGTERM: all save, and stop
    "holds_evaluated",  # the rank keeps a copy of the state that was evaluated last
    "probe_ready",  # the rank was given a loss_of, and keeps batches for it
)
ROOT_FIELDS = (
    "loss_limit",
    "grad_norm_limit",
    "withhold_first",  # the first outlier in a row is withheld too
    "withhold_left",  # outliers that may still be withheld
    "clips",  # the loop clips: it takes the first outlier in a row
    "command_number",
    "command_action",
    "command_argument",
    "next_attempt",  # id for the branch that a rollback would open
    "expect_steps",  # an announced change: the finite rules forget, and abstain this long
    "saved_step",  # of the newest complete checkpoint on disk, and its attempt; attempt 0: none yet
    "saved_attempt",
    "save_due",  # the time between two checkpoints on disk is over
    "evaluated",  # 1 where the next number is a new value of the metric that early stopping is on
    "evaluation",
    "evaluation_ratio",  # an evaluation's loss over the one before; 0: there was none
)
RankField = Literal[
    "weighted_loss",
    "weight",
    "bad_squares",
    "overflow",
    "failed",
    "num_gradients",
    "nonfinite_params",
    "norm_before_clip",
    "snapshot_wrong",
    "digest",
    "terminating",
    "holds_evaluated",
    "probe_ready",
]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where each number lies; equal on all ranks by construction."""

    num_params: int
    num_slots: int
    slot: int
    world_size: int = 1
    num_sampled: int = 0

    @classmethod
    def of(cls, num_params: int, ranks: Ranks, num_sampled: int = 0) -> PackLayout:
        """Return the layout for this job and this rank's slot in it."""
        slots = min(ranks.world_size, MAX_SLOTS)
        slot = ranks.rank * slots // ranks.world_size
        return cls(num_params, slots, slot, ranks.world_size, num_sampled)

    @property
    def root(self) -> int:
        """First of rank 0's words."""
        return self.num_params

    @property
    def ranks(self) -> int:
        """First of the rank slots."""
        return self.num_params + len(ROOT_FIELDS)

    @property
    def sampled(self) -> int:
        """First of the sampled signals."""
        return self.ranks + self.num_slots * len(RANK_FIELDS)

    @property
    def size(self) -> int:
        """Numbers in the pack."""
        return self.sampled + self.num_sampled

    def mine(self, field: RankField) -> int:
        """Position of this rank's ``field``."""
        return self.ranks + self.slot * len(RANK_FIELDS) + RANK_FIELDS.index(field)

    def slots(self, pack: Tensor) -> Tensor:
        """Return the rank slots as a view of shape (num_slots, fields)."""
        return pack[self.ranks : self.sampled].view(self.num_slots, len(RANK_FIELDS))


@dataclass(frozen=True, slots=True)
class RankContribution:
    """What one rank brings to the exchange besides its gradients' squares.

    ``loss`` and ``weight`` may be device tensors; everything else is a host number.
    """

    loss: Tensor | None
    weight: Tensor | float
    overflow: Tensor | None = None
    nonfinite_params: Tensor | None = None
    num_gradients: int = 0
    failed: bool = False
    norm_before_clip: Tensor | None = None
    snapshot_wrong: Tensor | None = None
    digest: int = 0
    terminating: bool = False
    holds_evaluated: bool = False
    probe_ready: bool = False


@dataclass(frozen=True, slots=True)
class Rank0Values:
    """Rank 0's words: the limits in force and its verified command. None is no limit."""

    loss_limit: float | None = None
    grad_norm_limit: float | None = None
    clips: bool = False
    withhold_first: bool = False
    withhold_left: int = 0
    command_number: int = 0
    command_action: int = 0
    command_argument: float = 0.0
    next_attempt: int = 0
    expect_steps: int = 0
    saved_step: int = 0
    saved_attempt: int = 0
    save_due: bool = False
    evaluation: float | None = None
    evaluation_ratio: float = 0.0

    def words(self) -> list[float]:
        """Return the numbers in the order of ROOT_FIELDS."""
        return [
            math.inf if self.loss_limit is None else self.loss_limit,
            math.inf if self.grad_norm_limit is None else self.grad_norm_limit,
            float(self.withhold_first),
            float(self.withhold_left),
            float(self.clips),
            float(self.command_number),
            float(self.command_action),
            self.command_argument,
            float(self.next_attempt),
            float(self.expect_steps),
            float(self.saved_step),
            float(self.saved_attempt),
            float(self.save_due),
            float(self.evaluation is not None),
            0.0 if self.evaluation is None else self.evaluation,
            self.evaluation_ratio,
        ]


class ReduceVector:
    """Fills the persistent pack of this rank."""

    def __init__(self, layout: PackLayout, device: torch.device) -> None:
        self.layout = layout
        self.pack = torch.zeros(layout.size, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        # Three host buffers in turn: copies of the last steps may still be under way.
        self._controller = [
            torch.zeros(
                layout.size - layout.num_params,
                dtype=torch.float64,
                device="cpu",
                pin_memory=pinned,
            )
            for _ in range(3)
        ]
        self._turn = 0

    @property
    def squares(self) -> Tensor:
        """The part of the pack that the norms go to; ``clear`` zeroes it."""
        return self.pack[: self.layout.num_params]

    @property
    def sampled(self) -> Tensor:
        """The part of the pack for sampled signals; empty where none were opted in."""
        return self.pack[self.layout.sampled :]

    def fill(self, local: RankContribution, root: Rank0Values | None) -> None:
        """Write all but the squares; ``root`` on rank 0 alone. Waits for nothing."""
        layout, base = self.layout, self.layout.num_params
        self._turn = (self._turn + 1) % len(self._controller)
        controller = self._controller[self._turn].zero_()
        numbers: dict[RankField, float] = {
            "failed": float(local.failed),
            "num_gradients": float(local.num_gradients),
            "digest": float(local.digest),
            "terminating": float(local.terminating),
            "holds_evaluated": float(local.holds_evaluated),
            "probe_ready": float(local.probe_ready),
        }
        for field, number in numbers.items():
            controller[layout.mine(field) - base] = number
        if root is not None:
            controller[: len(ROOT_FIELDS)] = torch.tensor(
                root.words(), dtype=torch.float64, device="cpu"
            )
        self.pack[base:].copy_(controller, non_blocking=True)
        if local.overflow is not None:
            self.pack[layout.mine("overflow")] = local.overflow.reshape(())
        if not local.failed:
            self._fill_tensors(local)

    def _fill_tensors(self, local: RankContribution) -> None:
        pack, layout = self.pack, self.layout
        if local.loss is not None:
            pack[layout.mine("weighted_loss")] = local.loss * local.weight
            pack[layout.mine("weight")] = local.weight
        if local.norm_before_clip is not None:
            pack[layout.mine("norm_before_clip")] = local.norm_before_clip / layout.world_size
        if local.snapshot_wrong is not None:
            pack[layout.mine("snapshot_wrong")] = local.snapshot_wrong
        if local.nonfinite_params is not None:
            pack[layout.mine("nonfinite_params")] = local.nonfinite_params
        bad = ~torch.isfinite(self.squares).all()
        pack[layout.mine("bad_squares")] = bad.to(torch.float64)

    def undo_clip(self) -> None:
        """Scale the summed squares to those before the loop's own clip, where it gave the norm.

        This rank's slot then says what the norm was after the clip.
        """
        squares, layout = self.squares, self.layout
        given = layout.slots(self.pack)[:, RANK_FIELDS.index("norm_before_clip")].sum()
        total = squares.sum()
        nothing_left = (total == 0) & torch.isfinite(given)
        squares *= torch.where((given == 0) | nothing_left, 1.0, given * given / total)
        after = torch.where(given == 0, 0.0, total.sqrt())
        self.pack[layout.mine("norm_before_clip")] = after

    def clear(self) -> None:
        """Set every number to zero before a step's numbers are written."""
        self.pack.zero_()


class Reduced:
    """The summed pack on the host: plain numbers that every rank holds alike."""

    def __init__(self, layout: PackLayout, numbers: list[float]) -> None:
        self.layout = layout
        self.squares = numbers[: layout.num_params]
        self.root = dict(zip(ROOT_FIELDS, numbers[layout.root : layout.ranks], strict=True))
        width = len(RANK_FIELDS)
        flat = numbers[layout.ranks : layout.sampled]
        self.sampled = numbers[layout.sampled : layout.size]
        self._by_field = {field: flat[i::width] for i, field in enumerate(RANK_FIELDS)}

    @property
    def has_gradients(self) -> bool:
        """Whether any rank had a gradient."""
        return any(self._by_field["num_gradients"])

    def by_rank(self, field: RankField) -> list[float]:
        """Return the field's value of every slot, in rank order."""
        return self._by_field[field]

    def ranks_where(self, field: RankField) -> tuple[int, ...]:
        """Return the slots whose value is not zero."""
        return tuple(r for r, value in enumerate(self._by_field[field]) if value != 0.0)

    def limit(self, field: Literal["loss_limit", "grad_norm_limit"]) -> float | None:
        """Return the limit that was in force, None where there was none."""
        value = self.root[field]
        return None if math.isinf(value) else value
