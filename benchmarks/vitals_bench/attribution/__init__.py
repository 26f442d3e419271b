"""The benchmark `attribution`: faults in small trainings that are named as the origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.attribution.measure import measure_faults
from vitals_bench.rows import Grid, Row

__all__ = ["PARTS"]

PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {"faults": measure_faults}
"""Each is called with ``quick``."""
