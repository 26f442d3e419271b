"""Use of a run's time, from stored rows: reads the inputs of ``trainvitals.goodput``."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, select

from trainvitals.goodput import (
    Ended,
    EndedSteps,
    Floats,
    Goodput,
    Ints,
    Launch,
    TimeSpan,
    goodput,
)
from trainvitals.records import Finding, RankStarted, TrainingPaused
from trainvitals.views import AttemptGoodput, GoodputView, RunSummary
from vitals_collector.numbers.interface import (
    RANKS,
    Columns,
    NumberStoreReader,
    is_of_lineage,
    make_lineage_end_lookup,
)
from vitals_collector.numbers.interface import RowSpan as Rows
from vitals_collector.queries.cost import hours_and_money
from vitals_collector.queries.series import attempt_rows
from vitals_collector.storage.schema import events, findings, sources
from vitals_collector.storage.store import ReadSnapshot, Store

MAX_RANKS = 32
"""Maximum number of ranks whose waits are read; with more ranks, evenly chosen ones."""
_PARTS = ("data_wait_seconds", "checkpoint_seconds", "evaluation_seconds")
_WAITS = ("gradient_wait_seconds", "communication_seconds")
_ALL_ROWS = (0, 2**63 - 1)
_LOG = logging.getLogger("vitals.collector.goodput")
_decode_rank = msgspec.msgpack.Decoder(RankStarted).decode
_decode_pause = msgspec.msgpack.Decoder(TrainingPaused).decode
_decode_finding = msgspec.msgpack.Decoder(Finding).decode


def run_goodput(moment: ReadSnapshot, run: RunSummary, *, price: float = 0.0) -> GoodputView:
    """Query where a stored run's time went, and what it cost."""
    starts = _load_starts(moment.sql, run)
    if not starts:
        notes = ("No process of the run has reported.",)
        return GoodputView(run_id=run.run_id, name=run.name, state=run.state, notes=notes)
    steps = _load_ended_steps(moment, run.run_id, starts)
    launches = [start.launch for start in starts]
    hangs = _hangs(moment.sql, run.run_id, launches, steps)
    pauses = _pauses(moment.sql, run.run_id, launches)
    sums = goodput(launches, steps, hangs=hangs, pauses=pauses)
    energy = _energy(moment.numbers, run.run_id, sums.begin_unix_ns, sums.end_unix_ns)
    return _goodput_view(run, sums, price, energy, _goodput_notes(run, starts, steps))


# ------------------------------------------------------------------------------------ the launches


class _Start(NamedTuple):
    """One start of the training, with the incarnations of its ranks."""

    launch: Launch
    head: str
    """Rank 0's incarnation."""
    ranks: Mapping[int, str]
    """Incarnations of the other ranks."""


def _load_starts(connection: Connection, run: RunSummary) -> list[_Start]:
    """Query the starts of the training for a run's goodput, each with its times and ranks."""
    table = sources.c
    query = select(sources).where(table.run_id == run.run_id, table.rank >= 0)
    rows = connection.execute(query.order_by(table.started_unix_ns)).all()
    heads = [row for row in rows if row.rank == 0]
    begun, ready = _load_start_times(connection, run.run_id)
    starts = []
    for k, head in enumerate(heads):
        since = head.started_unix_ns if k else 0
        until = heads[k + 1].started_unix_ns if k + 1 < len(heads) else math.inf
        # Ranks of one launch start within a moment, and rank 0 opens its journal no earlier than
        # the process before it ended.
        other_ranks = [
            row for row in rows if row.rank and since <= row.started_unix_ns + _MOMENT_NS < until
        ]
        is_last = k + 1 == len(heads)
        launch = Launch(
            process_ns=begun.get(head.incarnation) or head.started_unix_ns,
            ready_ns=ready.get(head.incarnation, head.started_unix_ns),
            end_ns=head.ended_unix_ns or head.last_seen_unix_ns,
            ended=_launch_end(head, other_ranks, is_running=is_last and run.state == "running"),
            num_gpus=len({row.gpu_uuid for row in (head, *other_ranks)} - {""}),
        )
        starts.append(
            _Start(launch, head.incarnation, {row.rank: row.incarnation for row in other_ranks})
        )
    return starts


_MOMENT_NS = 1_000_000_000


def _launch_end(head: Row[Any], others: Sequence[Row[Any]], *, is_running: bool) -> Ended:
    """Return how a launch ended, for the goodput: one lost rank interrupts the others."""
    if not head.ended_state:
        return "running" if is_running else "lost"
    if head.ended_state == "interrupted" and any(
        row.ended_state == "failed" or (row.alive == 0 and not row.ended_state) for row in others
    ):
        return "failed"
    ended: Ended = head.ended_state
    return ended


def _load_start_times(connection: Connection, run_id: str) -> tuple[dict[str, int], dict[str, int]]:
    """Query when rank 0's processes started and when ``watch`` returned, for the goodput."""
    table = events.c
    query = select(table.incarnation, table.kind, table.time_unix_ns, table.body).where(
        table.run_id == run_id,
        table.source == "rank:0",
        table.kind.in_(("RankStarted", "AttemptStarted")),
    )
    begun: dict[str, int] = {}
    ready: dict[str, int] = {}
    for row in connection.execute(query.order_by(table.time_unix_ns)):
        if row.kind == "AttemptStarted":
            ready.setdefault(row.incarnation, row.time_unix_ns)
        elif row.body:
            begun.setdefault(row.incarnation, _decode_rank(row.body).process_started_unix_ns)
    return begun, ready


# --------------------------------------------------------------------------------------- the steps


def _load_ended_steps(moment: ReadSnapshot, run_id: str, starts: Sequence[_Start]) -> EndedSteps:
    """Query the ended steps of all launches for the goodput, and which were discarded."""
    parts = [_launch_columns(moment.numbers, run_id, k, start) for k, start in enumerate(starts)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    step = columns.pop("step")
    end_of = make_lineage_end_lookup(attempt_rows(moment.sql, run_id))
    is_kept = is_of_lineage(columns["attempt"], step, end_of)
    return EndedSteps(**columns, is_undone=~is_kept)


def _launch_columns(
    numbers: NumberStoreReader, run_id: str, index: int, start: _Start
) -> dict[str, np.ndarray[Any, Any]]:
    """Query one launch's steps for the goodput: rank 0's, with the parts of the mean rank."""
    span = Rows(run_id, "steps", seqs={start.head: _ALL_ROWS})
    names = ("step", "attempt", "time_unix_ns", "step_duration_seconds", "skipped")
    launch_rows = numbers.scan(span, [*names, *_PARTS, *_WAITS])
    order = np.argsort(launch_rows["time_unix_ns"].values, kind="stable")
    of = _float_columns(launch_rows, ("step_duration_seconds", "skipped", *_PARTS, *_WAITS), order)
    step, attempt, time_ns = (
        launch_rows[name].values.astype(np.int64)[order]
        for name in ("step", "attempt", "time_unix_ns")
    )
    over = _RankMeans(_keys(attempt, step), of)
    others = sorted(start.ranks)
    sampled_ranks = others[:: -(-len(others) // MAX_RANKS)] if others else []
    if sampled_ranks:
        over.add_rows(numbers, run_id, [start.ranks[rank] for rank in sampled_ranks])
        over.add_rolled_up(numbers, run_id)
    return {
        "step": step,
        "attempt": attempt,
        "end_unix_ns": time_ns,
        "launch": np.full(len(step), index, np.int64),
        "seconds": of["step_duration_seconds"],
        "is_skipped": np.nan_to_num(of["skipped"]) > 0,
        **over.means(),
    }


def _keys(attempt: Ints, step: Ints) -> Ints:
    """Return a key for each attempt's step, by which a goodput query averages the ranks.

    Two numbers are equal only if their attempts started 2^24 us = 17 s apart, to the microsecond.
    """
    return (attempt & 0xFFFFFF) << 39 | step & 0x7FFFFFFFFF


def _float_columns(
    rows: Columns, names: Iterable[str], which: np.ndarray[Any, Any]
) -> dict[str, Floats]:
    """Return the chosen rows of columns; NaN for missing values."""
    return {
        name: np.where(rows[name].is_missing, np.nan, rows[name].values.astype(np.float64))[which]
        for name in names
    }


class _RankMeans:
    """Sums the ranks' parts of each step of rank 0."""

    def __init__(self, keys: Ints, of_head: Mapping[str, Floats]) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self._head = of_head
        self._sums = {name: np.nan_to_num(of_head[name]) for name in _PARTS}
        self._num = np.ones(len(keys))
        wait = _wait_seconds(of_head)
        self._wait = np.nan_to_num(wait)
        self._num_waits = np.isfinite(wait).astype(np.float64)
        self._least = wait.copy()

    def _rows_of(self, rows: Columns) -> tuple[Ints, np.ndarray[Any, Any]]:
        """Match steps of other ranks to rows of rank 0 for a goodput query; mark the matches."""
        keys = _keys(rows["attempt"].values.astype(np.int64), rows["step"].values.astype(np.int64))
        if not len(self._sorted):
            return np.zeros(0, np.int64), np.zeros(len(keys), np.bool_)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        has_row = self._sorted[at] == keys
        return self._order[at[has_row]], has_row

    def add_rows(
        self, numbers: NumberStoreReader, run_id: str, incarnations: Sequence[str]
    ) -> None:
        """Add stored rows of other ranks to the means that a goodput query needs."""
        span = Rows(run_id, "steps", seqs=dict.fromkeys(incarnations, _ALL_ROWS))
        rows = numbers.scan(span, ["step", "attempt", *_PARTS, *_WAITS])
        at, has_row = self._rows_of(rows)
        columns = _float_columns(rows, (*_PARTS, *_WAITS), has_row)
        for name in _PARTS:
            np.add.at(self._sums[name], at, np.nan_to_num(columns[name]))
        np.add.at(self._num, at, 1.0)
        wait = _wait_seconds(columns)
        np.add.at(self._wait, at, np.nan_to_num(wait))
        np.add.at(self._num_waits, at, np.isfinite(wait))
        np.fmin.at(self._least, at, wait)

    def add_rolled_up(self, numbers: NumberStoreReader, run_id: str) -> None:
        """Add statistics of ranks whose rows were rolled up to the means of a goodput query."""
        if not numbers.kinds(run_id, RANKS):
            return
        names = [f"{name}:{what}" for name in (*_PARTS, *_WAITS) for what in ("mean", "min")]
        rows = numbers.scan(Rows(run_id, RANKS), ["step", "attempt", "num_ranks", *names])
        at, has_row = self._rows_of(rows)
        over = _float_columns(rows, ("num_ranks", *names), has_row)
        num = np.nan_to_num(over["num_ranks"])
        for name in _PARTS:
            self._sums[name][at] = (
                np.nan_to_num(self._head[name][at]) + np.nan_to_num(over[f"{name}:mean"]) * num
            )
        self._num[at] = 1.0 + num
        mean = _wait_seconds({name: over[f"{name}:mean"] for name in _WAITS})
        least = _wait_seconds({name: over[f"{name}:min"] for name in _WAITS})
        wait_columns = _wait_seconds({name: self._head[name][at] for name in _WAITS})
        self._wait[at] = np.nan_to_num(wait_columns) + np.nan_to_num(mean) * num
        self._num_waits[at] = np.isfinite(wait_columns) + np.isfinite(mean) * num
        self._least[at] = np.fmin(wait_columns, least)

    def means(self) -> dict[str, Floats]:
        """Return the mean rank's parts of each step, from which a query computes the goodput."""
        parts = {
            name.removesuffix("_seconds"): total / self._num for name, total in self._sums.items()
        }
        with np.errstate(invalid="ignore"):
            wait = self._wait / np.where(self._num_waits > 0, self._num_waits, np.nan)
        return {**parts, "wait": wait, "least_wait": self._least}


def _wait_seconds(columns: Mapping[str, Floats]) -> Floats:
    """Return how long each step waited for other ranks, for the goodput; NaN if unmeasured."""
    gradients, exchange = (columns[name] for name in _WAITS)
    total = np.nan_to_num(gradients) + np.nan_to_num(exchange)
    return np.where(np.isnan(gradients) & np.isnan(exchange), np.nan, total)


# --------------------------------------------------------------------------- reported stops


def _hangs(
    connection: Connection, run_id: str, launches: Sequence[Launch], steps: EndedSteps
) -> list[TimeSpan]:
    """Query the times during which a rank blocked the others, for the run's goodput."""
    table = findings.c
    query = select(table.time_unix_ns, table.body).where(
        table.run_id == run_id, table.kind == "hang"
    )
    columns = events.c
    ends = select(columns.time_unix_ns).where(
        columns.run_id == run_id,
        columns.kind == "Note",
        columns.summary.endswith("[wait_over]"),
    )
    over = list(connection.execute(ends.order_by(columns.time_unix_ns)).scalars())
    spans = []
    for told_ns, body in connection.execute(query.order_by(table.time_unix_ns)):
        waited = (_decode_finding(body).value or 0.0) if body else 0.0
        begin = told_ns - int(waited * 1e9)
        row = int(np.searchsorted(steps.end_unix_ns, told_ns, "right"))
        stops = [launch.end_ns for launch in launches if launch.end_ns >= told_ns]
        # A job that does not return was last active when it was reported as lost.
        stops += [int(steps.end_unix_ns[row])] if row < len(steps) else []
        stops += [at for at in over if at >= told_ns][:1]
        spans.append(TimeSpan(begin, max(told_ns, min(stops, default=told_ns))))
    return spans


def _pauses(connection: Connection, run_id: str, launches: Sequence[Launch]) -> list[TimeSpan]:
    """Query the times during which an operator paused the ranks, for the run's goodput."""
    table = events.c
    query = select(table.time_unix_ns, table.body).where(
        table.run_id == run_id, table.kind == "TrainingPaused", table.source == "rank:0"
    )
    spans: list[TimeSpan] = []
    since = 0
    for at_ns, body in connection.execute(query.order_by(table.time_unix_ns)):
        is_paused = bool(body) and _decode_pause(body).is_paused
        if is_paused and not since:
            since = at_ns
        elif not is_paused and since:
            spans.append(TimeSpan(since, at_ns))
            since = 0
    if since:
        spans.append(TimeSpan(since, max(since, launches[-1].end_ns)))
    return spans


# ------------------------------------------------------------------------------------ cost


def _energy(numbers: NumberStoreReader, run_id: str, since_ns: int, until_ns: int) -> float | None:
    """Query the joules of all GPUs that report them, for the cost of a run."""
    span = Rows(run_id, "gpu", from_unix_ns=since_ns, to_unix_ns=until_ns + 1)
    if "energy_joules" not in numbers.kinds(run_id, "gpu"):
        return None
    total, is_told = 0.0, False
    for source in numbers.sources(run_id, "gpu"):
        rows = numbers.scan(
            span._replace(sources=(source,)), ["time_unix_ns", "energy_joules", "power_watts"]
        )
        at = rows["time_unix_ns"].values.astype(np.int64)
        for name in ("energy_joules", "power_watts"):
            values, is_missing = rows[name]
            values, times = values[~is_missing].astype(np.float64), at[~is_missing]
            if len(values) < 2:
                continue
            rises = np.diff(values)
            if name == "power_watts":
                rises = (values[1:] + values[:-1]) / 2 * np.diff(times) / 1e9
            # A counter that was reset does not contain its earlier energy.
            total, is_told = total + float(rises[rises > 0].sum()), True
            break
    return total if is_told else None


def _goodput_notes(run: RunSummary, starts: Sequence[_Start], steps: EndedSteps) -> tuple[str, ...]:
    """Return the notes on data that a response about goodput lacks."""
    notes = []
    if run.world_size > 1 and len(steps) and not np.isfinite(steps.wait).any():
        notes.append(
            "How long the ranks waited for each other was not recorded: it counts as productive."
        )
    if starts and not any(start.launch.num_gpus for start in starts):
        notes.append("No rank said which GPU it trains on: GPU-hours are not known.")
    num_ranks = max((len(start.ranks) for start in starts), default=0)
    if num_ranks > MAX_RANKS:
        notes.append(f"Waits are sampled: {MAX_RANKS} of {num_ranks + 1:,} ranks, evenly spaced.")
    return tuple(notes)


def _goodput_view(
    run: RunSummary,
    sums: Goodput,
    price: float,
    energy: float | None,
    notes: tuple[str, ...],
) -> GoodputView:
    """Build the response to a query for goodput, with GPU-hours and money."""
    hours, money = hours_and_money(sums.gpu_nanoseconds / 1e9, price)
    return GoodputView(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        begin_unix_ns=sums.begin_unix_ns,
        end_unix_ns=sums.end_unix_ns,
        nanoseconds=dict(sums.nanoseconds),
        undone=dict(sums.undone),
        attempts=tuple(
            AttemptGoodput(id=attempt.attempt, nanoseconds=dict(attempt.nanoseconds))
            for attempt in sums.attempts
        ),
        ratio=sums.ratio,
        steps=sums.steps,
        lost_steps=sums.lost_steps,
        num_failures=len(sums.failures),
        mttf_seconds=sums.mttf_seconds,
        mttr_seconds=sums.mttr_seconds,
        gpu_hours=hours,
        money=money,
        energy_joules=energy,
        notes=notes,
    )


# --------------------------------------------------------------------------------- cache

SHARE = 0.02
"""Maximum share of the time for reading the rows of an active run again."""
MAX_KEPT = 256
"""Maximum number of runs in the cache."""


class _CachedGoodput(msgspec.Struct, frozen=True):
    """A run's goodput in the cache, and when to read it again."""

    view: GoodputView
    last_seen_unix_ns: int
    state: str
    due: float
    """When to read the run again; monotonic seconds."""


class GoodputCache:
    """Caches the sums of runs. For active runs their age depends on the cost of reading.

    A ``price`` of a GPU-hour of 0 is not set. ``stopwatch`` returns seconds, to measure reads.
    """

    def __init__(
        self, *, price: float = 0.0, stopwatch: Callable[[], float] = time.monotonic
    ) -> None:
        self._price = price
        self._stopwatch = stopwatch
        self._kept: dict[str, _CachedGoodput] = {}
        self._lock = threading.Lock()

    def known(self, runs: Sequence[RunSummary]) -> list[GoodputView]:
        """Return the goodput that earlier queries cached for these runs, without reading."""
        with self._lock:
            cached = [self._kept.get(run.run_id) for run in runs]
        return [each.view for each in cached if each is not None]

    def of(self, moment: ReadSnapshot, run: RunSummary) -> GoodputView:
        """Return the goodput of a run for a query: as stored now or a short time ago."""
        began = self._stopwatch()
        with self._lock:
            cached = self._kept.get(run.run_id)
        if cached is not None:
            is_same = (cached.last_seen_unix_ns, cached.state) == (run.last_seen_unix_ns, run.state)
            if is_same or began < cached.due:
                return cached.view
        view = run_goodput(moment, run, price=self._price)
        ended = self._stopwatch()
        due = ended + (ended - began) / SHARE
        with self._lock:
            self._kept.pop(run.run_id, None)
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[run.run_id] = _CachedGoodput(view, run.last_seen_unix_ns, run.state, due)
        return view


class GoodputReader:
    """The thread ``vitals-goodput``: reads the goodput of runs before it is queried.

    Those of a scrape, so that no scrape waits, and those whose details were queried.

    A run of a million steps takes seconds. Until its first read, a scrape does not contain it.
    """

    def __init__(self, store: Store, cache: GoodputCache) -> None:
        self._store = store
        self._cache = cache
        self._asked: tuple[RunSummary, ...] = ()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vitals-goodput", daemon=True)

    def start(self) -> None:
        """Start the thread that reads goodput for scrapes; it sleeps until the first query."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading goodput in the thread after the current run."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def known(self, runs: Sequence[RunSummary]) -> list[GoodputView]:
        """Return the cached goodput of the queried runs, and read it again for the next scrape."""
        self._asked = tuple(runs)
        self._wake.set()
        return self._cache.known(runs)

    def read_soon(self, run: RunSummary) -> None:
        """Read the goodput of a run in the thread, besides those of the latest scrape."""
        others = (each for each in self._asked if each.run_id != run.run_id)
        self._asked = (*others, run)[-MAX_KEPT:]
        self._wake.set()

    def read_queried_runs(self) -> None:
        """Read the goodput of the latest query's runs; an error is logged and ends the pass."""
        try:
            for run in self._asked:
                if self._stop.is_set():
                    return
                with (
                    self._store.read_transaction() as connection
                ):  # one short snapshot each: it delays removals
                    self._cache.of(self._store.snapshot_on(connection), run)
        except Exception:  # noqa: BLE001 - the thread must not end
            self._store.counters.fail("goodput")
            _LOG.exception("goodput_failed")

    def _work(self) -> None:
        """Read the queried runs whenever a scrape wakes the thread."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            self.read_queried_runs()
