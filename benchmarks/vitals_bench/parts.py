"""The parts of the way a row takes: journal, reader, wire, judge. No goals, no peers."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.io.journal import JournalWriter
from trainvitals.io.journal_reader import JournalReader
from trainvitals.io.private import private_base
from trainvitals.policy import Judge, StepInputs
from trainvitals.records import StepRecord
from trainvitals.rows import Value
from trainvitals.wire import Batch, decode_batch, encode_batch
from vitals_bench.rows import Row


def identity() -> Identity:
    """Return the identity of a rank that never was."""
    return Identity(
        run_id=new_run_id(time.time_ns()),
        incarnation=new_incarnation(),
        source="rank:0",
        node="bench",
    )


def measure_parts(*, quick: bool) -> Iterator[Row]:
    """Yield the cost of each part."""
    rounds = 20 if quick else 400
    with TemporaryDirectory(dir=private_base(os.environ)) as directory:
        yield from _measure_journal(Path(directory) / "journal", rounds)
    yield _measure_judge(rounds)


def _cost(name: str, call: Callable[[], object], *, rounds: int, inner: int = 1) -> Row:
    """Return the cost of one call; ``inner`` calls are timed together where one is too short."""
    call()
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(inner):
            call()
        times.append((time.perf_counter_ns() - start) / inner / 1e3)
    return Row(name=name, ours=statistics.median(times), unit="us")


def _measure_journal(directory: Path, rounds: int) -> Iterator[Row]:
    schema = steps_schema()
    journal = JournalWriter(directory, identity(), max_bytes=8 << 20)
    stream = journal.open_stream(schema)
    row: list[Value] = [i if c.kind == "i8" else i / 7 for i, c in enumerate(schema.columns)]
    name = f"journal: append a row of {len(row)} values, in a tight loop"
    yield _cost(name, lambda: stream.append(row), rounds=rounds, inner=20)
    read = partial(_read, directory)
    yield _cost("journal: find and read 100 rows", read, rounds=rounds // 10)
    batch = read()[0]
    raw = encode_batch(batch.header, batch.rows)
    encode = lambda: encode_batch(batch.header, batch.rows)  # noqa: E731
    yield _cost(f"wire: encode {batch.header.num_rows} rows", encode, rounds=rounds)
    yield _cost("wire: decode and verify them", lambda: decode_batch(raw), rounds=rounds)
    journal.close()


def _read(directory: Path) -> list[Batch]:
    return JournalReader(directory).read(max_rows=100)


def _measure_judge(rounds: int) -> Row:
    judge, steps = Judge(), itertools.count()

    def step() -> None:
        i = next(steps)
        record = StepRecord(step=i, attempt=1, loss=3.0 + i % 7 / 50, grad_norm=1.0 + i % 5 / 50)
        judge.judge(record, StepInputs(i + 1))
        judge.limits()

    name = "judge: detectors, escalation policy and limits of a step"
    return _cost(name, step, rounds=rounds, inner=20)
