"""What the GPUs of a run did, or its hosts where no GPU reports: over the time shown."""

import streamlit as st

from vitals_dashboard import charts, words
from vitals_dashboard.views.curves import HALF_POINTS, MAX_SOURCES, STRIP, View

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


def draw(view: View) -> None:
    """Draw the strip, and say what is missing."""
    gpus, nodes = view.sources("gpu"), view.sources("node")
    known = view.detail.metrics
    wanted = [(title, metric) for title, metric in (GPU if gpus else HOST) if metric in known]
    extent = _times(view)
    columns = st.columns(len(wanted)) if wanted else []
    found = view.lines(
        [
            [
                view.wanted(metric, _short(source), source=source, points=HALF_POINTS // 2)
                for source in (gpus or nodes)[:MAX_SOURCES]
            ]
            for _, metric in wanted
        ]
    )
    for column, (title, metric), lines in zip(columns, wanted, found, strict=True):
        if lines:
            spec = charts.time_chart(title, lines, look=view.look, extent=extent, height=STRIP)
            if view.payload.takes(spec):
                key = f"chart_{metric.replace('.', '_')}"
                column.echarts_chart(spec, key=key, height=STRIP, alt=f"{title} over time")
    if notes := _notes(view, gpus, nodes):
        st.caption(" ".join(notes))


def _times(view: View) -> tuple[float, float] | None:
    """Return when the steps shown were trained, in milliseconds; None where all are shown."""
    if view.asked == (None, None):
        return None
    (found,) = view.lines([[view.wanted("steps.loss", "")]])
    times = [time / 1_000_000 for line in found for time in line.reply.time_unix_ns]
    return (min(times), max(times)) if times and max(times) > min(times) else None


def _notes(view: View, gpus: list[str], nodes: list[str]) -> list[str]:
    if not gpus and not nodes:
        return ["Neither a GPU nor a host reports for this run: no agent has seen it."]
    notes = [] if gpus else ["No GPU reports for this run; the host is shown."]
    for found, what in ((view.sources("rank"), "rank"), (gpus, "GPU"), (nodes, "host")):
        if len(found) > MAX_SOURCES and (what != "host" or not gpus):
            notes.append(f"{MAX_SOURCES} of {words.count(len(found), what)} are drawn.")
    return notes


def _short(source: str) -> str:
    kind, _, name = source.partition(":")
    return words.plain(f"{kind} {name}", 24)
