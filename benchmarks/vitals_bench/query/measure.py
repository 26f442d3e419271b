"""Overview, full resolution and a post-mortem of a long run, compared with SQL over wide rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import msgspec
import sqlalchemy
from sqlalchemy import Table, func, select

from trainvitals.clock import SystemClock
from trainvitals.views import (
    CheckpointsQuestion,
    DecisionsQuestion,
    EventsQuestion,
    FindingsQuestion,
    ManySeriesQuestion,
    RunQuestion,
    RunsQuestion,
    SeriesQuestion,
    SeriesReply,
    SeriesRequest,
    StepQuestion,
)
from vitals_bench import wide
from vitals_bench.measure import halves, interleave, medians
from vitals_bench.query.filling import Filling, Planted, Size
from vitals_bench.rows import Row, at_most, exactly, ratio_at_most
from vitals_collector.numbers.interface import AttemptRow, Points
from vitals_collector.queries import series
from vitals_collector.queries.query import Query
from vitals_collector.queries.why import explain_step
from vitals_collector.storage.store import Store, open_data_store

METRIC = "steps.loss"
NUM_POINTS = 2_000
NUM_CHARTS = 9
PAGE_MS = 105.0
"""What the store of chunks took for it, before the lake."""
_ZOOM_STEPS = 20_000
FULL = Size(num_steps=1_000_000, num_metrics=50)
QUICK = Size(num_steps=100_000, num_metrics=10, rounds=3)


def measure_query(*, quick: bool) -> Iterator[Row]:
    """Yield overview, full resolution and post-mortem of one run."""
    yield from measure_size(QUICK if quick else FULL)


def measure_size(size: Size) -> Iterator[Row]:
    """Yield the rows for a run of this size."""
    filling, table = Filling(size), wide.wide_table(Filling(size).names, has_index=False)
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        place = Path(folder)
        with wide.sqlite_store(place, "theirs") as theirs:
            filling.fill_wide(theirs, table)
            with wide.sqlite_store(place, "ours") as ours:
                filling.fill(ours, is_merged=False)
                yield from _whole(Asking(ours, filling), theirs, table, "never merged")
                wide.merge(ours)
            begin = time.monotonic()
            with closing(open_data_store(place / "ours")) as ours:
                asked = Asking(ours, filling)
                asked.overview()
                seconds = time.monotonic() - begin
                yield Row(name="from opening a store to its first overview", ours=seconds, unit="s")
                yield from _overview(asked, theirs, table)
                yield from _page(asked)
                yield from _whole(asked, theirs, table, "merged")
                yield from _post_mortem(asked)


class Asking:
    """The questions to our store, answered as its HTTP routes do: through ``Query``, as JSON."""

    def __init__(self, store: Store, filling: Filling) -> None:
        self.store, self.filling, self.size = store, filling, filling.size
        self._query = Query(store, clock=SystemClock())

    @property
    def words(self) -> str:
        """The run's size for people."""
        return f"{self.size.num_steps:,} steps x {self.size.num_metrics} metrics"

    def overview(self, query: Query | None = None) -> SeriesReply:
        """Return the curve of all steps."""
        run_id = self.filling.run_id
        asked = SeriesQuestion(run_id=run_id, metric=METRIC, points=NUM_POINTS)
        return (query or self._query).ask(asked)

    def first_overview(self) -> SeriesReply:
        """Return the same of a collector that nobody has asked before: it remembers nothing."""
        return self.overview(Query(self.store, clock=SystemClock()))

    def zoom(self) -> SeriesReply:
        """Return the curve about the incident."""
        at = self.filling.incident
        return self._query.ask(
            SeriesQuestion(
                run_id=self.filling.run_id,
                metric=METRIC,
                points=NUM_POINTS,
                from_step=at - _ZOOM_STEPS // 2,
                to_step=at + _ZOOM_STEPS // 2,
            )
        )

    def whole(self) -> Points:
        """Return every point of the curve."""
        with self.store.read_transaction() as connection:
            moment = self.store.snapshot_on(connection)
            _, curve = series.curve_of(moment, self.filling.run_id, METRIC, "")
            (drawn,) = moment.numbers.curves([curve], [AttemptRow(1, None, 0)], "lineage")
            return drawn.points

    def page(self) -> tuple[SeriesReply, ...]:
        """Return the charts of a page, of a collector that nobody has asked before."""
        asked = [
            SeriesRequest(metric=f"steps.{name}", points=NUM_POINTS)
            for name in self.filling.names[:NUM_CHARTS]
        ]
        query = Query(self.store, clock=SystemClock())
        return query.ask(ManySeriesQuestion(run_id=self.filling.run_id, series=tuple(asked)))

    def why(self) -> str:
        """Return the paragraph about the incident."""
        run, query = self.filling.run_id, self._query
        return explain_step(
            query.ask(RunQuestion(run_id=run)).summary,
            query.ask(StepQuestion(run_id=run, step=self.filling.incident)),
            query.ask(DecisionsQuestion(run_id=run)),
        )

    def post_mortem(self) -> dict[str, Callable[[], object]]:
        """Return the ten questions by name."""
        run, query = self.filling.run_id, self._query
        return {
            "runs": lambda: query.ask(RunsQuestion()),
            "run": lambda: query.ask(RunQuestion(run_id=run)),
            "overview": self.overview,
            "zoom": self.zoom,
            "step": lambda: query.ask(StepQuestion(run_id=run, step=self.filling.incident)),
            "decisions": lambda: query.ask(DecisionsQuestion(run_id=run)),
            "findings": lambda: query.ask(FindingsQuestion(run_id=run)),
            "checkpoints": lambda: query.ask(CheckpointsQuestion(run_id=run)),
            "events": lambda: query.ask(EventsQuestion(run_id=run)),
            "why": self.why,
        }


def num_hidden(reply: SeriesReply, planted: Planted) -> int:
    """Return how many of the planted spikes and non-finite values an answer does not show."""
    drawn = dict(zip(reply.step, reply.value, strict=True))
    marked = {mark.step: mark.kind for mark in reply.nonfinite}
    kinds = {"nan": "nan", "inf": "+inf", "-inf": "-inf"}
    hidden = sum(drawn.get(step) != value for step, value in planted.spikes.items())
    return hidden + sum(
        marked.get(step) != kinds[str(value)] for step, value in planted.nonfinite.items()
    )


def _overview(asked: Asking, theirs: Store, table: Table) -> Iterator[Row]:
    bucket = table.c.step / max(1, asked.size.num_steps // (NUM_POINTS // 2))
    value, bucket = table.c.loss, sqlalchemy.cast(bucket, sqlalchemy.Integer)
    grouped = select(
        bucket, func.min(value), func.max(value), func.count() - func.count(value)
    ).group_by(bucket)
    times = interleave(
        {
            "ours": lambda: msgspec.json.encode(asked.first_overview()),
            "theirs": lambda: _fetch(theirs, grouped),
        },
        rounds=asked.size.rounds,
        warm_up=1,
        clock_ns=time.process_time_ns,
    )
    median_ms = medians(times, scale=1e3)
    planted = asked.filling.planted
    name = f"overview of 2,000 points, {asked.words}"
    yield Row(
        name=name,
        ours=median_ms["ours"],
        unit="ms",
        peer="SQL GROUP BY over wide rows",
        theirs=median_ms["theirs"],
        goal=ratio_at_most(1 / 150),
        spread=halves(times["theirs"]),
        note="CPU; ours asked for the first time; theirs is a table of this run alone; "
        f"ours against itself {100 * halves(times['ours']):.0f} %; DuckDB {duckdb.__version__}, "
        f"{wide.engine_words(theirs)}, SQLAlchemy {sqlalchemy.__version__}",
    )
    yield Row(name=f"{name}, by itself", ours=median_ms["ours"], unit="ms", goal=at_most(30.0))
    num = len(planted.spikes) + len(planted.nonfinite)
    yield Row(
        name=f"of {num} planted one-step spikes, NaNs and infinities, hidden in the overview",
        ours=float(num_hidden(asked.overview(), planted)),
        unit="of them",
        goal=exactly(0),
    )


def _page(asked: Asking) -> Iterator[Row]:
    times = interleave(
        {"ours": lambda: msgspec.json.encode(asked.page())},
        rounds=asked.size.rounds,
        warm_up=1,
        clock_ns=time.process_time_ns,
    )["ours"]
    yield Row(
        name=f"{NUM_CHARTS} such overviews in one question, {asked.words}",
        ours=1e3 * statistics.median(times),
        unit="ms",
        goal=at_most(PAGE_MS),
        note=f"CPU; ours against itself {100 * halves(times):.0f} %",
    )


def _whole(asked: Asking, theirs: Store, table: Table, when: str) -> Iterator[Row]:
    rows = select(table.c.step, table.c.loss).order_by(table.c.step)
    num = len(asked.whole()), len(_fetch(theirs, rows))
    if num != (asked.size.num_steps,) * 2:
        raise RuntimeError(f"of {asked.size.num_steps} steps, ours and theirs read {num}")
    times = interleave(
        {"ours": asked.whole, "theirs": lambda: _fetch(theirs, rows)},
        rounds=asked.size.rounds,
        warm_up=1,
        clock_ns=time.process_time_ns,
    )
    median_ms = medians(times, scale=1e3)
    yield Row(
        name=f"every step of a metric, {when}, {asked.words}",
        ours=median_ms["ours"],
        unit="ms",
        peer="fetching wide rows",
        theirs=median_ms["theirs"],
        goal=ratio_at_most(1 / 20 if when == "merged" else 1 / 10),
        spread=halves(times["theirs"]),
        note=f"CPU; steps, times and values as arrays, against rows of step and value; "
        f"ours against itself {100 * halves(times['ours']):.0f} %",
    )


def _fetch(store: Store, query: sqlalchemy.Executable) -> list[object]:
    with store.read_transaction() as connection:
        return list(connection.execute(query).all())


def _post_mortem(asked: Asking) -> Iterator[Row]:
    questions = asked.post_mortem()
    num_ranks = len(msgspec.to_builtins(questions["step"]())["rows"])
    if num_ranks != asked.size.num_ranks:
        raise RuntimeError(f"the step has rows of {num_ranks} of {asked.size.num_ranks} ranks")
    seconds: dict[str, list[float]] = {name: [] for name in questions}
    for _ in range(asked.size.rounds):
        for name, question in questions.items():
            begin = time.process_time()
            msgspec.json.encode(question())
            seconds[name].append(time.process_time() - begin)
    each = {name: statistics.median(times) for name, times in seconds.items()}
    slowest = sorted(each, key=lambda name: -each[name])[:3]
    together = [sum(times) for times in zip(*seconds.values(), strict=True)]
    yield Row(
        name=f"ten queries of a post-mortem together, {asked.size.num_ranks} ranks, {asked.words}",
        ours=statistics.median(together),
        unit="s",
        goal=at_most(1.0),
        spread=halves(together),
        note="CPU; the longest: "
        + ", ".join(f"{name} {1e3 * each[name]:.1f} ms" for name in slowest),
    )
