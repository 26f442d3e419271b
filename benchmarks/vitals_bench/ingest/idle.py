"""Cost of an idle collector: after a run that has ended, maintenance included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from vitals_bench.ingest import servers
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.records import RANKS_PER_NODE, Numbers
from vitals_bench.rows import Row, at_most

_STEP_NS = 1_000_000_000
_NUM_STEPS = 100


def measure_idle(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield CPU and memory of a collector that nobody sends to, and how soon it starts."""
    yield from measure_seconds(8.0 if quick else 120.0)


def measure_seconds(seconds: float) -> Iterator[Row]:
    """Yield the rows for this many seconds after the last record."""
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        began = time.monotonic()
        with servers.ours(Path(folder), RANKS_PER_NODE) as server:
            starting = time.monotonic() - began
            begin_ns = time.time_ns() - _NUM_STEPS * _STEP_NS
            block = Numbers(RANKS_PER_NODE).block(
                0, _NUM_STEPS, begin_ns=begin_ns, step_ns=_STEP_NS
            )
            server.post(server.requests("idle", block, _NUM_STEPS, per_node=True))
            server.started.settle()
            began, before = time.monotonic(), server.started.cpu_seconds()
            time.sleep(seconds)
            used = (server.started.cpu_seconds() - before) / (time.monotonic() - began)
            resident = server.started.resident_bytes()
            of_files = server.started.file_bytes()
    yield Row(
        name="CPU of a collector while nothing comes",
        ours=100.0 * used,
        unit="% of a core",
        goal=at_most(1.0),
        note=f"over {seconds:.0f} s behind {_NUM_STEPS} steps of {RANKS_PER_NODE} ranks, upkeep"
        " once a minute included",
    )
    yield Row(
        name="memory of a collector while nothing comes",
        ours=resident / 1e6,
        unit="MB",
        goal=at_most(300.0),
        note=f"resident, at the end of these; {of_files / 1e6:.0f} MB are pages of libraries'"
        " files, of which a kernel maps more or fewer, and which it drops where it needs room",
    )
    yield Row(
        name="from the start of a collector to its address, nothing stored yet",
        ours=starting,
        unit="s",
        note="wall time",
    )
