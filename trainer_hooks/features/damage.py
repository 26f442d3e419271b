"""Damaged weights, read when a step has a problem that they could explain."""

from __future__ import annotations

from typing import Self

from trainer_hooks.measures.sampled import SampledSignals
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import HUGE_WEIGHT

_STEPS_BETWEEN_READS = 3
"""Steps between two reads of the weights while findings continue."""


class DamageFeature(StepFeature):
    """Reads the weights of rank 0, which writes the rows of layers; never in a healthy step.

    At the second non-finite step in a row, and at a finding of a huge gradient: a flipped bit of an
    exponent makes a weight finite and huge.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._nonfinite_row = (-2, -2)
        """First and latest of the non-finite steps in a row, without overflows of a scaler."""
        self._next_read_step = 0
        """First step at which a finding reads the weights again."""

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature on rank 0; None on the others."""
        return cls(run) if run.is_rank0 else None

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add huge weights to the step's samples."""
        record, run = step.record, self._run
        is_nonfinite = bool(record.nonfinite_ranks) and not record.overflow
        if not judgement.findings and not is_nonfinite:
            return judgement
        first, last = self._nonfinite_row
        if is_nonfinite:
            first = first if last == step.step - 1 else step.step
            self._nonfinite_row = first, step.step
        is_second = is_nonfinite and step.step == first + 1 and not record.nonfinite_params
        is_due = not is_nonfinite and step.step >= self._next_read_step
        if is_second or (is_due and (record.grad_norm or 0.0) > HUGE_WEIGHT):
            self._next_read_step = step.step + _STEPS_BETWEEN_READS
            with run.faults.fail_open("damage"):
                largest = run.device.norms.largest_weights().items()
                huge = {name: peak for name, peak in largest if peak > HUGE_WEIGHT}
                step.samples = (step.samples or SampledSignals())._replace(huge_parameters=huge)
        return judgement

    def on_restored(self, next_step: int) -> None:
        """Explain the problems of the new attempt by its own state and gradients."""
        self._nonfinite_row, self._next_read_step = (-2, -2), 0
