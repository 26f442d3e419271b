"""Early stopping in a step: rank 0's value reaches all ranks, and each reports its copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from trainer_hooks.callbacks.early_stopping import RankEarlyStopping
from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.early_stopping import EarlyStopping, Stopper


class EarlyStoppingFeature(StepFeature):
    """Ends a run whose metric no longer improves: ``watch(..., early_stopping=...)``."""

    slots = Slots(
        rank0=(
            "evaluated",  # 1 if the next number is a new value of the metric
            "evaluation",
        ),
        rank=("holds_evaluated",),  # the rank keeps a copy of the latest evaluated state
    )
    state_key = "stopping"
    is_resumable = True

    def __init__(self, run: RunContext, evaluations: RankEarlyStopping) -> None:
        super().__init__(run)
        self.evaluations = evaluations

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature if the run was given ``EarlyStopping``."""
        settings, recovery = run.given.early_stopping, run.recovery
        if settings is None:
            return None
        ring, store = (None, None) if recovery is None else (recovery.ring, recovery.store)
        evaluations = RankEarlyStopping(
            settings, ranks=run.ranks, emitter=run.emitter, ring=ring, store=store
        )
        return cls(run, evaluations)

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the value that was given before this step, if any."""
        value = self.evaluations.rank0_metric(step.step, step.attempt)
        return {} if value is None else {"evaluated": 1.0, "evaluation": value}

    def contribute_always(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return whether this rank holds a copy of the state that was evaluated."""
        return {"holds_evaluated": float(self.evaluations.has_state_copy(step.step, step.attempt))}

    def on_reduced(self, step: ReturnedStep) -> None:
        """Count the value, and keep the copies if all ranks hold one and it is the best."""
        self.evaluations.apply_reduced_metric(step.reduced, step=step.step, attempt=step.attempt)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations without improvement."""
        return self.evaluations.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue to count from a state."""
        self.evaluations.load_state_dict(state)

    @classmethod
    def check_state(cls, state: Mapping[str, Any]) -> None:
        """Raise if early stopping could not continue from the state."""
        settings = EarlyStopping(metric=state["metric"], mode=state["mode"])
        Stopper(settings).load_state_dict(state)
