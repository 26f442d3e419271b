"""Curves of a stored run with what was decided along them, asked for once and drawn in any form."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainvitals.errors import UsageError
from trainvitals.views import Branch, DecisionView, SeriesQuestion, SeriesReply
from vitals_collector.queries.open import Reader
from vitals_collector.report.scales import Column

METRICS = {"steps.loss": "loss", "steps.grad_norm": "gradient norm"}
"""What tells how a run is, and what people call it."""

POINTS = 2_000
"""Asked for of each curve: each of its buckets has its least and greatest value."""

KINDS = {
    "halt": ("H", "halt"),
    "rollback": ("R", "rollback"),
    "skip_step": ("s", "step skipped"),
    "accept_level": ("a", "new level accepted"),
    "continue": ("c", "told, went on"),
    "observed": ("o", "observed, not done"),
}
"""Kinds of marks, the gravest first: their letter and their words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveMark:
    """Something that was decided about a step."""

    step: int
    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric over some steps, with its limit and what rollbacks left behind."""

    name: str
    series: SeriesReply
    limit: SeriesReply | None = None
    discarded: SeriesReply | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step there is a value of."""
        steps = [*self.series.step, *(mark.step for mark in self.series.nonfinite)]
        if self.discarded is not None:
            steps += self.discarded.step
        return (min(steps), max(steps)) if steps else (0, 0)

    def left_behind(self, num: int) -> list[dict[int, Column]]:
        """Return the columns of each branch that a rollback left behind."""
        series = self.discarded
        if series is None:
            return []
        branches = sorted({*series.attempt, *(mark.attempt for mark in series.nonfinite)})
        return [columns(series, self.span, num, attempt) for attempt in branches]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (self.series.step or self.series.nonfinite)


def curves(
    reader: Reader,
    run_id: str,
    metrics: Sequence[str],
    from_step: int | None = None,
    to_step: int | None = None,
) -> tuple[Curve, ...]:
    """Return loss and gradient norm, as far as the run has them among its ``metrics``."""

    def ask(metric: str, branch: Branch = "lineage") -> SeriesReply | None:
        if metric not in metrics:
            return None
        try:
            return reader.ask(
                SeriesQuestion(
                    run_id=run_id,
                    metric=metric,
                    branch=branch,
                    points=POINTS,
                    from_step=from_step,
                    to_step=to_step,
                )
            )
        except UsageError:  # measured, but on no rank whose rows are left
            return None

    measured_curves = []
    for metric, name in METRICS.items():
        series = ask(metric)
        if series is None:
            continue
        left = ask(metric, "discarded")
        curve = Curve(name=name, series=series, limit=ask(f"{metric}_limit"), discarded=left)
        if not curve.is_empty:
            measured_curves.append(curve)
    return tuple(measured_curves)


def marks(ledger: Sequence[DecisionView]) -> tuple[CurveMark, ...]:
    """Return a mark for each decision of the ledger, at the step it is about."""
    return tuple(
        CurveMark(
            step=view.decision.step,
            kind=view.decision.action if view.decision.acted else "observed",
            words=f"step {view.decision.step}: {view.decision.action}: {view.decision.reason}",
        )
        for view in ledger
    )


def place(step: int, span: tuple[int, int], num: int) -> int:
    """Return in which of ``num`` columns a step lies."""
    first, last = span
    return (step - first) * (num - 1) // max(1, last - first)


def columns(
    series: SeriesReply, span: tuple[int, int], num: int, attempt: int | None = None
) -> dict[int, Column]:
    """Return the columns with a value in them; no value and no NaN is left out of them."""
    columns_by_place: dict[int, Column] = {}
    for step, branch, value in zip(series.step, series.attempt, series.value, strict=True):
        if value is not None and attempt in (None, branch) and span[0] <= step <= span[1]:
            columns_by_place.setdefault(place(step, span, num), Column()).add(value)
    for mark in series.nonfinite:
        if attempt in (None, mark.attempt) and span[0] <= mark.step <= span[1]:
            columns_by_place.setdefault(place(mark.step, span, num), Column()).num_nonfinite += 1
    return columns_by_place
