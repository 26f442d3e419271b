"""The benchmark `checkpoint`: cost of a training's copy, and time until it continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.checkpoint.recovery import measure_recovery
from vitals_bench.checkpoint.snapshot import measure_restore, measure_take
from vitals_bench.checkpoint.writing import measure_writing
from vitals_bench.rows import Row

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "take": measure_take,
    "restore": measure_restore,
    "recovery": measure_recovery,
    "writing": measure_writing,
}
"""Each is called with ``quick`` and yields its rows."""
