"""Whether the guard is in force, and whether there is anything to guard.

Both need no reference: a step was measured or it was not, and a gradient is exactly 0 or it is not.
"""

from trainvitals.detect.outliers import Detector, LossKind
from trainvitals.detect.replicas import format_ranks
from trainvitals.records import Finding, StepRecord
from trainvitals.stateful import state_row

UNMEASURED = 10
"""Unmeasured steps in a row that page. One or two have causes that pass, such as memory that was
short for a moment; an error that comes ten times in a row comes at every step."""
AGAIN = 50
"""Steps after which it is reported again if it lasts: an alert ends after 100 steps without it."""
ZERO = 5
"""Steps in a row whose gradients are all exactly 0. A batch without a loss term makes one."""
ZERO_IS_USUAL = 50
"""The same where a gradient of 0 is part of training: the loss is exactly 0 as well (a margin that
all samples keep), or it is not minimized (groups of equal rewards)."""


class GuardDetector(Detector):
    """Finds steps that nobody measured, and steps that train nothing.

    Unmeasured steps count 1 each, and ten measured ones take one back: an error at every other step
    is found after 21 steps, and one at every tenth after 901.
    """

    name = "guard"
    STATE = (
        state_row("unmeasured", "_weight", "_since", "_num", "_next"),
        state_row("zero", "_zero", "_zero_since", "_zero_told"),
    )

    def __init__(self, *, loss_kind: LossKind = "minimize") -> None:
        self._minimizes = loss_kind == "minimize"
        self._weight = 0
        """Ten for each unmeasured step, less one for each measured step."""
        self._since = -1
        self._num = 0
        self._next = 0
        """Step from which it is reported again."""
        self._zero = 0
        self._zero_since = -1
        self._zero_told = False

    def update(self, record: StepRecord) -> tuple[Finding, ...]:
        """Detect steps that nothing measured, and steps whose gradients are exactly 0."""
        if not (record.failed_ranks or record.no_gradient or self._weight or self._zero):
            return ()
        return self._unmeasured_findings(record) + self._zero_gradient_findings(record)

    def rebaseline(self, steps: int = 0) -> None:
        """Do nothing: no planned change explains what this detector reports."""

    def _unmeasured_findings(self, record: StepRecord) -> tuple[Finding, ...]:
        """Count steps that a rank could not measure; return a finding once they are many."""
        if not record.failed_ranks:
            self._weight = max(0, self._weight - 1)
            if not self._weight:
                self._num = self._next = 0
            return ()
        if not self._num:
            self._since = record.step
        self._num += 1
        self._weight = min(self._weight + 10, 20 * UNMEASURED)
        if self._weight < 10 * UNMEASURED or record.step < self._next:
            return ()
        self._next = record.step + AGAIN
        ranks, steps = record.failed_ranks, record.step - self._since + 1
        rank = ranks[0] if len(ranks) == 1 else -1
        reason = (
            f"{format_ranks(ranks)} could not measure the gradients in {self._num} of {steps} "
            f"steps since step {self._since}, so those updates were not checked"
        )
        return self._report(
            record.step, reason, kind="unguarded", rank=rank, value=float(self._num),
            onset_step=self._since,
        )  # fmt: skip

    def _zero_gradient_findings(self, record: StepRecord) -> tuple[Finding, ...]:
        """Count steps with gradients of exactly 0; return a finding once they are many."""
        if not record.no_gradient:
            if not record.failed_ranks:  # an unmeasured step neither counts nor ends the row
                self._zero, self._zero_told = 0, False
            return ()
        if not self._zero:
            self._zero_since = record.step
        self._zero += 1
        is_usual = not self._minimizes or record.loss == 0.0
        if self._zero_told or self._zero < (ZERO_IS_USUAL if is_usual else ZERO):
            return ()
        self._zero_told = True
        since = self._zero_since
        reason = (
            f"all gradients have been exactly 0 since step {since}, in {self._zero} steps in a "
            "row, so these updates train nothing"
        )
        return self._report(record.step, reason, kind="zero_gradient", value=0.0, onset_step=since)
