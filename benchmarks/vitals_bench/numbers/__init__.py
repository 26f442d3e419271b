"""The bench `numbers`: the lake beside the store of chunks that it is to replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.later import later
from vitals_bench.rows import Row

PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "commits": later("vitals_bench.numbers.commits", "measure_commits"),
    "questions": later("vitals_bench.numbers.questions", "measure_questions"),
    "ranks": later("vitals_bench.numbers.questions", "measure_ranks"),
}
"""Each is called with ``quick`` and yields its rows."""
