"""The benchmark `posttraining`: real small trainings of each kind, healthy and with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.posttraining.measure import measure_trainings
from vitals_bench.rows import Grid, Row

__all__ = ["PARTS"]

PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {"trainings": measure_trainings}
"""Each is called with ``quick`` and ``options``."""
