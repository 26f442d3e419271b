"""The benchmark `judgement`: real small trainings, healthy and not, with the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.judgement.jobs import Asked
from vitals_bench.judgement.measure import measure_trainings
from vitals_bench.rows import Grid, Row

__all__ = ["PARTS", "Asked"]

PARTS: Mapping[str, Callable[..., Iterator[Row | Grid]]] = {"trainings": measure_trainings}
"""Each is called with ``quick`` and what was asked for on the command line."""
