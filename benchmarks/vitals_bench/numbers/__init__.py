"""The bench `numbers`: what it costs to store rows in the lake, and to tidy it up meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.later import later
from vitals_bench.rows import Row

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "commits": later("vitals_bench.numbers.commits", "measure_commits"),
    "merging": later("vitals_bench.numbers.merging", "measure_merging"),
}
"""Each is called with ``quick`` and yields its rows."""
