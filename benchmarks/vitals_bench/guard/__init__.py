"""The benchmark `guard`: cost of the guard, and its properties compared with peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.guard.averages import measure_averages
from vitals_bench.guard.fixed import measure_fixed
from vitals_bench.guard.loop import measure_loop
from vitals_bench.guard.norms import measure_norms
from vitals_bench.guard.pipelined import measure_pipelined
from vitals_bench.guard.reads import measure_reads
from vitals_bench.guard.rules import measure_rules
from vitals_bench.guard.saying import measure_saying
from vitals_bench.guard.sharded import measure_sharded
from vitals_bench.guard.steps import measure_steps
from vitals_bench.rows import Row

Part = Callable[..., Iterator[Row]]

PARTS: Mapping[str, Part] = {
    "norms": measure_norms,
    "sharded": measure_sharded,
    "pipelined": measure_pipelined,
    "steps": measure_steps,
    "fixed": measure_fixed,
    "averages": measure_averages,
    "rules": measure_rules,
    "saying": measure_saying,
    "loop": measure_loop,
    "reads": measure_reads,
}
"""Each is called with ``quick`` and yields its rows."""
