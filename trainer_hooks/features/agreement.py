"""Whether all ranks reached the same verdict: each sends a digest of its latest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from trainer_hooks.exchange.reduce_vector import Slots, dissenters
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement
from trainvitals.records import AttemptStarted

_MAX_SHOWN = 8
"""Maximum number of ranks to list."""


class AgreementFeature(StepFeature):
    """Reports once per run if the policies of two ranks disagree: a bug, or damaged memory."""

    slots = Slots(rank=("digest",), exact=("digest",))

    _digest = 0
    _is_reported = False

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature; None for a rank that has no one to disagree with."""
        return cls(run) if run.ranks.world_size > 1 else None

    def contribute_always(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the digest of this rank's latest verdict."""
        return {"digest": float(self._digest)}

    def on_judged(self, step: ReturnedStep, judgement: Judgement) -> None:
        """Compute the digest of the verdict, and compare those of the step."""
        run = self._run
        self._digest = run.judge.digest()
        if self._is_reported or not (others := dissenters(step.reduced)):
            return
        self._is_reported = True
        shown = ", ".join(map(str, others[:_MAX_SHOWN]))
        shown += ", ..." if len(others) > _MAX_SHOWN else ""
        text = (
            f"{len(others)} of {run.ranks.world_size} ranks disagree with the others on the "
            f"verdict of step {step.step - 1}: {shown}"
        )
        run.emitter.note("split_verdict", text, "error", step=step.step, attempt=run.attempt)

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Compare nothing until a step of the new attempt was judged."""
        self._digest = 0
