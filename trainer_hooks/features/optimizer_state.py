"""Optimizer state that something else than the optimizer has reset, found by its own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from trainer_hooks.measures.second_moments import (
    EVERY,
    AppliedGradients,
    MomentCheck,
    MomentReset,
)
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import AttemptStarted, Finding, FindingRaised

_STEPS_BETWEEN_READINGS = 3
"""Steps between two readings while findings continue."""


class OptimizerStateFeature(StepFeature):
    """Compares Adam's second moments with the gradients, on rank 0.

    Every ``EVERY`` steps, and after a step with findings, which a reset could explain.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._check = MomentCheck(run.device.norms, run.device.optimizers)
        self._next_step = 0
        """First step at which a finding starts a reading."""
        self._has_finding = False

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature on rank 0, if all optimizers step together and it has all of them."""
        if not run.is_rank0 or len(run.device.turns) > 1:
            return None
        feature = cls(run)
        return feature if feature._check.is_possible else None

    def before_measure(self, step: OutgoingStep) -> None:
        """Start to read the second moments, if that is due."""
        has_finding = self._has_finding and step.step >= self._next_step
        if has_finding or step.step % EVERY == 0:
            self._has_finding, self._next_step = False, step.step + _STEPS_BETWEEN_READINGS
            with self._run.faults.fail_open("optimizer_state"):
                device = self._run.device
                if self._check.norms is not device.norms:  # the loop added parameter groups
                    self._check = MomentCheck(device.norms, device.optimizers)
                self._check.read(step.step)

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Report the layers whose second moments were reset; read them soon after a finding."""
        self._has_finding |= bool(judgement.findings)
        with self._run.faults.fail_open("optimizer_state"):
            applied = _applied_gradients(step)
            if applied is None:
                self._check.forget()
                return
            self._check.add(applied)
            if resets := self._check.find_resets():
                self._report(step, resets)

    def _report(self, step: ReturnedStep, resets: Sequence[MomentReset]) -> None:
        """Write a finding about each layer's reset."""
        for reset in resets:
            finding = Finding(
                kind="update_ratio",
                level="advisory",
                step=step.step,
                detector="optimizer_state",
                reason=f"the second moments of layer {reset.layer} were set to 0 before the update "
                f"of step {reset.step}, and still lack {reset.missing:.0%}: its updates are too "
                "large",
                onset_step=reset.step,
                layer=reset.layer,
            )
            event = FindingRaised(finding=finding)
            self._run.emitter.run_event(event, step=step.step, attempt=step.attempt)

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Discard the readings: the new attempt starts from another state."""
        self._check.forget()

    def on_restored(self, next_step: int) -> None:
        """Discard the readings: an earlier state was restored."""
        self._check.forget()


def _applied_gradients(step: ReturnedStep) -> AppliedGradients | None:
    """Return the squared gradients that a step's update used; None if the clip is unknown."""
    record, measured = step.record, step.measured
    if record.skipped:
        return AppliedGradients(step.step, ())
    if measured.clip_unknown or measured.turn or record.failed_ranks:
        return None
    squares, norm = step.reduced.squares, record.grad_norm
    if measured.after_clip or not norm:
        return AppliedGradients(step.step, squares)
    if measured.norm_after_clip is not None:
        return AppliedGradients(step.step, squares, (measured.norm_after_clip / norm) ** 2)
    if measured.clips_automatically:
        divisor = norm / (measured.auto_max_norm or math.inf)
    else:
        divisor = (norm + 1e-6) / (measured.max_norm or math.inf)  # as `clip_grad_norm_` does
    return AppliedGradients(step.step, squares, max(1.0, divisor) ** -2)
