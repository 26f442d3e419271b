"""The Grafana dashboard, drawn from the catalog: every metric of a run, a GPU or a service.

Metrics that are read against each other share a panel; every other one gets its own. Units come
from the catalog.
"""

import json
from collections.abc import Sequence
from typing import Any

from trainvitals.catalog import CATALOG, MetricSpec, Scope, spec

UID = "trainvitals"
SCHEMA_VERSION = 39
"""Of Grafana 10.4 and 11; newer ones migrate it when they load it."""

ROWS: tuple[tuple[str, tuple[Scope, ...]], ...] = (
    ("Run", ("run", "hooks")),
    ("Ranks", ("rank", "process")),
    ("GPUs", ("gpu",)),
    ("Nodes", ("node",)),
    ("Vitals itself", ("agent", "collector")),
)

TOGETHER: dict[str, tuple[str, ...]] = {
    "Loss": ("train_loss", "train_loss_max", "train_loss_limit"),
    "Gradient norm": ("train_grad_norm", "train_grad_norm_clipped", "train_grad_norm_limit"),
    "Tokens seen and trained": ("train_tokens_total", "train_tokens_trained_total"),
    "Step time": (
        "train_step_duration_seconds",
        "train_data_wait_seconds",
        "train_monitor_seconds",
        "train_checkpoint_seconds",
    ),
    "Device memory of a rank": ("train_memory_allocated_bytes", "train_memory_peak_bytes"),
    "GPU memory": ("gpu_memory_used_bytes", "gpu_memory_total_bytes"),
    "GPU power": ("gpu_power_watts", "gpu_power_limit_watts"),
    "Node memory": ("node_memory_used_bytes", "node_memory_total_bytes"),
    "Network": ("node_network_receive_bytes_total", "node_network_transmit_bytes_total"),
}
"""Panels with several metrics; each stands where its first metric stands in the catalog."""

NOT_DRAWN = frozenset(
    {
        "train_run_info",
        "train_verdict",
        "train_loss_max_rank",
        "train_culprit_rank",
        "train_batch_index",
        "train_num_batches",
    }
)
"""Identities, bit masks and timestamps: as a curve they say nothing."""

GRAFANA_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "watts": "watt",
    "joules": "joule",
    "celsius": "celsius",
    "hertz": "hertz",
    "tokens": "short",
    "": "short",
}

GRAFANA_RATES = {"bytes": "Bps", "joules": "watt", "seconds": "percentunit", "tokens": "cps"}
"""The unit of what flows per second, where it has one of its own."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def expression(metric: MetricSpec) -> str:
    """Return the metric's PromQL.

    A gauge is shown as it is, what flows (bytes, tokens, seconds) as a rate, and counted events as
    how many came in five minutes: so and so many rollbacks per second say nothing to anybody.
    """
    filters = [f'{label}=~"${label}"' for label in ("run", "node") if label in metric.labels]
    series = f"{metric.name}{{{', '.join(filters)}}}" if filters else metric.name
    if metric.kind != "counter":
        return series
    return f"rate({series}[$__rate_interval])" if metric.unit else f"increase({series}[5m])"


def drawn_metrics() -> list[MetricSpec]:
    """Return every metric of the catalog that has a curve."""
    return [metric for metric in CATALOG if metric.name not in NOT_DRAWN]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's import and API take it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, scopes in ROWS:
        panels.append(_row(len(panels) + 1, title, top))
        top += 1
        groups = _panel_groups(scopes)
        for i, (name, metrics) in enumerate(groups):
            position = {"h": 8, "w": 8, "x": 8 * (i % 3), "y": top + 8 * (i // 3)}
            panels.append(_panel(len(panels) + 1, name, metrics, position))
        top += 8 * ((len(groups) + 2) // 3)
    return {
        "uid": UID,
        "title": "Vitals: training runs",
        "description": "Generated from the Vitals metric catalog. It shows the last "
        "scraped values; Vitals' own store has every step.",
        "tags": ["vitals", "training"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }


def files() -> dict[str, str]:
    """Return the dashboard's file."""
    return {"vitals.json": json.dumps(dashboard(), indent=2) + "\n"}


def _panel_groups(scopes: tuple[Scope, ...]) -> list[tuple[str, list[MetricSpec]]]:
    title_of = {name: title for title, names in TOGETHER.items() for name in names}
    groups: dict[str, list[MetricSpec]] = {}
    for metric in drawn_metrics():
        if metric.scope in scopes:
            title = title_of.get(metric.name) or _title(metric)
            groups.setdefault(title, []).append(metric)
    return list(groups.items())


def _title(metric: MetricSpec) -> str:
    words = metric.name.removesuffix("_total").split("_")
    if metric.unit and words[-1] == metric.unit:
        words.pop()
    if words[0] in ("train", "gpu", "node"):
        words.pop(0)
    return " ".join(words).capitalize()


def _row(panel_id: int, title: str, top: int) -> dict[str, Any]:
    return {
        "id": panel_id,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
        "panels": [],
    }


def _panel(
    panel_id: int, title: str, metrics: Sequence[MetricSpec], position: dict[str, int]
) -> dict[str, Any]:
    first = metrics[0]
    unit = GRAFANA_UNITS[first.unit]
    if first.kind == "counter":
        title += " per second" if first.unit else " in 5 minutes"
        unit = GRAFANA_RATES.get(first.unit, unit)
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": title,
        "description": " ".join(f"{metric.name}: {metric.help}" for metric in metrics),
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": {"lineWidth": 1, "spanNulls": False}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expression(metric),
                "legendFormat": _legend(metric, alone=len(metrics) == 1),
            }
            for i, metric in enumerate(metrics)
        ],
    }


def _legend(metric: MetricSpec, *, alone: bool) -> str:
    labels = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{instance}}"
    return labels if alone else f"{metric.name} {labels}"


def _variables() -> list[dict[str, Any]]:
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    return [
        datasource,
        _query_variable("run", "label_values(train_step, run)"),
        _query_variable("node", "label_values(node_load1, node)"),
    ]


def _query_variable(name: str, query: str) -> dict[str, Any]:
    spec(query.partition("(")[2].partition(",")[0])
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "sort": 2,
    }


def _annotations() -> list[dict[str, Any]]:
    queries = (
        ("Rollbacks", 'changes(train_rollbacks_total{run=~"$run"}[1m]) > 0', "orange"),
        ("Alerts", 'collector_alert_firing{run=~"$run", severity!="log"} == 1', "red"),
    )
    return [
        {
            "name": name,
            "enable": True,
            "iconColor": color,
            "datasource": DATASOURCE,
            "expr": query,
            "step": "15s",
            "titleFormat": name,
            "textFormat": "{{run}} {{reason}}{{alert}}",
        }
        for name, query, color in queries
    ]
