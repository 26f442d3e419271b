"""GPU metrics of a run, or host metrics if no GPU reports, over the visible time."""

from collections.abc import Sequence

from vitals_dashboard import charts, formatting
from vitals_dashboard.charts import ChartLine
from vitals_dashboard.source import series_of
from vitals_dashboard.views.curves import HALF_POINTS, MAX_SOURCES, ChartContext, Span

GPU: tuple[tuple[str, str], ...] = (
    ("GPU utilization", "gpu.utilization_ratio"),
    ("GPU memory", "gpu.memory_used_bytes"),
    ("GPU power", "gpu.power_watts"),
    ("GPU temperature", "gpu.temperature_celsius"),
)
HOST: tuple[tuple[str, str], ...] = (
    ("Host CPU", "node.cpu_ratio"),
    ("Host memory", "node.memory_used_bytes"),
)

POINTS = HALF_POINTS // 2
"""Points of a chart of quarter width."""
NUM_ENDS = 4
"""Points requested if only the first and the last one are needed."""
MIN_SPAN_NS = 60_000_000_000
"""Minimum duration shown of samples taken every few seconds, even with few steps."""


def build_machine_charts(
    view: ChartContext, loss: Sequence[ChartLine] = ()
) -> tuple[list[charts.Chart], str]:
    """Build the run page's charts of GPUs or hosts, and the note on missing data.

    ``loss`` has the curves with the times of the visible steps.
    """
    gpus, nodes = view.sources("gpu"), view.sources("node")
    metrics = view.detail.metrics
    shown_metrics = [
        (title, metric) for title, metric in (GPU if gpus else HOST) if metric in metrics
    ]
    times = None if view.requested_range == (None, None) else times_of(view, loss)
    extent = None if times is None else (times[0] / 1_000_000, times[1] / 1_000_000)
    by_metric = view.query_lines(
        [
            [
                view.choose_curve(
                    metric,
                    formatting.plain(source.replace(":", " ", 1), 24),
                    source=source,
                    points=POINTS,
                    times=times,
                )
                for source in (gpus or nodes)[:MAX_SOURCES]
            ]
            for _, metric in shown_metrics
        ]
    )
    strip = [
        charts.time_chart(title, lines, extent=extent, size="quarter" if gpus else "half")
        for (title, _), lines in zip(shown_metrics, by_metric, strict=True)
        if lines
    ]
    notes = _machine_notes(view, gpus, nodes)
    if times is not None and shown_metrics and not strip:
        what = "a GPU" if gpus else "the host"
        notes.append(f"No sample of {what} was taken during these steps.")
    if times is not None and any(line.role == "discarded" for line in loss):
        notes.append(
            "Some of these steps were trained more than once: the time axis spans all attempts, or"
            " the last one only where rolled-back branches are off."
        )
    return strip, " ".join(notes)


def times_of(view: ChartContext, loss: Sequence[ChartLine]) -> Span | None:
    """Return when the steps visible on the run page were trained; None if there are none."""
    ends = view.choose_curve("steps.loss", "", points=NUM_ENDS).request
    (reply,) = series_of(view.source, view.detail, [ends])
    replies = [line.reply for line in loss if line.role == "discarded"]
    replies += [] if reply is None else [reply]
    times = [time for each in replies for time in each.time_unix_ns]
    if not times:
        return None
    first, last = min(times), max(times)
    missing = max(0, MIN_SPAN_NS - (last - first)) // 2
    return first - missing, last + missing


def _machine_notes(view: ChartContext, gpus: list[str], nodes: list[str]) -> list[str]:
    """Return the run page's notes on GPUs and hosts that do not report or are not drawn."""
    if not gpus and not nodes:
        return ["No GPU or host reports for this run."]
    notes = [] if gpus else ["No GPU reports for this run; the host is shown."]
    for sources, what in ((view.sources("rank"), "rank"), (gpus, "GPU"), (nodes, "host")):
        if len(sources) > MAX_SOURCES and (what != "host" or not gpus):
            notes.append(f"{MAX_SOURCES} of {formatting.count(len(sources), what)} are drawn.")
    return notes
