"""The benchmark `numbers`: cost of storing rows in the lake, and of maintenance meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.later import later
from vitals_bench.rows import Row

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "commits": later("vitals_bench.numbers.commits", "measure_commits"),
    "merging": later("vitals_bench.numbers.merging", "measure_merging"),
}
"""Each is called with ``quick`` and yields its rows."""
