"""The benchmark `dashboard`: time to paint a long run, and completeness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.dashboard.asked import Asked
from vitals_bench.later import later
from vitals_bench.rows import Row

__all__ = ["PARTS", "Asked"]

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "page": later("vitals_bench.dashboard.painted", "measure_page"),
    "peers": later("vitals_bench.dashboard.peers", "measure_peers"),
}
"""Each is called with ``quick`` and, where something else was asked for, with ``asked``."""
