"""The Grafana board: what somebody on call looks at, in about twenty panels.

How runs stand comes first, then their training; ranks, GPUs, nodes and Vitals itself are rows to
open. What a panel cannot answer the dashboard of Vitals does: Prometheus has one sample a scrape.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trainvitals.catalog import spec
from trainvitals.views import RunState

UID = "trainvitals"
SCHEMA_VERSION = 39
"""Of Grafana 10.4 and 11; newer ones migrate it when they load it."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["stat", "state-timeline", "timeseries", "heatmap"]
Thresholds = Sequence[tuple[float | None, str]]
"""From which value on which colour; the first value is None."""

BAD_FROM_ONE: Thresholds = ((None, "green"), (1, "red"))
NOTED_FROM_ONE: Thresholds = ((None, "green"), (1, "orange"))
STATE_COLORS: Mapping[RunState, str] = {
    "running": "green",
    "finished": "blue",
    "halted": "red",
    "interrupted": "orange",
    "failed": "red",
    "lost": "purple",
}
RUN = '{run=~"$run"}'
NODE = '{node=~"$node"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: what it asks, and how the answer is drawn."""

    title: str
    kind: Kind = "timeseries"
    queries: Mapping[str, str]
    """By legend."""
    help: str
    unit: str = "short"
    width: int = 8
    height: int = 8
    thresholds: Thresholds = ()
    custom: Mapping[str, Any] = field(default_factory=dict)
    """How a time series is drawn, where it is not as a line."""
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """What a state's number is called, and its colour."""
    dashed: str = ""
    """Legends that match this are limits."""


def named(query: str) -> str:
    """Return the query with the runs' names beside their ids; one without a name has its id."""
    names = 'max by (run, name) (train_run_info{name!=""})'
    return (
        f"({query}) * on (run) group_left (name) {names}"
        f' or on (run) label_replace({query}, "name", "$1", "run", "(.+)")'
    )


def of_runs(metric: str, *by: str) -> str:
    """Return a gauge of runs, once: the collector and an agent may both tell of it."""
    return f"max by ({', '.join(('run', *by))}) ({spec(metric).name}{RUN})"


def counted(metric: str, window: str, *by: str) -> str:
    """Return how often something came within a window, by run.

    ``increase`` extrapolates to the window's ends: of 14 lost steps it makes 14.7. The collector
    counts what is stored, from 0 on and never set back, so the difference is exact; it alone tells
    ``train_run_info``. An agent counts from its own start: it is asked where no collector tells.
    """
    series = f"{spec(metric).name}{RUN}[{window}]"
    came = f"(max_over_time({series}) - min_over_time({series}))"
    exact = f"{came} and on (run, job, instance) train_run_info"
    return f"sum by ({', '.join(('run', *by))}) ({exact} or on (run) increase({series}))"


def _states() -> str:
    return " or ".join(
        f'max by (run) (train_run_state{{run=~"$run", state="{state}"}}) * {number}'
        for number, state in enumerate(get_args(RunState), 1)
    )


def _in_range(metric: str) -> str:
    return f"sum({counted(metric, '$__range')}) or vector(0)"


def _share(part: str, whole: str) -> str:
    return f"{spec(part).name}{NODE} / {spec(whole).name}{NODE}"


def _lost(*metrics: str) -> str:
    each = [f"sum(increase({spec(metric).name}[5m]))" for metric in metrics]
    return " + ".join(f"({query} or vector(0))" for query in each)


BARS = {"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal"}}
LOGARITHMIC = {"scaleDistribution": {"type": "log", "log": 10}}

NOW = (
    Panel(
        title="Running",
        kind="stat",
        width=4,
        height=4,
        queries={
            "runs": 'count(max by (run) (train_run_state{run=~"$run", state="running"}))'
            " or vector(0)"
        },
        help="Runs that are running now.",
    ),
    Panel(
        title="Firing pages",
        kind="stat",
        width=4,
        height=4,
        queries={
            "pages": 'count(collector_alert_firing{run=~"$run", severity="page"} == 1) or vector(0)'
        },
        help="Alerts with severity page that have not resolved.",
        thresholds=BAD_FROM_ONE,
    ),
    Panel(
        title="Skips and rollbacks",
        kind="stat",
        width=8,
        height=4,
        queries={
            "updates skipped": _in_range("train_skipped_steps_total"),
            "rollbacks": _in_range("train_rollbacks_total"),
        },
        help="What Vitals did within the time shown.",
        thresholds=NOTED_FROM_ONE,
    ),
    Panel(
        title="Lost work",
        kind="stat",
        width=8,
        height=4,
        queries={
            "steps lost": _in_range("train_lost_steps_total"),
            "batches dropped": _in_range("train_dropped_batches_total"),
        },
        help="Steps skipped or discarded, and batches the model has not seen.",
        thresholds=NOTED_FROM_ONE,
    ),
    Panel(
        title="State of each run",
        kind="state-timeline",
        width=12,
        queries={"{{name}}": named(_states())},
        help="What each run was doing, as the collector knew it.",
        words={
            number: (state, STATE_COLORS[state])
            for number, state in enumerate(get_args(RunState), 1)
        },
    ),
    Panel(
        title="Alerts",
        kind="state-timeline",
        width=12,
        queries={
            "{{name}} {{alert}}": named(
                'max by (run, alert) (collector_alert_firing{run=~"$run", severity!="log"})'
            )
        },
        help="Alerts that fired, and when they resolved.",
        words={0: ("resolved", "green"), 1: ("firing", "red")},
    ),
)

TRAINING = (
    Panel(
        title="Loss",
        queries={
            "{{name}}": named(of_runs("train_loss")),
            "{{name}} limit": named(of_runs("train_loss_limit")),
        },
        help="Training loss, and the limit above which a step is an outlier. A gap: NaN.",
        dashed="/limit$/",
    ),
    Panel(
        title="Gradient norm (log)",
        queries={
            "{{name}}": named(of_runs("train_grad_norm")),
            "{{name}} limit": named(of_runs("train_grad_norm_limit")),
            "{{name}} clip limit": named(of_runs("train_auto_max_norm")),
        },
        help="L2 norm before clipping, the limit above which a step is an outlier, and the one of "
        'max_norm="auto".',
        custom=LOGARITHMIC,
        dashed="/limit$/",
    ),
    Panel(
        title="Bad steps in 5 minutes",
        queries={
            "{{name}} skipped, {{reason}}": named(
                counted("train_skipped_steps_total", "5m", "reason")
            ),
            "{{name}} rolled back, {{reason}}": named(
                counted("train_rollbacks_total", "5m", "reason")
            ),
            "{{name}} NaN or infinite": named(counted("train_nonfinite_total", "5m")),
        },
        help="Skipped updates, rollbacks, and steps whose loss or gradients were not finite.",
        custom=BARS,
    ),
    Panel(
        title="Tokens per second",
        queries={"{{name}}": named(of_runs("train_tokens_per_second"))},
        help="Tokens of all ranks per second of the step.",
    ),
    Panel(
        title="MFU",
        queries={"{{name}}": named(of_runs("train_mfu_ratio"))},
        help="Model FLOPs utilization, of what the GPUs can do.",
        unit="percentunit",
    ),
    Panel(
        title="Learning rate",
        queries={"{{name}}": named(of_runs("train_learning_rate"))},
        help="Learning rate of the first parameter group, as applied.",
        unit="sci",
    ),
)

RANKS = (
    Panel(
        title="Step time of all ranks",
        kind="heatmap",
        queries={"{{rank}}": of_runs("train_step_duration_seconds", "rank")},
        help="Distribution of step times over ranks: a straggler is above the others.",
        unit="s",
    ),
    Panel(
        title="Where a step's time goes",
        queries={
            f"{{{{name}}}} {words}": named(f"avg by (run) ({spec(metric).name}{RUN})")
            for metric, words in (
                ("train_data_wait_seconds", "data"),
                ("train_forward_backward_seconds", "compute"),
                ("train_communication_seconds", "exchange"),
                ("train_optimizer_seconds", "optimizer"),
                ("train_checkpoint_seconds", "checkpoint"),
                ("train_monitor_seconds", "Vitals"),
            )
        },
        help="Mean over the ranks of each part of a step.",
        unit="s",
        custom={"fillOpacity": 30, "stacking": {"mode": "normal"}},
    ),
    Panel(
        title="Peak device memory",
        queries={"{{name}} rank {{rank}}": named(of_runs("train_memory_peak_bytes", "rank"))},
        help="Highest device memory of a rank during the step.",
        unit="bytes",
    ),
)

GPUS = (
    Panel(
        title="GPU utilization",
        kind="heatmap",
        queries={"{{gpu}}": f"{spec('gpu_utilization_ratio').name}{NODE}"},
        help="How many GPUs were how busy.",
        unit="percentunit",
    ),
    Panel(
        title="GPU temperature",
        queries={"{{node}} {{gpu}}": f"{spec('gpu_temperature_celsius').name}{NODE}"},
        help="Core temperature; from about 90 degrees on most GPUs throttle.",
        unit="celsius",
        thresholds=((None, "green"), (80, "orange"), (90, "red")),
    ),
    Panel(
        title="GPU power, of its limit",
        queries={"{{node}} {{gpu}}": _share("gpu_power_watts", "gpu_power_limit_watts")},
        help="Power draw as a share of the enforced limit.",
        unit="percentunit",
    ),
    Panel(
        title="GPU errors in 5 minutes",
        queries={
            f"{{{{node}}}} {{{{gpu}}}} {words}": f"increase({spec(metric).name}{NODE}[5m]) > 0"
            for metric, words in (
                ("gpu_ecc_uncorrected_errors_total", "memory, uncorrected"),
                ("gpu_remapped_rows_uncorrected_total", "rows remapped"),
                ("gpu_pcie_replays_total", "PCIe resent"),
                ("gpu_nvlink_crc_errors_total", "NVLink CRC"),
            )
        },
        help="Errors that came, of memory and links.",
        custom=BARS,
        thresholds=BAD_FROM_ONE,
    ),
)

NODES = (
    Panel(
        title="CPU, memory and waiting for disks",
        width=12,
        queries={
            "{{node}} CPU": f"{spec('node_cpu_ratio').name}{NODE}",
            "{{node}} memory": _share("node_memory_used_bytes", "node_memory_total_bytes"),
            "{{node}} waiting for disks": "rate("
            f"{spec('node_pressure_io_waiting_seconds_total').name}{NODE}[$__rate_interval])",
        },
        help="Shares of the cores, of the memory, and of the time in which tasks waited.",
        unit="percentunit",
    ),
    Panel(
        title="Network",
        width=12,
        queries={
            f"{{{{node}}}} {words}": f"rate({spec(metric).name}{NODE}[$__rate_interval])"
            for metric, words in (
                ("node_network_receive_bytes_total", "received"),
                ("node_network_transmit_bytes_total", "sent"),
            )
        },
        help="Bytes per second over all links.",
        unit="Bps",
    ),
)

VITALS = (
    Panel(
        title="Rows lost in 5 minutes",
        width=12,
        queries={
            "never arrived": _lost("collector_lost_rows_total"),
            "dropped by agents": _lost("agent_dropped_rows_total"),
            "damaged": _lost(
                "agent_corrupt_rows_total",
                "collector_damaged_stretches_total",
                "collector_damaged_batches_total",
            ),
        },
        help="What was measured and is not stored.",
        custom=BARS,
        thresholds=BAD_FROM_ONE,
    ),
    Panel(
        title="Rows waiting on nodes",
        width=12,
        queries={"{{instance}}": spec("agent_spool_bytes").name},
        help="Bytes that agents hold until the collector has stored them.",
        unit="bytes",
    ),
)

ROWS: tuple[tuple[str, Sequence[Panel]], ...] = (
    ("Now", NOW),
    ("Training", TRAINING),
    ("Ranks", RANKS),
    ("GPUs", GPUS),
    ("Nodes", NODES),
    ("Vitals itself", VITALS),
)
NUM_OPEN = 2
"""Rows that are open from the start."""


def dashboard() -> dict[str, Any]:
    """Return the board as Grafana's import and API take it."""
    panels: list[dict[str, Any]] = []
    number, top = 0, 0
    for i, (title, of_row) in enumerate(ROWS):
        row = {
            "id": (number := number + 1),
            "type": "row",
            "title": title,
            "collapsed": i >= NUM_OPEN,
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
            "panels": [],
        }
        placed, height = _placed(of_row, number, top + 1)
        number += len(placed)
        if i >= NUM_OPEN:  # what a closed row holds takes no room
            row["panels"], placed, height = placed, [], 0
        panels += [row, *placed]
        top += 1 + height
    return {
        "uid": UID,
        "title": "Vitals: training runs",
        "description": "Generated by `vitals deploy grafana`. It shows the last scraped values;"
        " Vitals' own store has every step.",
        "tags": ["vitals", "training"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 2,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }


def files() -> dict[str, str]:
    """Return the board's file."""
    return {"vitals.json": json.dumps(dashboard(), indent=2) + "\n"}


def _placed(panels: Sequence[Panel], number: int, top: int) -> tuple[list[dict[str, Any]], int]:
    """Return the panels side by side, as many as fit, with the height they take together."""
    placed: list[dict[str, Any]] = []
    x, y, height = 0, top, 0
    for panel in panels:
        if x + panel.width > 24:
            x, y, height = 0, y + height, 0
        number += 1
        position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
        placed.append(_panel(number, panel, position))
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height - top


_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_OPTIONS: dict[Kind, dict[str, Any]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "value_and_name",
        "justifyMode": "auto",
        "orientation": "vertical",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "never",
        "alignValue": "left",
        "rowHeight": 0.8,
        "legend": _LEGEND,
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "timeseries": {
        "legend": _LEGEND,
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "heatmap": {
        "calculate": True,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Viridis",
            "fill": "dark-blue",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "orange"},
        "showValue": "never",
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    },
}


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind in ("timeseries", "state-timeline"):
        defaults["custom"] = {"lineWidth": 1, "spanNulls": False} | dict(panel.custom)
    if panel.kind == "state-timeline":
        defaults["custom"] = {"fillOpacity": 80, "lineWidth": 0, "spanNulls": False}
    if panel.thresholds:
        steps = [{"value": value, "color": color} for value, color in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        if panel.kind == "timeseries":
            defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
        else:
            defaults["color"] = {"mode": "thresholds"}
    if panel.words:
        words = {
            str(value): {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in enumerate(panel.words.items())
        }
        defaults["mappings"] = [{"type": "value", "options": words}]
    options = dict(_OPTIONS[panel.kind])
    if panel.kind == "heatmap":
        options["yAxis"] = {"axisPlacement": "left", "reverse": False, "unit": panel.unit}
    dashes = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 4]}}
    matched = {"matcher": {"id": "byRegexp", "options": panel.dashed}, "properties": [dashes]}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": [matched] if panel.dashed else []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    runs = named("max by (run) (train_step)")
    # A run is chosen by its name; its id is what the queries ask for.
    both = '/name="(?<text>[^"]+)".*run="(?<value>[^"]+)"/'
    return [
        datasource,
        _query_variable("run", f"query_result({runs})", both),
        _query_variable("node", f"label_values({spec('node_load1').name}, node)"),
    ]


def _query_variable(name: str, query: str, regex: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "regex": regex,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "sort": 1,
    }


def _annotations() -> list[dict[str, Any]]:
    rollbacks = f"max by (run, reason) (changes(train_rollbacks_total{RUN}[1m])) > 0"
    pages = 'max by (run, alert) (collector_alert_firing{run=~"$run", severity="page"}) == 1'
    queries = (("Rollbacks", rollbacks, "orange"), ("Pages", pages, "red"))
    return [
        {
            "name": name,
            "enable": True,
            "iconColor": color,
            "datasource": DATASOURCE,
            "expr": named(query),
            "step": "15s",
            "titleFormat": name,
            "textFormat": "{{name}} {{reason}}{{alert}}",
        }
        for name, query, color in queries
    ]
