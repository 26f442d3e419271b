"""Every metric Vitals knows, once: name, unit, type, where it is measured, what it means.

The metrics of a training rank are in ``trainvitals.metrics``, all others here. Row schemas, the
exposition, the query API's series, the dashboards and docs/METRICS.md are derived from these rows.
A name carries its unit in base units (seconds, bytes, watts, celsius; ratios 0 to
1). ``column`` is the name in a row; ``scope`` says who writes it: numbers that are equal on all
ranks (``run``) are written by global rank 0 only.
"""

from trainvitals.metrics import (
    LAYER_METRICS,
    STEP_METRICS,
    Kind,
    MetricSpec,
    Scope,
    read_metric_rows,
)
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
    """Return the schema of the ``steps`` stream; groups after the first get ``learning_rate.N``.

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


def _host_metrics(scope: Scope, table: str) -> tuple[MetricSpec, ...]:
    """Return the catalog entries of the metrics that the agent samples of one kind of source."""
    labels = {"gpu": ("node", "gpu"), "node": ("node",), "process": ("run", "rank")}[scope]
    prefix = "train_process" if scope == "process" else scope
    rows = read_metric_rows(table)
    return tuple(row.sampled_metric(prefix, scope, scope, labels) for row in rows)


GPU_METRICS = _host_metrics(
    "gpu",
    """
utilization_ratio (ratio): Share of the time a kernel was running.
memory_utilization_ratio (ratio): Share of the time device memory was read or written.
memory_used_bytes (bytes): Device memory in use, without what the driver reserves.
memory_total_bytes (bytes): Total device memory.
memory_reserved_bytes (bytes): Device memory reserved by the driver.
temperature_celsius (celsius): Core temperature.
memory_temperature_celsius (celsius): Temperature of the device memory.
power_watts (watts): Power draw.
power_limit_watts (watts): Enforced power limit.
energy_joules (joules, counter): Energy used since the driver loaded.
sm_clock_hertz (hertz): Clock of the streaming multiprocessors.
memory_clock_hertz (hertz): Clock of the device memory.
throttle_reasons (i8): NVML bit mask of clock throttle reasons.
ecc_corrected_errors (i8, counter): Corrected memory errors since the driver loaded.
ecc_uncorrected_errors (i8, counter): Uncorrected memory errors since the driver loaded.
last_xid (i8): Xid of the GPU's last error; absent if none occurred since the agent started.
remapped_rows_corrected (i8, counter): Memory rows remapped after corrected errors.
remapped_rows_uncorrected (i8, counter): Memory rows remapped after uncorrected errors.
row_remap_pending (i8): 1 while a memory row waits for a GPU reset to be remapped.
row_remap_failed (i8): 1 if remapping a memory row failed.
pcie_receive_bytes_per_second (bytes): PCIe receive rate, measured over 20 ms of the sample.
pcie_transmit_bytes_per_second (bytes): PCIe transmit rate, measured over 20 ms of the sample.
pcie_replays (i8, counter): PCIe packets that were resent.
nvlink_receive_bytes (bytes, counter): Bytes received, all NVLinks.
nvlink_transmit_bytes (bytes, counter): Bytes sent, all NVLinks.
nvlink_crc_errors (i8, counter): Flow-control CRC errors, all NVLinks.
nvlink_replay_errors (i8, counter): Retried transmissions, all NVLinks.
nvlink_recovery_errors (i8, counter): Link recoveries after an error, all NVLinks.
""",
)

NODE_METRICS = _host_metrics(
    "node",
    """
cpu_ratio (ratio): Share of all CPU cores in use.
load1: Load average over one minute.
memory_used_bytes (bytes): Memory in use, without caches.
memory_total_bytes (bytes): Total memory.
swap_used_bytes (bytes): Swap in use.
shm_free_bytes (bytes): Free space in the journals' folder (shared memory).
disk_read_bytes (bytes, counter): Bytes read from local disks.
disk_write_bytes (bytes, counter): Bytes written to local disks.
network_receive_bytes (bytes, counter): Bytes received.
network_transmit_bytes (bytes, counter): Bytes sent.
network_receive_errors (i8, counter): Received packets that were damaged or dropped.
network_transmit_errors (i8, counter): Packets that failed to send or were dropped.
pressure_cpu_waiting_seconds (seconds, counter): Time in which some task waited for a processor.
pressure_memory_waiting_seconds (seconds, counter): Time in which some task waited for memory.
pressure_memory_stalled_seconds (seconds, counter): Time in which all tasks waited for memory.
pressure_io_waiting_seconds (seconds, counter): Time in which some task waited for a disk.
pressure_io_stalled_seconds (seconds, counter): Time in which all tasks waited for a disk.
""",
)

PROCESS_METRICS = _host_metrics(
    "process",
    """
alive (i8): 1 while the rank's process exists.
cpu_seconds (seconds, counter): CPU time of the rank, user and system.
resident_memory_bytes (bytes): Resident memory of the rank.
threads (i8): Threads of the rank.
open_fds (i8): Open file descriptors of the rank.
io_read_bytes (bytes, counter): Bytes the rank read from disks.
io_write_bytes (bytes, counter): Bytes the rank wrote to disks.
major_page_faults (i8, counter): Memory pages of the rank that were read from disk.
voluntary_context_switches (i8, counter): Times the rank gave up its CPU core to wait.
involuntary_context_switches (i8, counter): Times the kernel took the CPU core away from the rank.
""",
)


def _sample_schema(
    stream: str, keys: tuple[Column, ...], metrics: tuple[MetricSpec, ...]
) -> Schema:
    """Return the row schema of a stream of the agent's samples."""
    return Schema(stream, ROW_COLUMNS + keys + tuple(Column(m.column, m.dtype) for m in metrics))


GPU_SCHEMA = _sample_schema("gpu", (), GPU_METRICS)
NODE_SCHEMA = _sample_schema("node", (), NODE_METRICS)
PROCESS_SCHEMA = _sample_schema(
    "process", (Column("rank", "i8"), Column("pid", "i8")), PROCESS_METRICS
)
"""Node and process rows carry step -1 and attempt 0: they are ordered by time, not by step."""


def _exposed_metrics(table: str) -> tuple[MetricSpec, ...]:
    """Return the catalog entries of the metrics that only ``/metrics`` exposes.

    Their kind and scope follow from the name, except that of the training hooks.
    """
    kinds: dict[str, Kind] = {"total": "counter", "info": "info"}
    scopes: dict[str, Scope] = {"train": "run", "agent": "agent", "collector": "collector"}
    return tuple(
        MetricSpec(
            name=row.name,
            help=row.text,
            unit=row.unit,
            kind=kinds.get(row.name.rpartition("_")[2], "gauge"),
            scope="hooks" if "hooks" in row.words else scopes[row.name.partition("_")[0]],
            labels=row.labels,
        )
        for row in read_metric_rows(table)
    )


EXPOSED_METRICS = _exposed_metrics(
    """
train_step{run}: Last step seen.
train_steps_total{run}: Attempted steps seen.
train_skipped_steps_total{run, reason}: Updates skipped, apart from the steps of rollbacks and
    halts.
train_rollbacks_total{run, reason}: Rollbacks done.
train_lost_steps_total{run}: Lost work: steps that were skipped or that a rollback discarded.
train_dropped_batches_total{run}: Batches that rollbacks skipped: the model has not seen them.
train_goodput_seconds_total{run, bucket} (seconds): Wall time by its use. A step that is discarded
    later keeps its first bucket, and is also counted as rolled_back. Computing it takes at most
    about 2% of the time, so for a very long run it may be minutes old.
train_nonfinite_total{run}: Steps with a non-finite loss or gradient.
train_run_state{run, state}: 1 for the run's current state.
train_run_info{run, name, project, mode}: Attributes of a run; the value is 1.
train_swallowed_errors_total{run, where} (hooks): Internal errors of Vitals that were contained;
    training continued.
agent_cycle_age_seconds (seconds): Time since the agent last finished a cycle.
agent_spool_bytes (bytes): Bytes in the spool.
agent_memory_spools: Runs whose spool is in memory because their disk is full.
agent_spooled_rows_total: Rows written to the spool.
agent_shipped_rows_total: Rows the collector has stored.
agent_dropped_rows_total: Rows lost before the spool, or dropped from it when it was full.
agent_corrupt_rows_total: Rows or batches set aside because of a checksum mismatch.
agent_ship_errors_total: Failed attempts to reach the collector.
agent_commands_total: Commands delivered to mailboxes.
agent_part_failures_total{part}: Failures contained in one part of the agent; the other parts kept
    running.
collector_ingested_rows_total: New rows stored.
collector_duplicate_rows_total: Duplicate rows received and not stored.
collector_lost_rows_total: Rows that never arrived or that cannot be read from a spool.
collector_damaged_stretches_total: Damaged sections of spools in followed folders that were skipped.
collector_damaged_batches_total: Stored batches or columns with a checksum mismatch; they are left
    out.
collector_unmerged_rows_total: Per-rank rows that arrived after their step was merged, or never: the
    detectors ran without them.
collector_rows_left_to_store_total: Rows that did not fit in memory; the detectors read them from
    the store.
collector_dropped_samples_total: GPU samples that the detectors did not see because their node's
    rows did not arrive.
collector_thinned_rows_total{stream, reason}: Rows removed by thinning because they were old (age)
    or their run was above its cap (size).
collector_removed_runs_total{reason}: Runs removed.
collector_forgotten_rows_total: Rows of removed runs that were acknowledged but not stored.
collector_runs_over_cap: Runs above their cap that cannot be thinned further.
collector_rejected_batches_total{reason}: Batches rejected.
collector_refused_requests_total{reason}: Requests refused for want of a right (401, 403), by error
    code.
collector_deferred_bodies_total: Request bodies deferred for lack of memory; the agent sends them
    again.
collector_part_failures_total{part}: Failures contained in one part of the collector; it retries.
collector_alert_firing{run, alert, severity, cause}: 1 while the alert fires, 0 for a day after it
    resolved, and while it is silenced. The cause tells alerts of one name apart: 32 of each run,
    then `others`.
collector_alerts_total{alert, severity}: Alerts that started firing.
collector_notifications_total{notifier, outcome}: Notifications by outcome.
collector_remote_writes_total{outcome}: Pushes of run metrics by remote write, by outcome.
collector_commands_total{status}: Commands by status.
"""
)

CATALOG: tuple[MetricSpec, ...] = (
    STEP_METRICS + LAYER_METRICS + GPU_METRICS + NODE_METRICS + PROCESS_METRICS + EXPOSED_METRICS
)


def find_metric(name: str) -> MetricSpec:
    """Return the metric of that name, given as exposed or as ``stream.column``.

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
