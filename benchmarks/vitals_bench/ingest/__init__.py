"""`vitals bench ingest`: what it costs to take records in, beside the servers others use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.cost import measure_cost
from vitals_bench.ingest.fleet import measure_fleet
from vitals_bench.ingest.stored import measure_bytes, measure_store
from vitals_bench.rows import Row

__all__ = ["PARTS", "Asked"]

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "cost": measure_cost,
    "fleet": measure_fleet,
    "store": measure_store,
    "bytes": measure_bytes,
}
"""Each is called with ``quick`` and, where something else was asked for, with ``asked``."""
