"""Has the watchers look at every run's merged steps, and stores what they tell as findings.

They only tell: what may act is judged inside the job. A finding of theirs lies beside those of the
ranks, under an incarnation of the collector's own, and raises alerts as these do.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from trainvitals.detect.fleet import FleetConfig
from trainvitals.errors import StorageError
from trainvitals.records import Finding
from trainvitals.wire import Batch
from vitals_collector.live.progress import (
    runs_aside,
    set_aside,
    state_name,
    take_up,
    unread_runs,
)
from vitals_collector.live.run_follower import FollowedRun, Progress, open_run
from vitals_collector.live.step_join import MergeConfig
from vitals_collector.live.tail_reader import RecentRows
from vitals_collector.storage.schema import engine_state, findings
from vitals_collector.storage.store import Store, clean, insert

COLLECTOR = "collector"
"""The incarnation of findings that no rank wrote."""
_LOG = logging.getLogger("vitals.collector.watching")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMonitorConfig:
    """How runs are watched."""

    rows_at_once: int = 50_000
    """Rows read in one look; a collector that has years to catch up still tells of a halt now."""
    live_bytes: int = 64 << 20
    """Rows of all runs that are kept in memory until they are looked at; beyond, they are read
    from the store."""
    save_seconds: float = 5.0
    """How often memory is stored where nothing is told; what came since is read again."""
    save_bytes_a_second: int = 1 << 16
    """A large memory, of thousands of ranks, is stored so much less often."""
    pause_seconds: float = 10.0
    """How long a run is left alone after watching it met an error of our own; doubled each time."""
    longest_pause_seconds: float = 600.0
    """The longest of these pauses; a run that comes to it is set aside: its old rows are thinned
    though no watcher has seen them, and it is tried again all the same."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """How long ranks are waited for."""
    watch: FleetConfig = field(default_factory=FleetConfig)
    """The watchers' own settings."""


class Look(NamedTuple):
    """What one look came to."""

    told: frozenset[str]
    """Runs with new findings."""
    has_more: bool
    """Rows are left: look again at once."""


class _Pause(NamedTuple):
    """A run is left alone for a while."""

    until_ns: int
    seconds: float


class LiveMonitor:
    """Follows the runs that have new rows or are running. ``add`` and ``note`` are for any thread.

    ``now_ns`` is a monotonic clock throughout.
    """

    def __init__(self, store: Store, config: LiveMonitorConfig | None = None) -> None:
        self._store = store
        self._config = config or LiveMonitorConfig()
        self._live = RecentRows(most_bytes=self._config.live_bytes)
        self._open: dict[str, FollowedRun] = {}
        self._save_ns: dict[str, int] = {}
        self._pauses: dict[str, _Pause] = {}
        self._aside: set[str] = set()
        """Runs whose watching failed so often that their rows wait for it no more."""
        self._is_first = True
        self.num_unmerged = 0
        """Rows of ranks that steps were merged without."""
        self.num_dropped_samples = 0
        """Samples of GPUs that had to be let go before their node's own row was there."""

    @property
    def num_left_to_store(self) -> int:
        """Rows that memory had no room for: they are read from the store."""
        return self._live.num_dropped

    def add(self, batches: Iterable[Batch]) -> None:
        """Take in batches that were committed; they are looked at by the next ``poll``."""
        self._live.add(batches)

    def note(self, run_id: str) -> None:
        """Remember that the store has something new of a run: rows, names or a checkpoint."""
        self._live.note(run_id)

    def poll(self, *, now_ns: int, running: Collection[str], only_new: bool = False) -> Look:
        """Take in new rows of all runs, and store what the watchers tell of them.

        Args:
            now_ns: a monotonic clock.
            running: the runs that go on.
            only_new: look only at those that have new rows.

        Raises:
            StorageError: the store refused; nothing is lost, call again.
        """
        queue = self._queue(running, only_new=only_new)
        budget = self._config.rows_at_once
        runs_with_findings: set[str] = set()
        has_more = False
        for run_id in queue:
            is_running = run_id in running
            if self._is_paused(run_id, now_ns):
                self._live.take(run_id)  # the store has them
                continue
            if budget <= 0 and not is_running:
                self.note(run_id)
                has_more = True
                continue
            num, has_findings = self._watch(run_id, max(0, budget), now_ns, is_running)
            budget -= num
            if has_findings:
                runs_with_findings.add(run_id)
            followed = self._open.get(run_id)
            has_more = has_more or (followed is not None and not followed.is_read)
        return Look(frozenset(runs_with_findings), has_more)

    def conditions(self, run_id: str) -> tuple[Finding, ...]:
        """Return what was told of a followed run and still holds."""
        followed = self._open.get(run_id)
        return () if followed is None else tuple(followed.saved.open)

    def lasting(self, run_id: str) -> tuple[Finding, ...]:
        """Return what was told of a followed run as it began, and goes on."""
        followed = self._open.get(run_id)
        return () if followed is None else tuple(followed.saved.lasting)

    def _queue(self, running: Collection[str], *, only_new: bool) -> list[str]:
        """Return the runs to look at; those that have new rows come first."""
        if self._is_first:
            with self._store.read() as connection:
                unread = unread_runs(connection)
                self._aside = runs_aside(connection)
            for run_id in unread:
                self.note(run_id)
            self._is_first = False
        queue = [*self._live.waiting()]
        queue += [
            followed.run_id
            for followed in self._open.values()
            if not (only_new and followed.is_read)
        ]
        if not only_new:
            queue += [*self._pauses, *sorted(running)]
        return list(dict.fromkeys(queue))

    def _is_paused(self, run_id: str, now_ns: int) -> bool:
        pause = self._pauses.get(run_id)
        return pause is not None and now_ns < pause.until_ns

    def _watch(self, run_id: str, budget: int, now_ns: int, is_running: bool) -> tuple[int, bool]:
        """Look at one run; return how many rows were read, and whether anything was told."""
        taken = self._live.take(run_id)  # before the store is opened: it must have these
        try:
            followed = self._open.get(run_id) or self._opened(run_id)
            num = followed.take(taken, now_ns)
            if followed.needs_store(taken, now_ns):
                # Where all was taken, only the writers are asked after.
                is_settled = taken.has_more or not followed.is_read
                with self._store.read(settled=is_settled) as connection:
                    num += followed.read(connection, budget, now_ns, has_more=taken.has_more)
            before = followed.steps.absent
            records = followed.advance(now_ns, is_running=is_running)
            self.num_unmerged += followed.num_unmerged()
            self.num_dropped_samples += followed.hosts.take_dropped()
            if absent_ranks := followed.steps.absent - before:
                _LOG.warning(
                    "ranks_not_waited_for run=%s ranks=%s", run_id, sorted(absent_ranks)[:16]
                )
            is_over = followed.is_drained and not is_running
            if records or self._is_due(followed, now_ns, is_over=is_over):
                self._keep(followed, records, now_ns)
        except StorageError:
            self._forget(run_id)  # memory is ahead of the store: begin again from there
            self.note(run_id)
            raise
        except Exception:  # noqa: BLE001 - one run's watchers must not silence all runs' alerts
            self._forget(run_id)
            seconds = self._pause(run_id, now_ns)
            self._store.counters.fail("watching")
            _LOG.exception("watching_failed run=%s again_in_seconds=%g", run_id, seconds)
            if seconds >= self._config.longest_pause_seconds:
                self._set_aside(run_id, is_aside=True)
            return 0, False
        if num:
            self._pauses.pop(run_id, None)
            self._set_aside(run_id, is_aside=False)
        if is_over:
            self._forget(run_id)
        return num, bool(records)

    def _opened(self, run_id: str) -> FollowedRun:
        with self._store.read(settled=False) as connection:
            followed = self._open[run_id] = open_run(
                connection, run_id, watch=self._config.watch, merge=self._config.merge
            )
        return followed

    def _forget(self, run_id: str) -> None:
        self._open.pop(run_id, None)
        self._save_ns.pop(run_id, None)

    def _pause(self, run_id: str, now_ns: int) -> float:
        """Leave a run alone for longer each time; return for how many seconds."""
        before = self._pauses.get(run_id)
        seconds = self._config.pause_seconds if before is None else 2 * before.seconds
        seconds = min(seconds, self._config.longest_pause_seconds)
        self._pauses[run_id] = _Pause(now_ns + int(seconds * 1e9), seconds)
        return seconds

    def _set_aside(self, run_id: str, *, is_aside: bool) -> None:
        if is_aside == (run_id in self._aside):
            return
        with self._store.write() as connection:
            (set_aside if is_aside else take_up)(connection, run_id)
        self._aside ^= {run_id}
        _LOG.warning("watching_%s run=%s", "set_aside" if is_aside else "taken_up", run_id)

    def _is_due(self, followed: FollowedRun, now_ns: int, *, is_over: bool) -> bool:
        if not followed.has_changed:
            return False
        return is_over or now_ns >= self._save_ns.get(followed.run_id, now_ns)

    def _keep(self, followed: FollowedRun, records: list[Progress], now_ns: int) -> None:
        """Store findings and memory in one transaction."""
        first = followed.saved.next_seq
        rows = [_row(followed.run_id, first + i, record) for i, record in enumerate(records)]
        values = {"body": followed.state(len(records))}
        name = state_name(followed.run_id)
        with self._store.write() as connection:
            if rows:
                connection.execute(findings.insert(), rows)
            statement = insert(connection, engine_state).values(name=name, **values)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["name"], set_=values)
            )
        followed.has_changed = False
        pause = len(values["body"]) / self._config.save_bytes_a_second
        self._save_ns[followed.run_id] = now_ns + int(max(pause, self._config.save_seconds) * 1e9)


def _row(run_id: str, seq: int, record: Progress) -> dict[str, object]:
    finding = record.finding
    return {
        "run_id": run_id,
        "incarnation": COLLECTOR,
        "seq": seq,
        "time_unix_ns": record.time_unix_ns,
        "step": finding.step,
        "attempt": record.attempt,
        "rank": finding.rank,
        "kind": clean(finding.kind),
        "level": finding.level,
        "detector": clean(finding.detector),
        "body": msgspec.msgpack.encode(finding),
    }


__all__ = ["COLLECTOR", "LiveMonitor", "LiveMonitorConfig", "Look"]
