"""The benchmark `ingest`: cost of ingesting records, compared with other servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.ingest.asked import Asked
from vitals_bench.later import later
from vitals_bench.rows import Row

__all__ = ["PARTS", "Asked"]

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "cost": later("vitals_bench.ingest.cost", "measure_cost"),
    "transport": later("vitals_bench.ingest.transport", "measure_transport"),
    "idle": later("vitals_bench.ingest.idle", "measure_idle"),
    "fleet": later("vitals_bench.ingest.fleet", "measure_fleet"),
    "alert": later("vitals_bench.ingest.fleet", "measure_alert"),
    "cluster": later("vitals_bench.ingest.cluster", "measure_cluster"),
    "store": later("vitals_bench.ingest.stored", "measure_store"),
    "bytes": later("vitals_bench.ingest.stored", "measure_bytes"),
}
"""Each is called with ``quick`` and, where something else was asked for, with ``asked``."""
