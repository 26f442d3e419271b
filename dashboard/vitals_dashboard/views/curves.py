"""The curves of one run: which are asked for, and where each is drawn."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import streamlit as st
from msgspec import structs

from trainvitals.views import RunDetail, SeriesReply, SeriesRequest
from vitals_dashboard import charts, formatting
from vitals_dashboard.charts import STEPS, ChartMark, Line, Role, Scale
from vitals_dashboard.source import POINTS, Source, last_value, series_of
from vitals_dashboard.theme import Palette
from vitals_dashboard.views.controls import Controls, zoom_to

MAX_SOURCES = 8
"""Ranks, GPUs or nodes drawn in one chart; how many there are is said."""
MAX_POINTS = 60_000
"""Points a refresh may carry to the browser; beyond it whole charts are left out, and counted."""
HALF_POINTS = POINTS // 2
"""Of a chart that is half as wide."""
MAX_OWN = 8
"""Metrics of one's own in one view."""
ROLLED_BACK = "rolled back"
DELTA_STEPS = 100
TALL, LOW, STRIP = 330, 220, 170

SPLIT: tuple[tuple[str, str], ...] = (
    ("steps.step_duration_seconds", "whole"),
    ("steps.data_wait_seconds", "data"),
    ("steps.forward_backward_seconds", "compute"),
    ("steps.checkpoint_seconds", "checkpoint"),
    ("steps.optimizer_seconds", "optimizer"),
    ("steps.communication_seconds", "exchange"),
    ("steps.monitor_seconds", "Vitals"),
)

DRAWN = frozenset(
    {metric for metric, _ in SPLIT}
    | {
        f"steps.{name}"
        for name in (
            *("loss", "loss_limit", "grad_norm", "grad_norm_limit", "grad_norm_clipped"),
            *("learning_rate", "tokens_per_second", "mfu_ratio", "rank_loss", "loss_scale"),
        )
    }
)
"""Metrics that have a chart without being asked for."""


@dataclass(slots=True, kw_only=True)
class Payload:
    """What one refresh carries to the browser."""

    num_points: int = 0
    num_left_out: int = 0
    """Charts not drawn because it was full."""

    def takes(self, spec: charts.Spec) -> bool:
        """Count a chart in, if it still fits."""
        more = charts.num_points(spec)
        if self.num_points + more > MAX_POINTS:
            self.num_left_out += 1
            return False
        self.num_points += more
        return True

    def words(self) -> str:
        """Say how many charts did not fit."""
        left_out = formatting.count(self.num_left_out, "chart")
        return f"{left_out} did not fit (at most {MAX_POINTS:,} points): choose fewer metrics."


Span = tuple[int, int]
"""The first and the last moment of something, in nanoseconds since 1970."""


class CurveChoice(NamedTuple):
    """A curve that is asked for, and what it is called in its chart."""

    name: str
    request: SeriesRequest
    role: Role = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is to be drawn, and how."""

    source: Source
    detail: RunDetail
    controls: Controls
    look: Palette
    decisions: Sequence[ChartMark] = ()
    """Drawn in every chart."""
    others: Sequence[ChartMark] = ()
    """Drawn with the loss only: alerts, notes, checkpoints."""
    scale: Scale = STEPS
    payload: Payload = field(default_factory=Payload)
    drawn_to: int = 0
    """The last step of any curve: an evaluation may come after the run's last one."""

    @property
    def run_id(self) -> str:
        """The run drawn."""
        return self.detail.summary.run_id

    @property
    def attempts(self) -> dict[int, int]:
        """The numbers of the attempts by their ids; nothing where there is only one."""
        ordinals = {attempt.id: attempt.ordinal for attempt in self.detail.attempts}
        return ordinals if len(ordinals) > 1 else {}

    @property
    def asked(self) -> tuple[int | None, int | None]:
        """The first and last step that are asked for."""
        return self.controls.extent(self.detail.summary.last_step)

    @property
    def extent(self) -> tuple[int, int]:
        """First and last step: the same in all charts, so that marks stand above each other."""
        first, last = self.asked
        ends = (self.detail.summary.last_step, self._furthest(), self.drawn_to)
        end = max(ends) if last is None else last
        return (first or 0, max(end, 0))

    def _furthest(self) -> int:
        if not self.controls.discarded:
            return 0
        return max((a.last_step for a in self.detail.attempts), default=0)

    def wanted(
        self,
        metric: str,
        name: str,
        *,
        source: str = "",
        role: Role = "main",
        points: int = HALF_POINTS,
        times: Span | None = None,
    ) -> CurveChoice:
        """Return a curve of the steps that are asked for, or of GPUs and nodes of these times."""
        has_steps = not metric.startswith(("gpu.", "node."))
        first, last = self.asked if has_steps else (None, None)
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
        """Return a run's curve, its limit, and what rollbacks left behind of it."""
        curves = [self.wanted(metric, name, points=points)]
        if clipped:
            curves.append(self.wanted(clipped, "clipped", points=points))
        curves.append(self.wanted(f"{metric}_limit", "limit", role="limit", points=points))
        return [*curves, *self.left_behind(curves[:1])]

    def both(self, metric: str, name: str) -> list[CurveChoice]:
        """Return a curve and what rollbacks left behind of it."""
        curves = [self.wanted(metric, name)]
        return [*curves, *self.left_behind(curves)]

    def left_behind(self, curves: Sequence[CurveChoice]) -> list[CurveChoice]:
        """Return what rollbacks left behind of curves; what has no steps has no branches."""
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

    def with_means(self, chart: "Chart") -> list[CurveChoice]:
        """Return a chart's curves, and their means over every value where smoothing is chosen."""
        weight = 0.0 if chart.exact else self.controls.smoothing
        means = [
            CurveChoice(f"{name}, smoothed", structs.replace(request, smoothing=weight), "mean")
            for name, request, role in chart.curves
            if weight and role == "main"
        ]
        return [*chart.curves, *means]

    def lines(self, by_chart: Sequence[Sequence[CurveChoice]]) -> list[list[Line]]:
        """Return the lines of each chart, all asked for at once; what the run lacks is left out."""
        every = [curve for chart in by_chart for curve in chart]
        replies = iter(series_of(self.source, self.detail, [curve.request for curve in every]))
        return [
            [
                Line(name=curve.name, reply=reply, role=curve.role)
                for curve, reply in zip(chart, replies, strict=False)
                if reply is not None
            ]
            for chart in by_chart
        ]

    def sources(self, kind: str) -> list[str]:
        """Return the distinct sources of a kind, ranks by number."""
        names = {s.source for s in self.detail.sources if s.source.startswith(f"{kind}:")}
        return sorted(names, key=lambda s: (len(s), s) if kind == "rank" else (0, s))


def scale_of(view: View) -> Scale | None:
    """Return where steps stand along x; None where the run has not what that needs."""
    if view.controls.axis == "step":
        return STEPS
    metric = "steps.loss" if view.controls.axis == "time" else "steps.tokens_seen"
    for line in view.lines([[view.wanted(metric, "")]])[0]:
        make = charts.time_scale if view.controls.axis == "time" else charts.token_scale
        scale = make(line.reply)
        return scale if scale.steps else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValues:
    """The newest value of a few series; None where there is none."""

    loss_delta: float | None
    """None too where the last loss is not finite: nothing fell or rose to it."""
    delta_steps: int
    learning_rate: float | None
    tokens_per_second: float | None
    mfu: float | None


def last_values(source: Source, detail: RunDetail) -> LastValues:
    """Return the newest values that the summary does not hold."""
    start = max(0, detail.summary.last_step - DELTA_STEPS)

    requests = [
        SeriesRequest(metric=f"steps.{name}", from_step=start, points=DELTA_STEPS)
        for name in ("loss", "learning_rate", "tokens_per_second", "mfu_ratio")
    ]
    of_loss, *others = series_of(source, detail, requests)
    loss = _finite(of_loss)
    learning_rate, tokens, mfu = (last_value(reply) for reply in others)
    is_finite = math.isfinite(detail.summary.loss or 0.0)
    return LastValues(
        loss_delta=loss[-1][1] - loss[0][1] if len(loss) > 1 and is_finite else None,
        delta_steps=loss[-1][0] - loss[0][0] if loss else 0,
        learning_rate=learning_rate,
        tokens_per_second=tokens,
        mfu=mfu,
    )


def _finite(reply: SeriesReply | None) -> list[tuple[int, float]]:
    if reply is None:
        return []
    pairs = zip(reply.step, reply.value, strict=True)
    return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page: what is drawn in it and how."""

    key: str
    title: str
    curves: Sequence[CurveChoice]
    log: bool = False
    unitless: bool = False
    exact: bool = False
    """Steps of its own are what is to be seen: never smoothed."""
    least: int = 1
    """Lines of the run's own without which there is nothing to see."""


def draw(view: View, own: Sequence[str] = ()) -> list[Line]:
    """Draw all charts there is something for, and return the lines of the loss.

    Args:
        view: of what, and how.
        own: metrics that were asked for.
    """
    loss = view.with_limit("steps.loss", "loss", points=POINTS)
    main = Chart(key="loss", title="Loss", curves=loss, log=view.controls.log_loss)
    below = list(_charts(view, own))
    of_main, *others = view.lines([view.with_means(chart) for chart in (main, *below)])
    if not of_main:
        st.caption(_nothing(view))
        return []
    ends = (
        line.reply.step[-1] for chart_lines in others for line in chart_lines if line.reply.step
    )
    view = replace(view, drawn_to=max(ends, default=0))
    _main_chart(view, main, of_main)
    drawn = [
        (chart, lines)
        for chart, lines in zip(below, others, strict=True)
        if sum(line.role == "main" for line in lines) >= chart.least
    ]
    for i in range(0, len(drawn), 2):
        for column, (chart, lines) in zip(st.columns(2), drawn[i : i + 2], strict=False):
            with column:
                _chart(view, chart, lines)
    return of_main


def _charts(view: View, own: Sequence[str]) -> Iterator[Chart]:
    """Yield the charts under the loss, two of them beside each other."""
    norm = view.with_limit("steps.grad_norm", "raw", clipped="steps.grad_norm_clipped")
    yield Chart(key="grad_norm", title="Gradient norm (log)", curves=norm, log=True)
    rate = view.both("steps.learning_rate", "lr")
    yield Chart(key="lr", title="Learning rate", curves=rate, exact=True)
    tokens = view.both("steps.tokens_per_second", "tokens/s")
    yield Chart(key="tokens", title="Tokens per second", curves=tokens, unitless=True)
    yield Chart(key="mfu", title="MFU", curves=view.both("steps.mfu_ratio", "MFU"))
    split = [view.wanted(metric, name) for metric, name in SPLIT]
    split += view.left_behind(split)
    yield Chart(key="split", title="Step time, rank 0 (log)", curves=split, log=True, least=2)
    duration = _ranks(view, "steps.step_duration_seconds")
    yield Chart(key="duration", title="Step duration of each rank", curves=duration)
    yield Chart(key="rank_loss", title="Loss of each rank", curves=_ranks(view, "steps.rank_loss"))
    scale = view.both("steps.loss_scale", "loss scale")
    yield Chart(key="scale", title="Loss scale (log)", curves=scale, log=True, exact=True)
    for i, metric in enumerate(own):
        name = metric.removeprefix("scalars.")
        yield Chart(key=f"own_{i}", title=name, curves=view.both(metric, name))


def stands_still(view: View) -> bool:
    """Whether a refresh leaves the curves as they are, so that a range can be dragged on them."""
    return not view.controls.live or view.detail.summary.state != "running"


def _nothing(view: View) -> str:
    if view.asked == (None, None) or view.detail.summary.last_step < 0:
        return "No step has been recorded yet."
    first, last = view.extent
    return (
        f"No step of this run is between {first:,} and {last:,};"
        f" its last one is {view.detail.summary.last_step:,}."
    )


def _ranks(view: View, metric: str) -> list[CurveChoice]:
    ranks = view.sources("rank")[:MAX_SOURCES]
    points = HALF_POINTS if len(ranks) <= 2 else HALF_POINTS // 2
    curves = [
        view.wanted(metric, rank.replace(":", " "), source=rank, points=points) for rank in ranks
    ]
    return [*curves, *view.left_behind(curves)]


def _chart(view: View, chart: Chart, lines: Sequence[Line]) -> None:
    spec = charts.step_chart(
        chart.title,
        lines,
        look=view.look,
        others=view.decisions,
        attempts=view.attempts,
        extent=view.extent,
        log=chart.log,
        show_unit=not chart.unitless,
        scale=view.scale,
        height=LOW,
    )
    if view.payload.takes(spec):
        alt = f"{formatting.plain(chart.title, 60)} over {view.scale.unit}"
        st.echarts_chart(spec, key=f"chart_{chart.key}", height=LOW, alt=alt)


def _main_chart(view: View, chart: Chart, lines: Sequence[Line]) -> None:
    """Draw the loss with all that happened; a range can be dragged on it where it stands still."""
    spec = charts.step_chart(
        chart.title,
        lines,
        look=view.look,
        others=[*view.decisions, *view.others],
        attempts=view.attempts,
        extent=view.extent,
        log=chart.log,
        legend="marks",
        scale=view.scale,
        zoom=stands_still(view),
        height=TALL,
    )
    alt = f"{chart.title} over {view.scale.unit}"
    if not view.payload.takes(spec):
        return
    if stands_still(view):
        _zoomable(view, spec, TALL, alt)
    else:
        st.echarts_chart(spec, key=f"chart_{chart.key}", height=TALL, alt=alt)


def _zoomable(view: View, spec: charts.Spec, height: int, alt: str) -> None:
    """Draw a chart on which a range can be dragged; each range has a chart of its own."""
    key = "chart_loss_{}_{}_{}".format(*view.extent, view.scale.axis)

    def zoomed() -> None:
        areas = st.session_state[key].selection.areas
        if areas:
            first, last = sorted(areas[-1]["coord_range"])
            zoom_to(view.scale.step_at(first), view.scale.step_at(last))

    st.echarts_chart(spec, key=key, height=height, alt=alt, on_select=zoomed)
