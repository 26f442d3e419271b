"""Curves of a stored run with its decisions, queried once and drawn in any format.

The layout is also computed here: minimum and maximum of each column, and the axis.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainvitals.errors import UsageError
from trainvitals.views import Branch, DecisionView, SeriesQuestion, SeriesReply
from vitals_collector.queries.open import Reader

LOG_FROM = 20.0
"""Ratio of maximum to minimum from which an axis is logarithmic."""


@dataclass(slots=True)
class PlotColumn:
    """Values of one column of a plot."""

    low: float = math.inf
    high: float = -math.inf
    limit: float = math.inf
    num_nonfinite: int = 0

    def add(self, value: float) -> None:
        """Add a value; non-finite values are counted."""
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.num_nonfinite += 1

    @property
    def has_value(self) -> bool:
        """Whether any value was finite."""
        return self.low <= self.high


class ValueScale:
    """Maps values to an axis, logarithmically if they are positive and span a wide range."""

    def __init__(self, columns: Iterable[PlotColumn]) -> None:
        finite = [column for column in columns if column.has_value]
        self._low = min((c.low for c in finite), default=0.0)
        self._high = max((c.high for c in finite), default=1.0)
        self.is_log = self._low > 0.0 and self._high / LOG_FROM > self._low

    def part(self, value: float) -> float:
        """Return the position of the value on the axis, 0 to 1."""
        low, high = self._at(self._low), self._at(self._high)
        part = (self._at(value) - low) / (high - low) if high > low else 0.5
        return min(max(part, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return the tick values of the axis, in ascending order."""
        if not self.is_log:
            return list(dict.fromkeys((self._low, self._low / 2 + self._high / 2, self._high)))
        return [self._low, math.sqrt(self._low) * math.sqrt(self._high), self._high]

    def _at(self, value: float) -> float:
        # Halve each first, so that the difference of two floats cannot overflow.
        return math.log(max(value, self._low)) if self.is_log else value / 2


# ---------------------------------------------------------------------------------- curves of a run


METRICS = {"steps.loss": "loss", "steps.grad_norm": "gradient norm"}
"""Metrics in the plots, and their labels."""

POINTS = 2_000
"""Points queried per curve, as minimum and maximum of each bucket."""

KINDS = {
    "halt": ("H", "halt"),
    "rollback": ("R", "rollback"),
    "skip_step": ("s", "step skipped"),
    "accept_level": ("a", "new level accepted"),
    "restart": ("e", "hung job ended"),
    "continue": ("c", "reported only"),
    "observed": ("o", "observed, not done"),
}
"""Kinds of marks, the most severe first: their letter and their label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveMark:
    """A decision about a step."""

    step: int
    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedCurve:
    """One metric over a range of steps, with its limit and the discarded steps."""

    name: str
    series: SeriesReply
    limit: SeriesReply | None = None
    discarded: SeriesReply | None = None

    @property
    def span(self) -> tuple[int, int]:
        """First and last step with a value."""
        steps = [*self.series.step, *(mark.step for mark in self.series.nonfinite)]
        if self.discarded is not None:
            steps += self.discarded.step
        return (min(steps), max(steps)) if steps else (0, 0)

    def left_behind(self, num: int) -> list[dict[int, PlotColumn]]:
        """Return the columns of each discarded attempt."""
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
    """Return loss and gradient norm, if they are among the run's ``metrics``."""

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
        except UsageError:  # measured, but only on ranks whose rows are no longer stored
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
    """Return a mark for each decision, at the step it is about."""
    return tuple(
        CurveMark(
            step=view.decision.step,
            kind=view.decision.action if view.decision.acted else "observed",
            words=f"step {view.decision.step}: {view.decision.action}: {view.decision.reason}",
        )
        for view in ledger
    )


def place(step: int, span: tuple[int, int], num: int) -> int:
    """Return the index of a step's column among ``num`` columns."""
    first, last = span
    return (step - first) * (num - 1) // max(1, last - first)


def columns(
    series: SeriesReply, span: tuple[int, int], num: int, attempt: int | None = None
) -> dict[int, PlotColumn]:
    """Return the columns with at least one value, finite or not."""
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
