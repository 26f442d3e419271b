"""Differences between runs, as rows of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trainvitals.views import RunDetail, SeriesReply, SeriesRequest
from vitals_dashboard import formatting
from vitals_dashboard.source import POINTS, DataSource, forecast_of, last_value, series_of
from vitals_dashboard.tables import Row

NAME = 40
HEADS = ("Value", "Setting")
"""Headings of the key columns: no run may have these names."""
_NO_STEPS = ("gpu.", "node.", "process.")
_SHOWN = ("steps.loss", "steps.grad_norm", "steps.learning_rate", "steps.tokens_per_second")
_NOT_SET = frozenset({"name", "config", "judge", "run_dir"})
"""Attributes without a row: the name is the column's heading, config and judge have separate
rows."""


def has_steps(metric: str) -> bool:
    """Return whether the dashboard can draw a metric over steps, to compare runs by it."""
    return not metric.startswith(_NO_STEPS)


def distinct_names(details: Sequence[RunDetail]) -> list[str]:
    """Return a unique name for each run compared on the dashboard; equal ones get id ends."""
    names = [formatting.run_label(d.summary.name, d.summary.run_id, NAME) for d in details]
    return [
        name
        if names.count(name) == 1 and name not in HEADS
        else f"{name[: NAME - 10]} ({d.summary.run_id[-6:]})"
        for name, d in zip(names, details, strict=True)
    ]


def config_rows(details: Sequence[RunDetail], names: Sequence[str]) -> list[Row]:
    """Return the dashboard's table of settings that differ between the compared runs."""
    settings = [_flat_settings(detail) for detail in details]
    rows = []
    for key in dict.fromkeys(key for of_run in settings for key in of_run):
        values = [_format_value(of_run[key]) if key in of_run else "" for of_run in settings]
        if len(set(values)) > 1:
            rows.append(
                {"Setting": formatting.plain(key, 80), **dict(zip(names, values, strict=True))}
            )
    return rows


def _flat_settings(detail: RunDetail) -> dict[str, Any]:
    """Return a run's attributes, config and judge settings by flat names, for the dashboard."""
    info = msgspec.to_builtins(detail.info)
    settings = {key.replace("_", " "): v for key, v in info.items() if key not in _NOT_SET}
    settings |= _flatten_tree(detail.info.config, "config")
    settings |= _flatten_tree(detail.info.judge, "judge")
    return settings


def _flatten_tree(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Flatten nested settings to dotted names, for the dashboard's comparison of runs."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten_tree(value, f"{prefix}.{key}")
        else:
            flat[f"{prefix}.{key}"] = value
    return flat


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return formatting.plain(", ".join(map(str, value)), 200)
    return formatting.plain(str(value), 200)


def value_rows(
    source: DataSource, details: Sequence[RunDetail], names: Sequence[str], metric: str
) -> list[Row]:
    """Return the dashboard's table of the compared runs' latest values, and a metric's range."""
    rows: list[Row] = []

    def add(what: str, values: Sequence[str]) -> None:
        rows.append({"Value": what, **dict(zip(names, values, strict=True))})

    add("state", [d.summary.state for d in details])
    add("last step", [f"{d.summary.last_step:,}" for d in details])
    shown = list(dict.fromkeys((metric, *_SHOWN)))
    requests = [SeriesRequest(metric=shown_metric, points=POINTS) for shown_metric in shown]
    series = [series_of(source, d, requests) for d in details]
    for shown_metric, replies in zip(shown, zip(*series, strict=True), strict=True):
        last = [last_value(reply) for reply in replies]
        if any(value is not None for value in last):
            add(
                f"{formatting.plain(shown_metric, 60)}, last",
                [formatting.number(value, 5) for value in last],
            )
    for word, most in (("lowest", min), ("highest", max)):
        values = [
            most(_finite_values(of_run[0]), default=last_value(of_run[0])) for of_run in series
        ]
        add(
            f"{formatting.plain(metric, 60)}, {word}",
            [formatting.number(value) for value in values],
        )
    if any(behind := [_behind(source, details[0], detail) for detail in details]):
        add("loss of the first", behind)
    add("skips", [f"{d.summary.num_skips:,}" for d in details])
    add("rollbacks", [f"{d.summary.num_rollbacks:,}" for d in details])
    return rows


def _behind(source: DataSource, first: RunDetail, other: RunDetail) -> str:
    """Return the lag of a run behind the first, for the dashboard's comparison; "" if unknown."""
    both = (first, other)
    if other is first or any("steps.loss" not in detail.metrics for detail in both):
        return ""
    view = forecast_of(source, other.summary, first.summary.run_id)
    return "" if view.behind is None else formatting.plain(view.comparison_text(), 120)


def _finite_values(reply: SeriesReply | None) -> list[float]:
    """Return the finite values of a run's series, for the dashboard's comparison of runs."""
    return [] if reply is None else [value for value in reply.value if value is not None]
