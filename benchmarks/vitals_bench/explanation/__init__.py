"""The benchmark `explanation`: is the user shown the right step, rank, cause and first mover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.explanation.measure import measure_statements
from vitals_bench.rows import Grid, Row

__all__ = ["PARTS"]

PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {"statements": measure_statements}
"""Each is called with ``quick`` and ``options``."""
