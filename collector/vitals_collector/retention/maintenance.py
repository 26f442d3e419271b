"""Keeps a store small, fast and undamaged, in one thread: merges, roll-ups, removal, damage."""

import logging
import threading
from collections.abc import Callable, Mapping

import msgspec
from sqlalchemy import Connection, func, select, update

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.clock import Clock
from trainvitals.errors import StorageError
from trainvitals.records import Note
from vitals_collector.live.live_monitor import load_suspended_runs, load_watch_progress
from vitals_collector.live.run_status import Liveness
from vitals_collector.numbers.interface import RANKS
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_engine import DAMAGED
from vitals_collector.retention import removal
from vitals_collector.retention.rollup import (
    CurrentStep,
    DeletionPass,
    RunHistory,
    downsample_run,
    roll_up_run,
)
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.schema import (
    attempts,
    decisions,
    events,
    findings,
    measured_columns,
    runs,
    sources,
)
from vitals_collector.storage.store import SteadyClock, Store, insert

INTERVAL_SECONDS = 60.0
OVER_CAP = "over_cap"
"""Code of the note that the data that is never deleted exceeds the cap."""
VOLUMES = "volumes"
"""The incarnation of notes that no rank wrote."""
_MERGE_SECONDS = 20.0
"""After which a merge continues in the next round."""
_LOOK_SECONDS = 600.0
"""Interval of the checks of runs: their rows age, and the fleet detectors read on."""
_QUIET_SECONDS = 86_400.0
_PAUSE = 1.0
"""Pause after a window, in multiples of the time that it took: writers have priority."""
_NEVER = 2**62
_OF_EVERY_ROW = frozenset(column.name for column in ROW_COLUMNS)
_LOG = logging.getLogger("vitals.collector.upkeep")


class LakeMaintenance:
    """The thread ``vitals-upkeep``: merges new rows every minute, checks runs every ten minutes.

    A run that is silent for ``lost_after_seconds`` is not running. ``is_mine`` returns whether this
    collector maintains the store: one at a time does. Each window is followed by a ``pause``, in
    multiples of the time that it took. After a StorageError nothing is half done: call again.
    """

    def __init__(
        self,
        store: Store,
        settings: VolumeSettings,
        *,
        clock: Clock,
        lost_after_seconds: float = 60.0,
        is_mine: Callable[[], bool] = lambda: True,
        pause: float = _PAUSE,
    ) -> None:
        assert isinstance(store.numbers, Lake), "rows in memory need no upkeep"
        self._store, self._lake, self._settings = store, store.numbers, settings
        # Setting the clock forward must not make rows old.
        self._clock, self._is_mine, self._pause = SteadyClock(clock), is_mine, pause
        self._lost_after_seconds = lost_after_seconds
        self._up_since_unix_ns = self._clock.time_ns()
        self._quiet: dict[str, tuple[int, int]] = {}
        """By run, its latest row when nothing was left to delete, and the time of the next
        check."""
        self._num_named: dict[str, int] = {}
        self._over_cap: dict[str, str] = {}
        """Runs above the cap with nothing left to delete, each with the message."""
        self._is_merged = False
        self._looked_ns: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vitals-upkeep", daemon=True)

    def start(self) -> None:
        """Start the maintenance thread: a round now, and one per minute."""
        self._thread.start()

    def close(self) -> None:
        """Stop the lake's maintenance after the current operation."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        """Maintain the lake at intervals, in a thread."""
        while not self._stop.is_set():
            self.run_once()
            self._stop.wait(INTERVAL_SECONDS)

    def run_once(self) -> None:
        """Run one round of maintenance; an error is logged, counted, and ends the round."""
        try:
            self._lake.give_back_memory()
            if self._is_mine():
                self._maintain()
        except StorageError as error:
            self._drop_damaged_files(error)
        except Exception:  # noqa: BLE001 - the thread must not end
            self._store.counters.fail("upkeep")
            _LOG.exception("upkeep_failed again_in=%gs", INTERVAL_SECONDS)

    def _maintain(self) -> None:
        """Merge the lake's files if there is news; at intervals, delete what is due."""
        now_ns = self._clock.monotonic_ns()
        is_time = self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_SECONDS * 1e9
        if is_time:
            self._looked_ns = now_ns
        # Also without new rows: another process may have removed runs.
        if is_time or not self._is_merged or self._lake.catalogue.changed():
            self._is_merged = self._lake.merge(_MERGE_SECONDS)
        if is_time and self._may_continue():
            self._is_merged &= not self.delete_due()
        self._store.reclaim(above=0.1)

    def _may_continue(self) -> bool:
        """Return whether this collector has to continue to merge and delete rows."""
        return not self._stop.is_set() and self._is_mine()

    def run_all(self) -> int:
        """Run everything that is due at once; return the number of deleted rows or runs."""
        num = self.delete_due()
        while not self._lake.merge(_MERGE_SECONDS):
            pass  # it continues
        while self._store.reclaim():
            pass
        return num

    def delete_due(self) -> int:
        """Delete what is due in every run; return the number of deleted rows or runs."""
        removal.finish_removals(self._store)
        when = Liveness(
            now_unix_ns=self._clock.time_ns(),
            up_since_unix_ns=self._up_since_unix_ns,
            lost_after_seconds=self._lost_after_seconds,
        )
        num = len(removal.delete_old(self._store, self._settings.keep_days, when))
        sizes = self._lake.sizes()
        for run_id, newest_unix_ns in self._runs_to_check(sizes, when.now_unix_ns).items():
            if not self._may_continue():
                return num
            try:
                num += self._shrink_run(run_id, newest_unix_ns, sizes)
            except Exception as error:
                if isinstance(error, StorageError) and error.code == DAMAGED:
                    raise
                self._store.counters.fail("upkeep")
                _LOG.exception("thinning_failed run=%s again_in=%gs", run_id, _LOOK_SECONDS)
        self._store_sizes(sizes)
        return num

    def _runs_to_check(self, sizes: Mapping[str, int], now_unix_ns: int) -> dict[str, int]:
        """Return the runs to check, each with the time of its latest row.

        A run without new rows, all of them old, is checked once a day: the fleet detectors may have
        read on.
        """
        query = select(sources.c.run_id, func.max(sources.c.last_seen_unix_ns))
        with self._store.read_transaction() as connection:
            rows = connection.execute(query.group_by(sources.c.run_id)).all()
        newest_by_run = {run_id: int(newest or 0) for run_id, newest in rows if run_id in sizes}
        self._quiet = {run: of for run, of in self._quiet.items() if run in newest_by_run}
        cap = self._settings.max_run_bytes
        return {
            run_id: newest
            for run_id, newest in sorted(newest_by_run.items())
            if (quiet := self._quiet.get(run_id)) is None
            or quiet[0] != newest
            or now_unix_ns >= quiet[1]
            or (0 < cap < sizes[run_id] and run_id not in self._over_cap)
        }

    def _shrink_run(self, run_id: str, newest_unix_ns: int, sizes: dict[str, int]) -> int:
        """Roll up old rows of a run, and more if the run is above its cap."""
        with self._store.read_transaction() as connection:
            run = _load_run_history(self._store, connection, run_id)
        now = self._clock.time_ns()
        settings, cap = self._settings, self._settings.max_run_bytes
        when = DeletionPass(
            now - int(settings.keep_hours * 3_600e9),
            now,
            is_enough=lambda: not self._may_continue(),
            rest=lambda seconds: self._pause and self._stop.wait(self._pause * seconds),
        )
        num = self._delete_rows(run, when)
        if num:
            sizes[run_id] = self._lake.num_bytes(run_id)
        if 0 < cap < sizes[run_id]:

            def is_enough() -> bool:
                sizes[run_id] = self._lake.num_bytes(run_id)
                return not self._may_continue() or sizes[run_id] <= cap

            num += self._delete_rows(
                run, when._replace(before_unix_ns=_NEVER, reason="size", is_enough=is_enough)
            )
            sizes[run_id] = self._lake.num_bytes(run_id)
        if not num and newest_unix_ns < when.before_unix_ns:
            self._quiet[run_id] = newest_unix_ns, now + int(_QUIET_SECONDS * 1e9)
        return num

    def _delete_rows(self, run: RunHistory, when: DeletionPass) -> int:
        """Roll up and downsample a run's old rows; return the number of deleted rows."""
        before = _deleted_row_counts(self._lake, run.run_id)
        num = roll_up_run(self._lake, run, self._settings, when)
        num += downsample_run(self._lake, run, self._settings, when)
        counters = self._store.counters
        with counters.lock:
            for key, total in _deleted_row_counts(self._lake, run.run_id).items() if num else ():
                taken = total - before.get(key, 0)
                counters.thinned[key] = counters.thinned.get(key, 0) + taken
        return num

    def _store_sizes(self, sizes: Mapping[str, int]) -> None:
        """Store the sizes of runs, and report runs above their cap with nothing left to delete."""
        with self._store.write() as connection:
            stored = connection.execute(select(runs.c.run_id, runs.c.num_bytes))
            before = {row.run_id: row.num_bytes for row in stored}
            for run_id, num_bytes in sizes.items():
                if before.get(run_id, num_bytes) != num_bytes:
                    is_of_run = runs.c.run_id == run_id
                    connection.execute(update(runs).where(is_of_run).values(num_bytes=num_bytes))
                # No writer sends rolled-up columns: here their names are recorded.
                levels = self._lake.kinds(run_id, RANKS).keys() - _OF_EVERY_ROW
                if len(levels) != self._num_named.get(run_id, 0):
                    statement = insert(connection, measured_columns).on_conflict_do_nothing()
                    named = [{"run_id": run_id, "stream": RANKS, "name": n} for n in sorted(levels)]
                    connection.execute(statement, named)
                    self._num_named[run_id] = len(levels)
        cap = self._settings.max_run_bytes
        self._over_cap = {
            run_id: self._report_over_cap(run_id, num_bytes)
            for run_id, num_bytes in sizes.items()
            if 0 < cap < num_bytes
        }
        self._store.counters.over_cap = self._over_cap

    def _report_over_cap(self, run_id: str, num_bytes: int) -> str:
        """Report a run above its cap with nothing left to delete, once; return the message."""
        if run_id in self._over_cap:
            return self._over_cap[run_id]
        cap = self._settings.max_run_bytes
        text = (
            f"this run has {num_bytes / 1e9:.3g} GB, above its cap of {cap / 1e9:.3g} GB, and "
            "nothing more can be thinned: rank 0, the worst ranks, and what is near incidents stay"
        )
        _LOG.warning("run_over_cap run=%s bytes=%d cap=%d", run_id, num_bytes, cap)
        is_volume_event = (events.c.run_id == run_id, events.c.incarnation == VOLUMES)
        note = Note(code=OVER_CAP, text=text, severity="warning")
        with self._store.write() as connection:
            last = connection.execute(select(func.max(events.c.seq)).where(*is_volume_event))
            if last.scalar() is None:
                connection.execute(
                    events.insert().values(
                        run_id=run_id,
                        incarnation=VOLUMES,
                        source="collector",
                        seq=0,
                        time_unix_ns=self._clock.time_ns(),
                        kind="Note",
                        summary=f"{text} [{OVER_CAP}]",
                        body=msgspec.msgpack.encode(note),
                    )
                )
        return text

    def _drop_damaged_files(self, error: StorageError) -> None:
        """Remove damaged files if damage caused the error of the maintenance."""
        self._store.counters.fail("upkeep")
        if error.code != DAMAGED:
            _LOG.error("upkeep_failed again_in=%gs error=%s", INTERVAL_SECONDS, error.text)
            return
        try:
            damaged = self._lake.drop_damaged_files()
        except StorageError as again:
            _LOG.error("upkeep_failed again_in=%gs error=%s", INTERVAL_SECONDS, again.text)
            return
        self._is_merged = False
        for file in damaged:
            self._store.damage.report(
                f"{file.path} ({file.num_rows} rows, runs {', '.join(file.run_ids)})"
            )


def _deleted_row_counts(lake: Lake, run_id: str) -> dict[tuple[str, str], int]:
    """Return the number of a run's rows that maintenance deleted, by stream and reason."""
    return {(part.stream, part.reason): part.num_rows for part in lake.deleted_rows(run_id)}


def _load_run_history(store: Store, connection: Connection, run_id: str) -> RunHistory:
    """Return the current step of a run, and what happened in it."""
    head = connection.execute(
        select(sources.c.last_attempt, sources.c.last_step)
        .where(sources.c.run_id == run_id, sources.c.source == "rank:0")
        .order_by(sources.c.started_unix_ns.desc())
        .limit(1)
    ).first()
    steps, times = _load_incident_times(connection, run_id)
    finding_steps = select(findings.c.step).where(findings.c.run_id == run_id).distinct()
    is_aside = run_id in load_suspended_runs(connection)
    return RunHistory(
        run_id,
        sorted(store.numbers.last_steps(run_id)),
        None if head is None or head.last_step < 0 else CurrentStep(*head),
        sorted(steps),
        _num_ranks(connection, run_id),
        near_layers=sorted(steps | set(connection.execute(finding_steps).scalars())),
        near_unix_ns=sorted(times),
        watched=None if is_aside else load_watch_progress(connection, run_id),
    )


def _num_ranks(connection: Connection, run_id: str) -> int:
    names = select(sources.c.source).where(
        sources.c.run_id == run_id, sources.c.source.like("rank:%"), sources.c.source != "rank:0"
    )
    return len(set(connection.execute(names).scalars()))


def _load_incident_times(connection: Connection, run_id: str) -> tuple[set[int], set[int]]:
    """Return the steps and the times of decisions, of findings that acted and of forks."""
    decided, raised, forks = decisions.c, findings.c, attempts.c
    steps: set[int] = set()
    times: set[int] = set()
    query = select(decided.step, decided.decided_at_step, decided.time_unix_ns)
    for step, at, when in connection.execute(query.where(decided.run_id == run_id)):
        steps |= {step, at}
        times.add(when)
    acted = select(raised.step, raised.time_unix_ns)
    for step, when in connection.execute(
        acted.where(raised.run_id == run_id, raised.level == "actionable")
    ):
        steps.add(step)
        times.add(when)
    query = select(forks.fork_step).where(forks.run_id == run_id, forks.parent.is_not(None))
    steps |= set(connection.execute(query).scalars())
    return steps, times
