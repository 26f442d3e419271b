"""Weights that something else than the optimizer has changed, found by what updates can change."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

from trainer_hooks.measures.weight_norms import (
    DATED_STEPS,
    WeightCheck,
    WeightWrite,
    date_write,
)
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import AttemptStarted, Finding, FindingRaised


class WeightsFeature(StepFeature):
    """Compares the norms of the weights with what Adam can have changed, on rank 0."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._check = WeightCheck(run.device.norms, run.device.optimizers)
        self._squares: deque[tuple[int, Sequence[float]]] = deque(maxlen=DATED_STEPS)
        """Squared gradient norms of the latest steps."""

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature on rank 0, if all optimizers step together and it has all of them."""
        if not run.is_rank0 or len(run.device.turns) > 1:
            return None
        feature = cls(run)
        return feature if feature._check.is_possible else None

    def before_measure(self, step: OutgoingStep) -> None:
        """Start to read the norms, if that is due."""
        with self._run.faults.fail_open("weights"):
            device = self._run.device
            if self._check.norms is not device.norms:  # the loop added parameter groups
                self._check = WeightCheck(device.norms, device.optimizers)
            self._check.read(step.step, step.rates)

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Report the layers whose weights were written to."""
        self._squares.append((step.step, step.reduced.squares))
        with self._run.faults.fail_open("weights"):
            for write in self._check.find_writes(step.step):
                onset = date_write(write, dict(self._squares))
                event = FindingRaised(finding=_finding(write, step.step, onset))
                self._run.emitter.run_event(event, step=step.step, attempt=step.attempt)

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Discard the readings: the new attempt starts from another state."""
        self._check.forget()

    def on_restored(self, next_step: int) -> None:
        """Discard the readings: an earlier state was restored."""
        self._check.forget()


def _finding(write: WeightWrite, step: int, onset: int) -> Finding:
    """Return the finding about a layer whose weights were written to."""
    first, last = write.first_step, write.last_step
    when = f"at step {last}" if first == last else f"between steps {first} and {last}"
    return Finding(
        kind="weight_norm",
        level="advisory",
        step=step,
        detector="weights",
        reason=f"the weights of layer {write.layer} were changed by something else than the "
        f"optimizer {when}: a norm of {write.before:.4g} became {write.now:.4g}, and updates "
        f"change it by at most {write.most:.2g}",
        value=write.now,
        limit=write.before + write.most,
        onset_step=onset,
        layer=write.layer,
    )
