"""The curves of one run: which are asked for, and where each is drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import streamlit as st

from trainvitals.views import Branch, DecisionView, RunDetail
from vitals_dashboard import charts, words
from vitals_dashboard.charts import Line
from vitals_dashboard.look import Palette
from vitals_dashboard.source import POINTS, Source, series_or_none

MAX_SOURCES = 8
"""Ranks, GPUs or nodes drawn in one chart; how many there are is said."""
DELTA_STEPS = 100
TALL, LOW = 300, 210


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is to be drawn, and how."""

    source: Source
    detail: RunDetail
    decisions: Sequence[DecisionView]
    look: Palette
    from_step: int | None
    log_loss: bool
    discarded: bool

    @property
    def run_id(self) -> str:
        """The run drawn."""
        return self.detail.summary.run_id

    @property
    def extent(self) -> tuple[int, int]:
        """First and last step: the same in all charts, so that marks stand above each other."""
        return (self.from_step or 0, max(self.detail.summary.last_step, self._furthest()))

    def _furthest(self) -> int:
        if not self.discarded:
            return 0
        return max((a.last_step for a in self.detail.attempts), default=0)

    def line(
        self,
        metric: str,
        name: str,
        *,
        source: str = "",
        role: str = "main",
        branch: Branch = "lineage",
        points: int = POINTS,
    ) -> Iterator[Line]:
        """Yield the series as a line, or nothing where the run has none of it."""
        how = {"source": source, "branch": branch, "points": points}
        if not metric.startswith(("gpu.", "node.")):
            how["from_step"] = self.from_step
        reply = series_or_none(self.source, self.run_id, metric, self.detail.metrics, **how)
        if reply is not None:
            yield Line(name=name, reply=reply, role=role)  # type: ignore[arg-type]

    def with_limit(self, metric: str, name: str) -> list[Line]:
        """Return a run's curve, its limit, and what rollbacks left behind of it."""
        lines = list(self.line(metric, name))
        lines += self.line(f"{metric}_limit", "limit", role="limit")
        if self.discarded and len(self.detail.attempts) > 1:
            lines += self.line(metric, "rolled back", role="discarded", branch="discarded")
        return lines

    def sources(self, kind: str) -> list[str]:
        """Return the distinct sources of a kind, ranks by number."""
        found = {s.source for s in self.detail.sources if s.source.startswith(f"{kind}:")}
        return sorted(found, key=lambda s: (len(s), s) if kind == "rank" else (0, s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValues:
    """The newest value of a few series; None where there is none."""

    loss_delta: float | None
    delta_steps: int
    learning_rate: float | None
    tokens_per_second: float | None
    mfu: float | None


def last_values(source: Source, detail: RunDetail) -> LastValues:
    """Return the newest values that the summary does not hold."""
    start = max(0, detail.summary.last_step - DELTA_STEPS)
    run_id = detail.summary.run_id

    def tail(metric: str) -> list[tuple[int, float]]:
        reply = series_or_none(
            source, run_id, metric, detail.metrics, from_step=start, points=DELTA_STEPS
        )
        if reply is None:
            return []
        pairs = zip(reply.step, reply.value, strict=True)
        return [(step, value) for step, value in pairs if value is not None]

    def newest(metric: str) -> float | None:
        values = tail(metric)
        return values[-1][1] if values else None

    loss = tail("steps.loss")
    return LastValues(
        loss_delta=loss[-1][1] - loss[0][1] if len(loss) > 1 else None,
        delta_steps=loss[-1][0] - loss[0][0] if loss else 0,
        learning_rate=newest("steps.learning_rate"),
        tokens_per_second=newest("steps.tokens_per_second"),
        mfu=newest("steps.mfu_ratio"),
    )


def draw(view: View) -> None:
    """Draw all charts there is something for."""
    loss = view.with_limit("steps.loss", "loss")
    if not loss:
        st.caption("No step has been recorded yet; curves begin with the first one.")
        return
    _steps(view, "Loss", loss, key="loss", height=TALL, log=view.log_loss, legend="marks")
    left, right = st.columns(2)
    with left:
        norm = view.with_limit("steps.grad_norm", "grad norm")
        _steps(view, "Gradient norm (log)", norm, key="grad_norm", log=True)
        _steps(view, "Learning rate", list(view.line("steps.learning_rate", "lr")), key="lr")
        _steps(
            view,
            "Tokens per second",
            list(view.line("steps.tokens_per_second", "tokens/s")),
            key="tokens",
            unitless=True,
        )
    with right:
        _steps(view, "Loss of each rank", _ranks(view, "steps.rank_loss"), key="rank_loss")
        _steps(view, "Step duration", _ranks(view, "steps.step_duration_seconds"), key="duration")
        mfu = list(view.line("steps.mfu_ratio", "MFU"))
        wait = _ranks(view, "steps.data_wait_seconds")
        _steps(view, *(("MFU", mfu) if mfu else ("Wait for data", wait)), key="mfu")
    _machines(view)


def _ranks(view: View, metric: str) -> list[Line]:
    ranks = view.sources("rank")[:MAX_SOURCES]
    points = POINTS if len(ranks) <= 2 else POINTS // 2
    return [
        line
        for rank in ranks
        for line in view.line(metric, rank.replace(":", " "), source=rank, points=points)
    ]


def _steps(
    view: View,
    title: str,
    lines: list[Line],
    *,
    key: str,
    height: int = LOW,
    log: bool = False,
    unitless: bool = False,
    legend: charts.Legend = "lines",
) -> None:
    if not lines:
        return
    spec = charts.step_chart(
        title,
        lines,
        look=view.look,
        decisions=view.decisions,
        extent=view.extent,
        log=log,
        show_unit=not unitless,
        legend=legend,
    )
    st.echarts_chart(spec, key=f"chart_{key}", height=height, alt=f"{title} over steps")


def _machines(view: View) -> None:
    gpus, nodes = view.sources("gpu"), view.sources("node")
    ranks = view.sources("rank")
    notes = [] if gpus else ["No GPU reports for this run; the host is shown."]
    if len(ranks) > MAX_SOURCES:
        notes.append(f"{MAX_SOURCES} of {len(ranks):,} ranks are drawn.")
    if gpus:
        wanted: tuple[tuple[str, str], ...] = (
            ("GPU utilization", "gpu.utilization_ratio"),
            ("GPU memory", "gpu.memory_used_bytes"),
            ("GPU power", "gpu.power_watts"),
            ("GPU temperature", "gpu.temperature_celsius"),
        )
    else:
        wanted = (("Host CPU", "node.cpu_ratio"), ("Host memory", "node.memory_used_bytes"))
    if not gpus and not nodes:
        notes = ["Neither a GPU nor a host reports for this run: no agent has seen it."]
    columns = st.columns(2)
    for i, (title, metric) in enumerate(wanted):
        lines = [
            line
            for source in (gpus or nodes)[:MAX_SOURCES]
            for line in view.line(metric, _short(source), source=source, points=POINTS // 2)
        ]
        if lines:
            spec = charts.time_chart(title, lines, look=view.look)
            with columns[i % 2]:
                key = f"chart_{metric.replace('.', '_')}"
                st.echarts_chart(spec, key=key, height=LOW, alt=f"{title} over time")
    if notes:
        st.caption(" ".join(notes))


def _short(source: str) -> str:
    kind, _, name = source.partition(":")
    return words.plain(f"{kind} {name}", 24)
