"""The benchmark `query`: time to draw a long run, to read it whole, and to explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.later import later
from vitals_bench.rows import Row

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "query": later("vitals_bench.query.measure", "measure_query"),
    "ranks": later("vitals_bench.query.ranks", "measure_ranks"),
}
"""Each is called with ``quick`` and yields its rows."""
