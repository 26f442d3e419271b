"""The benchmark `detect`: found and missed events, and false alarms, of our detectors and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.detect.cost import measure_cost
from vitals_bench.detect.logs import Logs
from vitals_bench.detect.measure import measure_logs, measure_shapes
from vitals_bench.detect.trained import measure_trained
from vitals_bench.rows import Grid, Row

__all__ = ["PARTS", "Logs"]

PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {
    "shapes": measure_shapes,
    "trained": measure_trained,
    "logs": measure_logs,
    "cost": measure_cost,
}
"""Each is called with ``quick`` and, where one was named, the folder of labelled logs."""
