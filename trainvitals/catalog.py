"""Every metric Vitals knows, once: name, unit, type, where it is measured, what it means.

The metrics of a training rank are in ``trainvitals.metrics``, all others here. Row schemas, the
exposition, the query API's series, the dashboards and docs/METRICS.md are derived from these rows.
A name carries its unit in base units (seconds, bytes, watts, celsius; ratios 0 to
1). ``column`` is the name in a row; ``scope`` says who writes it: numbers that are equal on all
ranks (``run``) are written by global rank 0 only.
"""

from typing import Literal

from trainvitals.metrics import LAYER_METRICS, STEP_METRICS, Kind, MetricSpec, Scope
from trainvitals.records import EVENT_SCHEMA
from trainvitals.rows import Column, Schema

ROW_COLUMNS: tuple[Column, ...] = (
    Column("step", "i8"),
    Column("attempt", "i8"),
    Column("time_unix_ns", "i8"),
    Column("monotonic_ns", "i8"),
)
"""First columns of every stream."""


MAX_GROUPS = 128
"""Parameter groups whose learning rates have a column: a row's width is bounded."""


def steps_schema(*, num_groups: int = 1) -> Schema:
    """Return the row schema of ``steps``; groups after the first get ``learning_rate.N``.

    Columns for the first ``MAX_GROUPS`` groups only.
    """
    groups = range(1, min(num_groups, MAX_GROUPS))
    extra = tuple(Column(f"learning_rate.{i}", "f8") for i in groups)
    metrics = tuple(Column(m.column, m.dtype) for m in STEP_METRICS)
    return Schema("steps", ROW_COLUMNS + metrics + extra)


LAYERS_SCHEMA = Schema(
    "layers",
    (*ROW_COLUMNS, Column("layer", "i8"), *(Column(m.column, m.dtype) for m in LAYER_METRICS)),
)

SCALARS_SCHEMA = Schema("scalars", (*ROW_COLUMNS, Column("name", "i8"), Column("value", "f8")))
"""The sparse stream of ``Monitor.observe`` and ``Monitor.evaluate``."""


TURN_METRICS = ("loss", "grad_norm", "loss_limit", "grad_norm_limit", "skipped")
"""If a step updated one of several optimizers, its own values are the scalars ``METRIC/NAME``;
``skipped/NAME`` exists for each of them."""


def _host_metric(
    scope: Scope,
    column: str,
    unit: str,
    text: str,
    *,
    kind: Kind = "gauge",
    dtype: Literal["f8", "i8"] = "f8",
) -> MetricSpec:
    """Define a metric of a GPU, a node or a process, for the catalog of all metrics."""
    labels = {"gpu": ("node", "gpu"), "node": ("node",), "process": ("run", "rank")}[scope]
    prefix = "train_process" if scope == "process" else scope
    suffix = "_total" if kind == "counter" else ""
    return MetricSpec(
        name=f"{prefix}_{column}{suffix}",
        help=text,
        unit=unit,
        kind=kind,
        scope=scope,
        stream=scope,
        column=column,
        dtype=dtype,
        labels=labels,
    )


def _count(scope: Scope, column: str, text: str) -> MetricSpec:
    """Define a metric that counts events of a GPU, node or process, for the catalog."""
    return _host_metric(scope, column, "", text, kind="counter", dtype="i8")


def _pressure(what: str, text: str) -> MetricSpec:
    """Define a metric of the kernel's pressure stalls (PSI), for the catalog."""
    return _host_metric("node", f"pressure_{what}_seconds", "seconds", text, kind="counter")


GPU_METRICS: tuple[MetricSpec, ...] = (
    _host_metric("gpu", "utilization_ratio", "ratio", "Share of the time a kernel was running."),
    _host_metric(
        "gpu",
        "memory_utilization_ratio",
        "ratio",
        "Share of the time device memory was read or written.",
    ),
    _host_metric(
        "gpu",
        "memory_used_bytes",
        "bytes",
        "Device memory in use, without what the driver reserves.",
    ),
    _host_metric("gpu", "memory_total_bytes", "bytes", "Total device memory."),
    _host_metric("gpu", "memory_reserved_bytes", "bytes", "Device memory reserved by the driver."),
    _host_metric("gpu", "temperature_celsius", "celsius", "Core temperature."),
    _host_metric(
        "gpu", "memory_temperature_celsius", "celsius", "Temperature of the device memory."
    ),
    _host_metric("gpu", "power_watts", "watts", "Power draw."),
    _host_metric("gpu", "power_limit_watts", "watts", "Enforced power limit."),
    _host_metric(
        "gpu", "energy_joules", "joules", "Energy used since the driver loaded.", kind="counter"
    ),
    _host_metric("gpu", "sm_clock_hertz", "hertz", "Clock of the streaming multiprocessors."),
    _host_metric("gpu", "memory_clock_hertz", "hertz", "Clock of the device memory."),
    _host_metric(
        "gpu", "throttle_reasons", "", "NVML bit mask of clock throttle reasons.", dtype="i8"
    ),
    _count("gpu", "ecc_corrected_errors", "Corrected memory errors since the driver loaded."),
    _count("gpu", "ecc_uncorrected_errors", "Uncorrected memory errors since the driver loaded."),
    _host_metric(
        "gpu",
        "last_xid",
        "",
        "Xid of the GPU's last error; absent if none occurred since the agent started.",
        dtype="i8",
    ),
    _count("gpu", "remapped_rows_corrected", "Memory rows remapped after corrected errors."),
    _count("gpu", "remapped_rows_uncorrected", "Memory rows remapped after uncorrected errors."),
    _host_metric(
        "gpu",
        "row_remap_pending",
        "",
        "1 while a memory row waits for a GPU reset to be remapped.",
        dtype="i8",
    ),
    _host_metric("gpu", "row_remap_failed", "", "1 if remapping a memory row failed.", dtype="i8"),
    _host_metric(
        "gpu",
        "pcie_receive_bytes_per_second",
        "bytes",
        "PCIe receive rate, measured over 20 ms of the sample.",
    ),
    _host_metric(
        "gpu",
        "pcie_transmit_bytes_per_second",
        "bytes",
        "PCIe transmit rate, measured over 20 ms of the sample.",
    ),
    _count("gpu", "pcie_replays", "PCIe packets that were resent."),
    _host_metric(
        "gpu", "nvlink_receive_bytes", "bytes", "Bytes received, all NVLinks.", kind="counter"
    ),
    _host_metric(
        "gpu", "nvlink_transmit_bytes", "bytes", "Bytes sent, all NVLinks.", kind="counter"
    ),
    _count("gpu", "nvlink_crc_errors", "Flow-control CRC errors, all NVLinks."),
    _count("gpu", "nvlink_replay_errors", "Retried transmissions, all NVLinks."),
    _count("gpu", "nvlink_recovery_errors", "Link recoveries after an error, all NVLinks."),
)

NODE_METRICS: tuple[MetricSpec, ...] = (
    _host_metric("node", "cpu_ratio", "ratio", "Share of all CPU cores in use."),
    _host_metric("node", "load1", "", "Load average over one minute."),
    _host_metric("node", "memory_used_bytes", "bytes", "Memory in use, without caches."),
    _host_metric("node", "memory_total_bytes", "bytes", "Total memory."),
    _host_metric("node", "swap_used_bytes", "bytes", "Swap in use."),
    _host_metric(
        "node", "shm_free_bytes", "bytes", "Free space in the journals' folder (shared memory)."
    ),
    _host_metric(
        "node", "disk_read_bytes", "bytes", "Bytes read from local disks.", kind="counter"
    ),
    _host_metric(
        "node", "disk_write_bytes", "bytes", "Bytes written to local disks.", kind="counter"
    ),
    _host_metric("node", "network_receive_bytes", "bytes", "Bytes received.", kind="counter"),
    _host_metric("node", "network_transmit_bytes", "bytes", "Bytes sent.", kind="counter"),
    _count("node", "network_receive_errors", "Received packets that were damaged or dropped."),
    _count("node", "network_transmit_errors", "Packets that failed to send or were dropped."),
    _pressure("cpu_waiting", "Time in which some task waited for a processor."),
    _pressure("memory_waiting", "Time in which some task waited for memory."),
    _pressure("memory_stalled", "Time in which all tasks waited for memory."),
    _pressure("io_waiting", "Time in which some task waited for a disk."),
    _pressure("io_stalled", "Time in which all tasks waited for a disk."),
)

PROCESS_METRICS: tuple[MetricSpec, ...] = (
    _host_metric("process", "alive", "", "1 while the rank's process exists.", dtype="i8"),
    _host_metric(
        "process",
        "cpu_seconds",
        "seconds",
        "CPU time of the rank, user and system.",
        kind="counter",
    ),
    _host_metric("process", "resident_memory_bytes", "bytes", "Resident memory of the rank."),
    _host_metric("process", "threads", "", "Threads of the rank.", dtype="i8"),
    _host_metric("process", "open_fds", "", "Open file descriptors of the rank.", dtype="i8"),
    _host_metric(
        "process", "io_read_bytes", "bytes", "Bytes the rank read from disks.", kind="counter"
    ),
    _host_metric(
        "process", "io_write_bytes", "bytes", "Bytes the rank wrote to disks.", kind="counter"
    ),
    _count("process", "major_page_faults", "Memory pages of the rank that were read from disk."),
    _count("process", "voluntary_context_switches", "Times the rank gave up its CPU core to wait."),
    _count(
        "process",
        "involuntary_context_switches",
        "Times the kernel took the CPU core away from the rank.",
    ),
)


def _sample_schema(
    stream: str, keys: tuple[Column, ...], metrics: tuple[MetricSpec, ...]
) -> Schema:
    """Return the schema of rows with these metrics of a GPU, node or process."""
    return Schema(stream, ROW_COLUMNS + keys + tuple(Column(m.column, m.dtype) for m in metrics))


GPU_SCHEMA = _sample_schema("gpu", (), GPU_METRICS)
NODE_SCHEMA = _sample_schema("node", (), NODE_METRICS)
PROCESS_SCHEMA = _sample_schema(
    "process", (Column("rank", "i8"), Column("pid", "i8")), PROCESS_METRICS
)
"""Node and process rows carry step -1 and attempt 0: they are ordered by time, not by step."""


def _exposed_metric(
    name: str,
    scope: Scope,
    text: str,
    *,
    kind: Kind = "counter",
    unit: str = "",
    labels: tuple[str, ...] = (),
) -> MetricSpec:
    """Define a metric that is in no row: only ``/metrics`` exposes it."""
    return MetricSpec(name=name, help=text, unit=unit, kind=kind, scope=scope, labels=labels)


EXPOSED_METRICS: tuple[MetricSpec, ...] = (
    _exposed_metric("train_step", "run", "Last step seen.", kind="gauge", labels=("run",)),
    _exposed_metric("train_steps_total", "run", "Attempted steps seen.", labels=("run",)),
    _exposed_metric(
        "train_skipped_steps_total",
        "run",
        "Updates skipped, apart from the steps of rollbacks and halts.",
        labels=("run", "reason"),
    ),
    _exposed_metric("train_rollbacks_total", "run", "Rollbacks done.", labels=("run", "reason")),
    _exposed_metric(
        "train_lost_steps_total",
        "run",
        "Lost work: steps that were skipped or that a rollback discarded.",
        labels=("run",),
    ),
    _exposed_metric(
        "train_dropped_batches_total",
        "run",
        "Batches that rollbacks skipped: the model has not seen them.",
        labels=("run",),
    ),
    _exposed_metric(
        "train_goodput_seconds_total",
        "run",
        "Wall time by its use. A step that is discarded later keeps its first bucket, and is also "
        "counted as rolled_back. Computing it takes at most about 2% of the time, so for a very "
        "long run it may be minutes old.",
        unit="seconds",
        labels=("run", "bucket"),
    ),
    _exposed_metric(
        "train_nonfinite_total", "run", "Steps with a non-finite loss or gradient.", labels=("run",)
    ),
    _exposed_metric(
        "train_run_state",
        "run",
        "1 for the run's current state.",
        kind="gauge",
        labels=("run", "state"),
    ),
    _exposed_metric(
        "train_run_info",
        "run",
        "Attributes of a run; the value is 1.",
        kind="info",
        labels=("run", "name", "project", "mode"),
    ),
    _exposed_metric(
        "train_swallowed_errors_total",
        "hooks",
        "Internal errors of Vitals that were contained; training continued.",
        labels=("run", "where"),
    ),
    _exposed_metric(
        "agent_cycle_age_seconds",
        "agent",
        "Time since the agent last finished a cycle.",
        kind="gauge",
        unit="seconds",
    ),
    _exposed_metric(
        "agent_spool_bytes", "agent", "Bytes in the spool.", kind="gauge", unit="bytes"
    ),
    _exposed_metric(
        "agent_memory_spools",
        "agent",
        "Runs whose spool is in memory because their disk is full.",
        kind="gauge",
    ),
    _exposed_metric("agent_spooled_rows_total", "agent", "Rows written to the spool."),
    _exposed_metric("agent_shipped_rows_total", "agent", "Rows the collector has stored."),
    _exposed_metric(
        "agent_dropped_rows_total",
        "agent",
        "Rows lost before the spool, or dropped from it when it was full.",
    ),
    _exposed_metric(
        "agent_corrupt_rows_total",
        "agent",
        "Rows or batches set aside because of a checksum mismatch.",
    ),
    _exposed_metric("agent_ship_errors_total", "agent", "Failed attempts to reach the collector."),
    _exposed_metric("agent_commands_total", "agent", "Commands delivered to mailboxes."),
    _exposed_metric(
        "agent_part_failures_total",
        "agent",
        "Failures contained in one part of the agent; the other parts kept running.",
        labels=("part",),
    ),
    _exposed_metric("collector_ingested_rows_total", "collector", "New rows stored."),
    _exposed_metric(
        "collector_duplicate_rows_total", "collector", "Duplicate rows received and not stored."
    ),
    _exposed_metric(
        "collector_lost_rows_total",
        "collector",
        "Rows that never arrived or that cannot be read from a spool.",
        labels=(),
    ),
    _exposed_metric(
        "collector_damaged_stretches_total",
        "collector",
        "Damaged sections of spools in followed folders that were skipped.",
    ),
    _exposed_metric(
        "collector_damaged_batches_total",
        "collector",
        "Stored batches or columns with a checksum mismatch; they are left out.",
    ),
    _exposed_metric(
        "collector_unmerged_rows_total",
        "collector",
        "Per-rank rows that arrived after their step was merged, or never: the detectors ran "
        "without them.",
    ),
    _exposed_metric(
        "collector_rows_left_to_store_total",
        "collector",
        "Rows that did not fit in memory; the detectors read them from the store.",
    ),
    _exposed_metric(
        "collector_dropped_samples_total",
        "collector",
        "GPU samples that the detectors did not see because their node's rows did not arrive.",
    ),
    _exposed_metric(
        "collector_thinned_rows_total",
        "collector",
        "Rows removed by thinning because they were old (age) or their run was above its cap "
        "(size).",
        labels=("stream", "reason"),
    ),
    _exposed_metric(
        "collector_removed_runs_total", "collector", "Runs removed.", labels=("reason",)
    ),
    _exposed_metric(
        "collector_forgotten_rows_total",
        "collector",
        "Rows of removed runs that were acknowledged but not stored.",
    ),
    _exposed_metric(
        "collector_runs_over_cap",
        "collector",
        "Runs above their cap that cannot be thinned further.",
        kind="gauge",
    ),
    _exposed_metric(
        "collector_rejected_batches_total", "collector", "Batches rejected.", labels=("reason",)
    ),
    _exposed_metric(
        "collector_refused_requests_total",
        "collector",
        "Requests refused for want of a right (401, 403), by error code.",
        labels=("reason",),
    ),
    _exposed_metric(
        "collector_deferred_bodies_total",
        "collector",
        "Request bodies deferred for lack of memory; the agent sends them again.",
    ),
    _exposed_metric(
        "collector_part_failures_total",
        "collector",
        "Failures contained in one part of the collector; it retries.",
        labels=("part",),
    ),
    _exposed_metric(
        "collector_alert_firing",
        "collector",
        "1 while the alert fires, 0 for a day after it resolved, and while it is silenced. The "
        "cause tells alerts of one name apart: 32 of each run, then `others`.",
        kind="gauge",
        labels=("run", "alert", "severity", "cause"),
    ),
    _exposed_metric(
        "collector_alerts_total",
        "collector",
        "Alerts that started firing.",
        labels=("alert", "severity"),
    ),
    _exposed_metric(
        "collector_notifications_total",
        "collector",
        "Notifications by outcome.",
        labels=("notifier", "outcome"),
    ),
    _exposed_metric(
        "collector_remote_writes_total",
        "collector",
        "Pushes of run metrics by remote write, by outcome.",
        labels=("outcome",),
    ),
    _exposed_metric(
        "collector_commands_total", "collector", "Commands by status.", labels=("status",)
    ),
)

CATALOG: tuple[MetricSpec, ...] = (
    STEP_METRICS + LAYER_METRICS + GPU_METRICS + NODE_METRICS + PROCESS_METRICS + EXPOSED_METRICS
)


def find_metric(name: str) -> MetricSpec:
    """Return the catalog's metric of that name, given as exposed or as ``stream.column``.

    Raises:
        KeyError: there is none.
    """
    for metric in CATALOG:
        if name in (metric.name, f"{metric.stream}.{metric.column}"):
            return metric
    raise KeyError(name)


__all__ = [
    "CATALOG",
    "EVENT_SCHEMA",
    "GPU_SCHEMA",
    "LAYERS_SCHEMA",
    "LAYER_METRICS",
    "NODE_SCHEMA",
    "PROCESS_SCHEMA",
    "SCALARS_SCHEMA",
    "STEP_METRICS",
    "MetricSpec",
    "Scope",
    "find_metric",
    "steps_schema",
]
