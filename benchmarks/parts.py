"""The parts of the way a row takes: journal, reader, wire, judge."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Cost, measure
from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.io.journal import JournalWriter
from trainvitals.io.journal_reader import JournalReader
from trainvitals.io.private import private_base
from trainvitals.policy import Judge
from trainvitals.records import StepRecord
from trainvitals.rows import Value
from trainvitals.wire import decode_batch, encode_batch


def identity() -> Identity:
    """Return the identity of a rank that never was."""
    return Identity(
        run_id=new_run_id(time.time_ns()),
        incarnation=new_incarnation(),
        source="rank:0",
        node="bench",
    )


def measure_parts(*, quick: bool) -> Iterator[Cost]:
    """Yield the cost of each part."""
    rounds = 20 if quick else 400
    with TemporaryDirectory(dir=private_base({})) as directory:
        yield from _measure_journal(Path(directory) / "journal", rounds)
    yield _measure_judge(rounds)


def _measure_journal(directory: Path, rounds: int) -> Iterator[Cost]:
    schema = steps_schema()
    journal = JournalWriter(directory, identity(), max_bytes=8 << 20)
    stream = journal.open_stream(schema)
    row: list[Value] = [i if c.kind == "i8" else i / 7 for i, c in enumerate(schema.columns)]
    yield measure(
        f"journal: append a row of {len(row)} values",
        lambda: stream.append(row),
        rounds=rounds,
        inner=20,
    )
    yield measure(
        "journal: find and read 100 rows",
        lambda: JournalReader(directory).read(max_rows=100),
        rounds=rounds // 10,
    )
    batch = JournalReader(directory).read(max_rows=100)[0]
    raw = encode_batch(batch.header, batch.rows)
    yield measure(
        f"wire: encode {batch.header.num_rows} rows",
        lambda: encode_batch(batch.header, batch.rows),
        rounds=rounds,
    )
    yield measure("wire: decode and verify them", lambda: decode_batch(raw), rounds=rounds)
    journal.close()


def _measure_judge(rounds: int) -> Cost:
    judge, steps = Judge(), itertools.count()

    def step() -> None:
        i = next(steps)
        record = StepRecord(step=i, attempt=1, loss=3.0 + i % 7 / 50, grad_norm=1.0 + i % 5 / 50)
        judge.judge(record, decided_at_step=i + 1)
        judge.limits()

    return measure("judge: detectors, ladder and limits of a step", step, rounds=rounds, inner=20)
