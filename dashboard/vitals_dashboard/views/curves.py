"""The curves of one run: which ones are queried, and in which chart each is drawn."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from trainvitals.detect.posttraining.charts import QuantityChart, quantity_charts
from trainvitals.views import RunDetail, SeriesReply, SeriesRequest
from vitals_dashboard import charts
from vitals_dashboard.charts import STEPS, ChartLine, ChartMark, Role, StepScale
from vitals_dashboard.feed import ChartFeed
from vitals_dashboard.source import POINTS, DataSource, last_value, series_of
from vitals_dashboard.views.controls import ChartControls

MAX_SOURCES = 8
"""Ranks, GPUs or nodes drawn in one chart; their number is shown."""
HALF_POINTS = POINTS // 2
"""Points of a chart of half width."""
MAX_OWN = 8
"""User metrics in one view."""
ROLLED_BACK = "rolled back"
DELTA_STEPS = 100
TALL = 280
"""Pixels of the first chart's curves."""

SPLIT: tuple[tuple[str, str, Role], ...] = (
    ("steps.monitor_seconds", "Vitals", "part"),
    ("steps.communication_seconds", "exchange", "part"),
    ("steps.optimizer_seconds", "optimizer", "part"),
    ("steps.data_wait_seconds", "data", "part"),
    ("steps.forward_backward_seconds", "compute", "part"),
    ("steps.step_duration_seconds", "whole", "main"),
)
"""Parts that every step has, from the top, and the whole step. Checkpoints are in few steps: they
are between the parts and the whole."""
SPLIT_STEPS = 100_000
"""Last steps of the range whose parts are drawn: a mean needs every value."""

DRAWN = frozenset(
    {metric for metric, _, _ in SPLIT}
    | {
        f"steps.{name}"
        for name in (
            *("loss", "loss_limit", "grad_norm", "grad_norm_limit", "grad_norm_clipped"),
            "auto_max_norm",
            *("learning_rate", "tokens_per_second", "mfu_ratio", "rank_loss", "loss_scale"),
        )
    }
)
"""Metrics with a chart by default."""


Span = tuple[int, int]
"""Start and end time, in nanoseconds since 1970."""


class CurveChoice(NamedTuple):
    """A curve to query, and its name in the chart."""

    name: str
    request: SeriesRequest
    role: Role = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartContext:
    """Subject and options of a page's charts."""

    source: DataSource
    detail: RunDetail
    controls: ChartControls
    decisions: Sequence[ChartMark] = ()
    """Drawn in every chart."""
    others: Sequence[ChartMark] = ()
    """Drawn with the loss only: alerts, notes, checkpoints."""
    scale: StepScale = STEPS
    feed: ChartFeed = field(default_factory=ChartFeed)
    """Points in the browser: only new ones are queried."""

    @property
    def run_id(self) -> str:
        """Return the id of the run that the page draws."""
        return self.detail.summary.run_id

    @property
    def attempts(self) -> dict[int, int]:
        """Return the attempts' numbers for the run page by id; empty if there is only one."""
        ordinals = {attempt.id: attempt.ordinal for attempt in self.detail.attempts}
        return ordinals if len(ordinals) > 1 else {}

    @property
    def requested_range(self) -> tuple[int | None, int | None]:
        """Return the first and last step that the user selected on the run page."""
        return self.controls.extent(self.detail.summary.last_step)

    @property
    def extent(self) -> tuple[int, int]:
        """First and last step: the same in all charts, so that marks are aligned."""
        first, last = self.requested_range
        # An evaluation may come after the run's last step.
        ends = (self.detail.summary.last_step, self._last_discarded_step(), self.feed.last_step)
        end = max(ends) if last is None else last
        return (first or 0, max(end, 0))

    def _last_discarded_step(self) -> int:
        """Return the last step of rolled-back attempts, if the run page shows them."""
        if not self.controls.discarded:
            return 0
        return max((a.last_step for a in self.detail.attempts), default=0)

    def choose_curve(
        self,
        metric: str,
        name: str,
        *,
        source: str = "",
        role: Role = "main",
        points: int = HALF_POINTS,
        times: Span | None = None,
    ) -> CurveChoice:
        """Select a curve for the run page: the chosen steps, or GPUs and nodes by time."""
        has_steps = not metric.startswith(("gpu.", "node."))
        first, last = self.requested_range if has_steps else (None, None)
        request = SeriesRequest(
            metric=metric,
            source=source,
            branch="discarded" if role == "discarded" else "lineage",
            points=points,
            from_step=first,
            to_step=last,
            from_time_unix_ns=None if times is None else times[0],
            to_time_unix_ns=None if times is None else times[1],
        )
        return CurveChoice(name, request, role)

    def with_limit(
        self, metric: str, name: str, *, clipped: str = "", points: int = HALF_POINTS
    ) -> list[CurveChoice]:
        """Select a curve for the run page with its limit and its discarded parts."""
        curves = [self.choose_curve(metric, name, points=points)]
        if clipped:
            curves.append(self.choose_curve(clipped, "clipped", points=points))
        curves.append(self.choose_curve(f"{metric}_limit", "limit", role="limit", points=points))
        return [*curves, *self.discarded_curves(curves[:1])]

    def with_discarded_parts(self, metric: str, name: str) -> list[CurveChoice]:
        """Select a curve for the run page with its discarded parts."""
        curves = [self.choose_curve(metric, name)]
        return [*curves, *self.discarded_curves(curves)]

    def discarded_curves(self, curves: Sequence[CurveChoice]) -> list[CurveChoice]:
        """Select the discarded parts of curves on the run page; without steps there are none."""
        if not self.controls.discarded or len(self.detail.attempts) < 2:
            return []
        named = f"{{}}, {ROLLED_BACK}" if len(curves) > 1 else ROLLED_BACK
        return [
            CurveChoice(
                named.format(name), structs.replace(request, branch="discarded"), "discarded"
            )
            for name, request, _ in curves
            if not request.metric.startswith(("gpu.", "node.", "process."))
        ]

    def with_means(self, chart: "ChartSpec") -> list[CurveChoice]:
        """Return a chart's curves for the run page, and their means if smoothing is on."""
        weight = 0.0 if chart.exact else self.controls.smoothing
        means = [
            CurveChoice(f"{name}, smoothed", structs.replace(request, smoothing=weight), "mean")
            for name, request, role in chart.curves
            if weight and role == "main" and not request.mean
        ]
        return [*chart.curves, *means]

    def query_lines(self, by_chart: Sequence[Sequence[CurveChoice]]) -> list[list[ChartLine]]:
        """Query the lines of all charts on the run page together; missing ones are omitted."""
        every = [curve for chart in by_chart for curve in chart]
        lines = iter(self.feed.query_lines(self.source, self.detail, every))
        return [
            [line for _, line in zip(chart, lines, strict=False) if line is not None]
            for chart in by_chart
        ]

    def sources(self, kind: str) -> list[str]:
        """Return the sources of a kind that the run page draws, ranks by number."""
        names = {s.source for s in self.detail.sources if s.source.startswith(f"{kind}:")}
        return sorted(names, key=lambda s: (len(s), s) if kind == "rank" else (0, s))


def query_step_scale(view: ChartContext) -> StepScale | None:
    """Query the x-axis that the user chose on the run page; None if the run lacks the data."""
    if view.controls.axis == "step":
        return STEPS
    metric = "steps.loss" if view.controls.axis == "time" else "steps.tokens_seen"
    for line in view.query_lines([[view.choose_curve(metric, "")]])[0]:
        make = charts.time_scale if view.controls.axis == "time" else charts.token_scale
        scale = make(line.reply)
        return scale if scale.steps else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValues:
    """The latest value of a few series; None if there is none."""

    loss_delta: float | None
    """None too if the last loss is non-finite: there is no difference."""
    delta_steps: int
    learning_rate: float | None
    tokens_per_second: float | None
    mfu: float | None
    quantities: tuple[tuple[str, float | None], ...] = ()
    """Names and values of a post-training run's quantities."""


def charts_of_task(detail: RunDetail) -> tuple[QuantityChart, ...]:
    """Return the charts that the run page draws before the loss of a post-training run."""
    return quantity_charts(detail.info.task, detail.metrics)


def last_values(source: DataSource, detail: RunDetail) -> LastValues:
    """Query the latest values that the run page shows in addition to the summary."""
    last = max(0, detail.summary.last_step)
    start = max(0, last - DELTA_STEPS)
    of_task = charts_of_task(detail)
    metrics = [
        f"steps.{name}" for name in ("loss", "learning_rate", "tokens_per_second", "mfu_ratio")
    ]
    requests = [
        # With both ends the span is known to be short, and no overview of the run is read.
        SeriesRequest(metric=metric, from_step=start, to_step=last, points=DELTA_STEPS)
        for metric in (*metrics, *(chart.metric for chart in of_task))
    ]
    of_loss, *others = series_of(source, detail, requests)
    loss = _finite_points(of_loss)
    learning_rate, tokens, mfu, *quantities = (last_value(reply) for reply in others)
    is_finite = math.isfinite(detail.summary.loss or 0.0)
    return LastValues(
        loss_delta=loss[-1][1] - loss[0][1] if len(loss) > 1 and is_finite else None,
        delta_steps=loss[-1][0] - loss[0][0] if loss else 0,
        learning_rate=learning_rate,
        tokens_per_second=tokens,
        mfu=mfu,
        quantities=tuple(zip((chart.title for chart in of_task), quantities, strict=True)),
    )


def _finite_points(reply: SeriesReply | None) -> list[tuple[int, float]]:
    if reply is None:
        return []
    pairs = zip(reply.step, reply.value, strict=True)
    return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """One chart below the loss: its curves and options."""

    title: str
    curves: Sequence[CurveChoice]
    log: bool = False
    unitless: bool = False
    exact: bool = False
    """Single steps matter: never smoothed."""
    note: str = ""
    least: int = 1
    """Number of the run's lines that are needed for the chart."""


def build_charts(
    view: ChartContext, extra_metrics: Sequence[str] = ()
) -> tuple[list[charts.Chart], list[ChartLine]]:
    """Build all charts of the run page that have data; also return the lines of the loss.

    The loss is the first one. In a post-training run it says little: its quantities come first, and
    the loss is the last one.
    """
    of_task = list(_quantity_specs(view))
    curves = view.with_limit("steps.loss", "loss", points=HALF_POINTS if of_task else POINTS)
    loss = ChartSpec(title="Loss", curves=curves, log=view.controls.log_loss, least=0)
    below = list(_chart_specs(view, extra_metrics))
    specs = [*of_task, *below, loss] if of_task else [loss, *below]
    by_chart = view.query_lines([view.with_means(chart) for chart in specs])
    with_lines = [
        (chart, lines)
        for chart, lines in zip(specs, by_chart, strict=True)
        if lines and sum(line.role in ("main", "part") for line in lines) >= chart.least
    ]
    of_loss = by_chart[-1 if of_task else 0]
    everything = [*view.decisions, *view.others]
    # A loop may report no loss: then the first available chart comes first.
    drawn = [_build_chart(view, *each, everything, height=TALL) for each in with_lines[:1]]
    drawn += [_build_chart(view, *each, view.decisions, size="half") for each in with_lines[1:]]
    return drawn, of_loss


def _quantity_specs(view: ChartContext) -> Iterator[ChartSpec]:
    """Yield the charts of a post-training run's quantities, which the run page draws first."""
    for number, chart in enumerate(charts_of_task(view.detail)):
        points = HALF_POINTS if number else POINTS
        curves = [view.choose_curve(metric, name, points=points) for name, metric in chart.lines]
        yield ChartSpec(title=chart.title, curves=[*curves, *view.discarded_curves(curves)])


def _chart_specs(view: ChartContext, extra_metrics: Sequence[str]) -> Iterator[ChartSpec]:
    """Yield the charts that the run page draws below the loss, two per row."""
    norm = view.with_limit("steps.grad_norm", "raw", clipped="steps.grad_norm_clipped")
    norm.append(view.choose_curve("steps.auto_max_norm", "auto clip", role="limit"))
    yield ChartSpec(title="Gradient norm (log)", curves=norm, log=True)
    rate = view.with_discarded_parts("steps.learning_rate", "lr")
    yield ChartSpec(title="Learning rate", curves=rate, exact=True)
    tokens = view.with_discarded_parts("steps.tokens_per_second", "tokens/s")
    yield ChartSpec(title="Tokens per second", curves=tokens, unitless=True)
    yield ChartSpec(title="MFU", curves=view.with_discarded_parts("steps.mfu_ratio", "MFU"))
    yield ChartSpec(
        title="Step time, rank 0",
        curves=list(_step_time_curves(view)),
        note="above the parts: checkpoints and unmeasured time",
        least=2,
    )
    duration = _rank_curves(view, "steps.step_duration_seconds")
    yield ChartSpec(title="Step duration of each rank", curves=duration)
    yield ChartSpec(title="Loss of each rank", curves=_rank_curves(view, "steps.rank_loss"))
    scale = view.with_discarded_parts("steps.loss_scale", "loss scale")
    yield ChartSpec(title="Loss scale (log)", curves=scale, log=True, exact=True)
    for metric in extra_metrics:
        name = metric.removeprefix("scalars.")
        yield ChartSpec(title=name, curves=view.with_discarded_parts(metric, name))


def _step_time_curves(view: ChartContext) -> Iterator[CurveChoice]:
    """Yield the parts of the run page's step time as means, which add up, and the whole step."""
    first, last = view.requested_range
    end = view.detail.summary.last_step if last is None else last
    first = max(first or 0, end - SPLIT_STEPS) or first
    for metric, name, role in SPLIT:
        request = view.choose_curve(metric, name, points=POINTS).request
        yield CurveChoice(name, structs.replace(request, mean=True, from_step=first), role)


def no_curve_reason(view: ChartContext) -> str:
    """Return the sentence that the run page shows if it has no curve to draw."""
    if view.detail.summary.last_step < 0:
        return "No step has been recorded yet."
    if view.requested_range == (None, None):
        return "No metric of this run's steps is stored."
    first, last = view.extent
    return (
        f"No step of this run is between {first:,} and {last:,};"
        f" its last one is {view.detail.summary.last_step:,}."
    )


def _rank_curves(view: ChartContext, metric: str) -> list[CurveChoice]:
    """Select the curves of each rank for a chart on the run page."""
    ranks = view.sources("rank")[:MAX_SOURCES]
    points = HALF_POINTS if len(ranks) <= 2 else HALF_POINTS // 2
    curves = [
        view.choose_curve(metric, rank.replace(":", " "), source=rank, points=points)
        for rank in ranks
    ]
    return [*curves, *view.discarded_curves(curves)]


def _build_chart(
    view: ChartContext,
    chart: ChartSpec,
    lines: Sequence[ChartLine],
    marks: Sequence[ChartMark],
    **size: Any,
) -> charts.Chart:
    """Build one chart of the run page from its curves, marks and options."""
    return charts.step_chart(
        chart.title,
        lines,
        others=marks,
        attempts=view.attempts,
        extent=view.extent,
        log=chart.log,
        exact=chart.exact,
        note=chart.note,
        show_unit=not chart.unitless,
        scale=view.scale,
        **size,
    )
