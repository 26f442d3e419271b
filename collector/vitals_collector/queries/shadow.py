"""Hindsight on decisions that were not carried out: whether they would have been needed."""

from collections.abc import Sequence

import msgspec

from trainvitals.errors import UsageError
from trainvitals.hindsight import AFTER, BEFORE, judge_decision_in_hindsight
from trainvitals.views import DecisionView
from vitals_collector.queries import series
from vitals_collector.storage.store import ReadSnapshot


def add_observed_outcomes(
    moment: ReadSnapshot, run_id: str, views: Sequence[DecisionView]
) -> tuple[DecisionView, ...]:
    """Return the decisions; those in mode ``observe`` with the outcome that the run shows."""
    shadows = [view.decision for view in views if not view.decision.acted]
    if not shadows:
        return tuple(views)
    first = min(decision.step for decision in shadows) - 2 * BEFORE
    last = max(decision.step for decision in shadows) + max(AFTER.values())
    try:
        _, curve = series.curve_of(moment, run_id, "steps.loss", "", (first, last))
    except UsageError:
        return tuple(views)  # the run has no loss: the outcome is unknown
    (drawn,) = moment.numbers.curves([curve], (), "all")
    points = drawn.points
    losses: dict[int, dict[int, float]] = {}
    for step, attempt, loss in zip(
        points.step.tolist(), points.attempt.tolist(), points.value.tolist(), strict=True
    ):
        losses.setdefault(attempt, {})[step] = loss
    return tuple(
        msgspec.structs.replace(
            view,
            hindsight=judge_decision_in_hindsight(
                view.decision, losses.get(view.decision.attempt, {})
            )
            or "",
        )
        for view in views
    )
