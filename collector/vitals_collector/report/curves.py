"""Curves of a stored run with its decisions, queried once and drawn in any format.

The layout is also computed here: minimum and maximum of each column, and the axis.
"""

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from trainvitals.detect.posttraining.charts import quantity_charts
from trainvitals.errors import UsageError
from trainvitals.judged_log import JudgedStep, LoggedStep, measure_log_cadence
from trainvitals.records import Decision
from trainvitals.views import (
    Branch,
    DecisionView,
    NonFiniteMark,
    RunDetail,
    SeriesQuestion,
    SeriesReply,
)
from vitals_collector.queries.open import Reader

LOG_FROM = 20.0
"""Ratio of maximum to minimum from which an axis is logarithmic."""


class PlotColumn(msgspec.Struct):
    """Values of one column of a plot."""

    low: float = math.inf
    high: float = -math.inf
    num_nonfinite: int = 0

    def add(self, value: float) -> None:
        """Add a value to a column of the plot; non-finite values are counted."""
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.num_nonfinite += 1

    @property
    def has_value(self) -> bool:
        """Return whether the column of the plot has any finite value."""
        return self.low <= self.high


class ValueScale:
    """Maps values to an axis, logarithmically if they are positive and span a wide range."""

    def __init__(self, columns: Iterable[PlotColumn]) -> None:
        finite = [column for column in columns if column.has_value]
        self._low = min((c.low for c in finite), default=0.0)
        self._high = max((c.high for c in finite), default=1.0)
        self.is_log = self._low > 0.0 and self._high / LOG_FROM > self._low

    def part(self, value: float) -> float:
        """Return the position of the value on the axis of a plot in text or SVG, 0 to 1."""
        low, high = self._scaled_value(self._low), self._scaled_value(self._high)
        part = (self._scaled_value(value) - low) / (high - low) if high > low else 0.5
        return min(max(part, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return the tick values on the axis of a plot in text or SVG, in ascending order."""
        if not self.is_log:
            return list(dict.fromkeys((self._low, self._low / 2 + self._high / 2, self._high)))
        return [self._low, math.sqrt(self._low) * math.sqrt(self._high), self._high]

    def _scaled_value(self, value: float) -> float:
        """Return the value as the axis of the plot places it: its logarithm if it is log."""
        # Halve each first, so that the difference of two floats cannot overflow.
        return math.log(max(value, self._low)) if self.is_log else value / 2


# ---------------------------------------------------------------------------------- curves of a run


METRICS = {"steps.loss": "loss", "steps.grad_norm": "gradient norm"}
"""Metrics in the plots, and their labels."""


def plotted_metrics(task: str, metrics: Collection[str]) -> dict[str, str]:
    """Return the metrics to plot for a stored run, with labels; post-training: the loss last.

    Args:
        task: kind of the run; empty: any other run.
        metrics: recorded metrics.
    """
    quantities = {
        metric: name for chart in quantity_charts(task, metrics) for name, metric in chart.lines
    }
    return quantities | dict(reversed(METRICS.items())) if quantities else METRICS


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
    "actionable": ("f", "finding to act on"),
    "advisory": ("i", "advisory finding"),
}
"""Kinds of marks, the most severe first: their letter and their label."""


class CurveMark(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about a step."""

    step: int
    kind: str
    words: str


class PlottedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over a range of steps, with its limit and the discarded steps."""

    name: str
    series: SeriesReply
    limit: SeriesReply | None = None
    discarded: SeriesReply | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Return the first and last step with a value: the ends of the plot."""
        steps = [*self.series.step, *(mark.step for mark in self.series.nonfinite)]
        if self.discarded is not None:
            steps += self.discarded.step
        return (min(steps), max(steps)) if steps else (0, 0)

    def discarded_columns(self, num: int) -> list[dict[int, PlotColumn]]:
        """Return the plot's columns of each discarded attempt."""
        series = self.discarded
        if series is None:
            return []
        branches = sorted({*series.attempt, *(mark.attempt for mark in series.nonfinite)})
        return [plot_columns(series, self.span, num, attempt) for attempt in branches]

    @property
    def is_empty(self) -> bool:
        """Return whether the curve has nothing to plot."""
        return not (self.series.step or self.series.nonfinite)


def curves(
    reader: Reader,
    detail: RunDetail,
    from_step: int | None = None,
    to_step: int | None = None,
) -> tuple[PlottedCurve, ...]:
    """Query the curves of a stored run for plots: loss, gradient norm, post-training."""
    run_id, metrics = detail.summary.run_id, detail.metrics

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
    for metric, name in plotted_metrics(detail.info.task, metrics).items():
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


def decision_marks(ledger: Sequence[DecisionView]) -> tuple[CurveMark, ...]:
    """Return a mark on the plotted curves for each decision, at the step it is about."""
    return tuple(decision_mark(view.decision) for view in ledger)


def decision_mark(decision: Decision) -> CurveMark:
    """Return the mark of a decision on a plot in the terminal or a file."""
    return CurveMark(
        step=decision.step,
        kind=decision.action if decision.acted else "observed",
        words=f"step {decision.step}: {decision.action}: {decision.reason}",
    )


# ---------------------------------------------------------------------------------- curves of a log


def judged_marks(judged_steps: Iterable[JudgedStep]) -> list[CurveMark]:
    """Return the marks on plots of a judged log, in a terminal or file: findings, decisions."""
    curve_marks = []
    for _, _, judgement in judged_steps:
        curve_marks += [
            CurveMark(step=f.step, kind=f.level, words=f"step {f.step}: {f.kind}: {f.reason}")
            for f in judgement.findings
        ]
        if judgement.decision is not None and judgement.decision.action != "continue":
            curve_marks.append(decision_mark(judgement.decision))
    return curve_marks


def judged_curves(judged_steps: Sequence[JudgedStep]) -> list[PlottedCurve]:
    """Return the curves of a judged log for plots: loss and gradient norm, with limits."""
    records = [judged.record for judged in judged_steps]
    steps = [record.step for record in records]
    forks = measure_log_cadence([LoggedStep(row, step) for row, step in enumerate(steps)]).restarts
    losses = [(record.loss, record.loss_limit) for record in records]
    norms = [(record.grad_norm, record.grad_norm_limit) for record in records]
    every = (("loss", losses), ("gradient norm", norms))
    log_curves = [log_curve(name, steps, values, forks) for name, values in every]
    return [curve for curve in log_curves if not curve.is_empty]


def log_curve(
    name: str,
    steps: Sequence[int],
    values: Sequence[tuple[float | None, float | None]],
    forks: Collection[int],
) -> PlottedCurve:
    """Return a log's curve for plots; records that a later attempt overwrote are discarded.

    Args:
        name: label of the curve.
        steps: step of each record, in the order of the log.
        values: value and limit of each record; None: not logged.
        forks: positions of the records at which another attempt starts.
    """
    is_discarded = [False] * len(steps)
    lowest: float = math.inf
    for at in reversed(range(len(steps))):
        is_discarded[at] = steps[at] >= lowest
        if at in forks:
            lowest = min(lowest, steps[at])
    points = list(zip(is_discarded, steps, values, strict=True))
    lineage = [(step, pair) for is_old, step, pair in points if not is_old]
    discarded = [(step, value) for is_old, step, (value, _) in points if is_old]
    limits = [(step, limit) for step, (_, limit) in lineage if limit is not None]
    return PlottedCurve(
        name=name,
        series=_log_series(name, [(step, value) for step, (value, _) in lineage]),
        limit=_log_series(name, limits) if limits else None,
        discarded=_log_series(name, discarded) if discarded else None,
    )


def _log_series(name: str, points: Sequence[tuple[int, float | None]]) -> SeriesReply:
    """Return the values of a log as a series, so that it is plotted like a stored run."""
    logged = [(step, value) for step, value in points if value is not None]
    finite = [(step, value) for step, value in logged if math.isfinite(value)]
    nonfinite = [(step, value) for step, value in logged if not math.isfinite(value)]
    return SeriesReply(
        run_id="",
        metric=name,
        source="",
        unit="",
        branch="lineage",
        num_total=len(logged),
        step=tuple(step for step, _ in finite),
        time_unix_ns=(),
        attempt=(1,) * len(finite),
        value=tuple(value for _, value in finite),
        nonfinite=tuple(
            NonFiniteMark(step, 1, "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf")
            for step, value in nonfinite[:20_000]
        ),
        num_nonfinite=len(nonfinite),
    )


# -------------------------------------------------------------------------------------- columns


def plot_column_index(step: int, span: tuple[int, int], num: int) -> int:
    """Return the index of the column in a plot, of text or SVG, that contains a step."""
    first, last = span
    return (step - first) * (num - 1) // max(1, last - first)


def plot_columns(
    series: SeriesReply, span: tuple[int, int], num: int, attempt: int | None = None
) -> dict[int, PlotColumn]:
    """Return the columns of a plot with at least one value, finite or not."""
    columns_by_place: dict[int, PlotColumn] = {}
    for step, branch, value in zip(series.step, series.attempt, series.value, strict=True):
        if value is not None and attempt in (None, branch) and span[0] <= step <= span[1]:
            columns_by_place.setdefault(plot_column_index(step, span, num), PlotColumn()).add(value)
    for mark in series.nonfinite:
        if attempt in (None, mark.attempt) and span[0] <= mark.step <= span[1]:
            columns_by_place.setdefault(
                plot_column_index(mark.step, span, num), PlotColumn()
            ).num_nonfinite += 1
    return columns_by_place
