"""Cost of writing a step: the journal's row compared with widely used loggers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trainvitals.catalog import steps_schema
from trainvitals.io.journal_reader import JournalReader
from trainvitals.rows import column_of, rows_of
from vitals_bench.guard.sinks import PAUSE_SECONDS, Nothing, Ours, Twelve
from vitals_bench.measure import Call, halves, interleave, medians
from vitals_bench.peers.loggers import NAMES, is_installed, open_logger
from vitals_bench.rows import Goal, Row, at_most, exactly, ratio_at_most

LOGGED: dict[str, tuple[str, Goal | None, Goal | None]] = {
    "wandb": ("wandb.log, offline", ratio_at_most(1 / 30), ratio_at_most(1 / 20)),
    "tensorboard": ("12 SummaryWriter.add_scalar", ratio_at_most(1 / 20), None),
    "mlflow": ("mlflow.log_metrics, not waited for", None, None),
}
"""How a logger is called, and the goals for the thread and for all threads and children."""


def measure_saying(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of one thread, of all threads and children, of memory and of a kill."""
    yield from _beside_gauges(rounds=200 if quick else 1000)
    yield from _beside_loggers(steps=100 if quick else 1000)
    yield _memory(steps=10_000 if quick else 100_000)
    yield _killed(steps=200 if quick else 1500)


def _beside_gauges(rounds: int) -> Iterator[Row]:
    """In one process and in turns: after a pause, and after work that takes the cache."""
    values = [1.0 + i / 7 for i in range(len(NAMES))]
    twelve, whole = Twelve(), Ours()
    arms: dict[str, Call] = {
        "twelve": partial(twelve.log, 5, values),
        "row": whole.row(),
        "step": whole.step,
        "nothing": partial(Nothing().log, 5, values),
    }
    if is_installed("prometheus-client"):
        arms["gauges"] = partial(open_logger("prometheus-client", Path()).log, 5, values)
    weights = torch.randn(1_000_000)
    pause = partial(time.sleep, PAUSE_SECONDS)
    yield from _gauge_rows(arms, rounds, "a call every 2 ms", pause, ratio_at_most(1.0))
    work = partial(weights.mul_, 1.0)
    yield from _gauge_rows(arms, rounds, "after work that takes the cache", work, None)
    twelve.close()
    whole.close()


def _gauge_rows(
    arms: Mapping[str, Call], rounds: int, when: str, between: Call, goal: Goal | None
) -> Iterator[Row]:
    clock = time.thread_time_ns
    times = interleave(arms, rounds=rounds, warm_up=20, between=between, clock_ns=clock)
    median_us = medians(times, scale=1e6)
    median_us = {name: value - median_us["nothing"] for name, value in median_us.items()}
    size = len(steps_schema().columns)
    for arm, name, limit in (
        ("twelve", "a journal row of 12 scalars", goal),
        ("row", f"a step's journal row, {size} columns", goal),
        ("step", "the same with its gathering from the step's numbers", None),
    ):
        yield Row(
            name=f"{name}: CPU of the training thread, {when}",
            ours=median_us[arm],
            unit="us",
            peer="12 prometheus Gauge.set, bound before",
            theirs=median_us.get("gauges"),
            goal=limit,
            spread=halves(times["gauges"]) if "gauges" in times else None,
            note="" if "gauges" in median_us else "prometheus-client: not installed",
        )


def _beside_loggers(steps: int) -> Iterator[Row]:
    """Each in a separate process: children and threads could not be attributed in one."""
    base, twelve, ours = (_in_process(name, steps) for name in ("nothing", "twelve", "ours"))
    for peer, (call, goal, goal_of_all) in LOGGED.items():
        theirs = _in_process(peer, steps) if is_installed(peer) else {}
        for what, figure, mine, limit in (
            ("12 scalars: CPU of the training thread", "thread_us", twelve, goal),
            (
                "a step, and keeping it: CPU of all threads and children",
                "cpu_us",
                ours,
                goal_of_all,
            ),
        ):
            yield Row(
                name=f"saying {what}",
                ours=mine[figure] - base[figure],
                unit="us",
                peer=call,
                theirs=theirs[figure] - base[figure] if theirs else None,
                goal=limit,
                note="a call every 2 ms" if theirs else f"{peer}: not installed",
            )


def _memory(steps: int) -> Row:
    grown = _in_process("growth", steps)["growth_bytes"]
    return Row(
        name=f"memory that {steps:,} rows add",
        ours=grown / 1e6,
        unit="MB",
        goal=at_most(5.0),
    )


def _killed(steps: int) -> Row:
    """Count the rows that a SIGKILL right after the last one takes along."""
    report = _in_process("kill", steps)
    journal = Path(str(report["journal"]))
    seen: set[int] = set()
    for batch in JournalReader(journal).read(max_rows=100_000):
        schema = batch.header.stream_schema
        if schema.stream == "steps":
            seen.update(column_of(schema, rows_of(schema, batch.rows), "step")[0].tolist())
    shutil.rmtree(journal.parents[2])
    return Row(
        name=f"rows lost to SIGKILL, of {steps:,}",
        ours=len(set(range(1000, 1000 + steps)) - seen),
        unit="rows",
        goal=exactly(0),
    )


def _in_process(name: str, steps: int) -> dict[str, float]:
    with TemporaryDirectory(prefix="vitals-bench-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "vitals_bench.guard.sinks", name, str(steps), folder],
            env={**os.environ, "TMPDIR": folder},  # one that is killed cleans up nothing
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{name} said nothing: {done.stderr[-2000:]}")
    report: dict[str, float] = json.loads(lines[-1])
    return report
