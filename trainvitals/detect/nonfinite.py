"""Non-finite losses, gradients and parameters, and ranks that could not measure."""

from __future__ import annotations

import math
from typing import Any

from trainvitals.records import Finding, StepRecord

MAX_OVERFLOWS = 40
"""Scaler overflows in a row that still pass as normal. The largest default scale, 65536, is used up
after 16 halvings, and even 2**40 after this many: what still overflows is not the scale's fault."""


class NonFiniteDetector:
    """Finds what is NaN or infinite. Needs no warm-up and no history.

    An overflow under a gradient scaler is how that scaler works, and no finding, as long as the
    loss itself is finite and the overflows end.
    """

    name = "nonfinite"

    def __init__(self) -> None:
        self._overflows = 0

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Take one step in and return what is to be said about it."""
        self._overflows = min(self._overflows + 1, MAX_OVERFLOWS + 1) if record.overflow else 0
        loss, norm = record.loss, record.grad_norm
        bad_loss = loss is not None and not math.isfinite(loss)
        bad_norm = bool(record.nonfinite_ranks) or (norm is not None and not math.isfinite(norm))
        excused = record.overflow and not bad_loss and self._overflows <= MAX_OVERFLOWS
        if not (bad_loss or bad_norm or record.nonfinite_params or record.failed_ranks):
            return ()
        findings = []
        if record.nonfinite_params:
            findings.append(self._params(record))
        if (bad_loss or bad_norm) and not excused:
            findings.append(self._step(record, bad_loss=bad_loss))
        if record.failed_ranks:
            findings.append(self._failed(record))
        return tuple(findings)

    def _step(self, record: StepRecord, *, bad_loss: bool) -> Finding:
        ranks = record.nonfinite_ranks
        what = f"loss is {record.loss}" if bad_loss else f"gradient norm is {record.grad_norm}"
        if not bad_loss and record.grad_norm is not None and math.isfinite(record.grad_norm):
            what = "gradients are non-finite"
        where = f" on {_ranks(ranks)}" if ranks else ""
        if record.overflow and not bad_loss:
            what = f"{what} in more than {MAX_OVERFLOWS} steps in a row whatever the loss scale"
        return Finding(
            kind="nonfinite",
            level="actionable",
            step=record.step,
            detector=self.name,
            reason=what + where,
            rank=ranks[0] if len(ranks) == 1 else -1,
            value=record.loss if bad_loss else record.grad_norm,
            onset_step=record.step,
            cause="nonfinite_loss" if bad_loss else "nonfinite_gradient",
        )

    def _params(self, record: StepRecord) -> Finding:
        ranks = record.nonfinite_ranks
        return Finding(
            kind="nonfinite_params",
            level="actionable",
            step=record.step,
            detector=self.name,
            reason=f"parameters are non-finite on {record.nonfinite_params} rank(s)",
            rank=ranks[0] if len(ranks) == 1 == record.nonfinite_params else -1,
            value=float(record.nonfinite_params),
            onset_step=record.step,
            cause="nonfinite_params",
        )

    def _failed(self, record: StepRecord) -> Finding:
        ranks = record.failed_ranks
        return Finding(
            kind="rank_failed",
            level="advisory",
            step=record.step,
            detector=self.name,
            reason=f"{_ranks(ranks)} could not measure the step",
            rank=ranks[0] if len(ranks) == 1 else -1,
            onset_step=record.step,
            cause="rank_failed",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {"overflows": self._overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the detector that gave ``state``."""
        self._overflows = int(state["overflows"])


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
