"""Curves of a stored run with what was decided along them, asked for once and drawn in any form.

Where values lie in a picture is decided here as well: the least and the greatest of each column,
and the axis.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainvitals.errors import UsageError
from trainvitals.views import Branch, DecisionView, SeriesQuestion, SeriesReply
from vitals_collector.queries.open import Reader

LOG_FROM = 20.0
"""Greatest over least value from which an axis is logarithmic."""


@dataclass(slots=True)
class PlotColumn:
    """The values that one column of a picture stands for."""

    low: float = math.inf
    high: float = -math.inf
    limit: float = math.inf
    num_nonfinite: int = 0

    def add(self, value: float) -> None:
        """Take a value in; one that is not finite is counted."""
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.num_nonfinite += 1

    @property
    def has_value(self) -> bool:
        """Whether any value was finite."""
        return self.low <= self.high


class ValueScale:
    """Maps values to an axis, logarithmically where they span much and are positive."""

    def __init__(self, columns: Iterable[PlotColumn]) -> None:
        finite = [column for column in columns if column.has_value]
        self._low = min((c.low for c in finite), default=0.0)
        self._high = max((c.high for c in finite), default=1.0)
        self.is_log = self._low > 0.0 and self._high / LOG_FROM > self._low

    def part(self, value: float) -> float:
        """Return how far up the axis the value lies, 0 to 1."""
        low, high = self._at(self._low), self._at(self._high)
        part = (self._at(value) - low) / (high - low) if high > low else 0.5
        return min(max(part, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return the values to be written at the axis, from the least to the greatest."""
        if not self.is_log:
            return list(dict.fromkeys((self._low, self._low / 2 + self._high / 2, self._high)))
        return [self._low, math.sqrt(self._low) * math.sqrt(self._high), self._high]

    def _at(self, value: float) -> float:
        # Half of each, so that the distance of two floats is always a float.
        return math.log(max(value, self._low)) if self.is_log else value / 2


# ---------------------------------------------------------------------------------- curves of a run


METRICS = {"steps.loss": "loss", "steps.grad_norm": "gradient norm"}
"""What tells how a run is, and what people call it."""

POINTS = 2_000
"""Asked for of each curve: each of its buckets has its least and greatest value."""

KINDS = {
    "halt": ("H", "halt"),
    "rollback": ("R", "rollback"),
    "skip_step": ("s", "step skipped"),
    "accept_level": ("a", "new level accepted"),
    "restart": ("e", "hung job ended"),
    "continue": ("c", "reported only"),
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
class PlottedCurve:
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

    def left_behind(self, num: int) -> list[dict[int, PlotColumn]]:
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
) -> tuple[PlottedCurve, ...]:
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
        discarded = ask(metric, "discarded")
        curve = PlottedCurve(
            name=name, series=series, limit=ask(f"{metric}_limit"), discarded=discarded
        )
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
) -> dict[int, PlotColumn]:
    """Return the columns with a value in them; no value and no NaN is left out of them."""
    columns_by_place: dict[int, PlotColumn] = {}
    for step, branch, value in zip(series.step, series.attempt, series.value, strict=True):
        if value is not None and attempt in (None, branch) and span[0] <= step <= span[1]:
            columns_by_place.setdefault(place(step, span, num), PlotColumn()).add(value)
    for mark in series.nonfinite:
        if attempt in (None, mark.attempt) and span[0] <= mark.step <= span[1]:
            columns_by_place.setdefault(
                place(mark.step, span, num), PlotColumn()
            ).num_nonfinite += 1
    return columns_by_place
