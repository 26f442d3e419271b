"""Has the watchers look at every run's merged steps, and stores what they tell as findings.

They only tell: what may act is judged inside the job. A finding of theirs lies beside those of the
ranks, under an incarnation of the collector's own, and raises alerts as these do.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, select

from trainvitals.detect.watch import WatchConfig
from trainvitals.errors import StorageError
from trainvitals.records import Finding
from trainvitals.rows import Schema
from vitals_collector.facts import clean
from vitals_collector.following import Followed, Told, open_run, state_name
from vitals_collector.gathering import MergeConfig
from vitals_collector.schema import engine_state, findings, runs
from vitals_collector.store import Store, insert

COLLECTOR = "collector"
"""The incarnation of findings that no rank wrote."""
_LOG = logging.getLogger("vitals.collector.watching")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchingConfig:
    """How runs are watched."""

    rows_at_once: int = 50_000
    """Rows read in one look; a collector that has years to catch up still tells of a halt now."""
    save_seconds: float = 5.0
    """How often memory is stored where nothing is told; what came since is read again."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """How long ranks are waited for."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """The watchers' own settings."""


class Look(NamedTuple):
    """What one look came to."""

    told: frozenset[str]
    """Runs with new findings."""
    has_more: bool
    """Rows are left: look again at once."""


class Watching:
    """Follows the runs that have new rows or are running. ``note`` is for any thread.

    ``now_ns`` is a monotonic clock throughout.
    """

    def __init__(self, store: Store, config: WatchingConfig | None = None) -> None:
        self._store = store
        self._config = config or WatchingConfig()
        self._lock = threading.Lock()
        self._noted: dict[str, None] = {}
        self._open: dict[str, Followed] = {}
        self._stored_ns: dict[str, int] = {}
        self._schemas: dict[str, Schema] = {}
        self._set_aside: set[str] = set()
        self._is_first = True
        self.num_errors = 0
        """Runs that were set aside because watching them met an error of our own."""
        self.num_unmerged = 0
        """Rows of ranks that steps were merged without."""

    def note(self, run_id: str) -> None:
        """Remember that a run has new rows."""
        with self._lock:
            self._noted[run_id] = None

    def poll(self, *, now_ns: int, running: Collection[str]) -> Look:
        """Read new rows of all runs, and store what the watchers tell of them.

        Raises:
            StorageError: the store refused; nothing is lost, call again.
        """
        queue = self._queue(running)
        budget = self._config.rows_at_once
        told: set[str] = set()
        has_more = False
        for run_id in queue:
            is_running = run_id in running
            if budget <= 0 and not is_running:
                self.note(run_id)
                has_more = True
                continue
            num, found = self._watch(run_id, max(0, budget), now_ns, is_running)
            budget -= num
            if found:
                told.add(run_id)
            followed = self._open.get(run_id)
            if followed is None or followed.is_read:
                continue
            self.note(run_id)
            has_more = True
        return Look(frozenset(told), has_more)

    def conditions(self, run_id: str) -> tuple[Finding, ...]:
        """Return what was told of a followed run and still holds."""
        followed = self._open.get(run_id)
        return () if followed is None else tuple(followed.saved.open)

    def _queue(self, running: Collection[str]) -> list[str]:
        """Return the runs to look at; those that were noted first come first."""
        if self._is_first:
            with self._store.read() as connection:
                known = connection.execute(select(runs.c.run_id).order_by(runs.c.run_id)).scalars()
                every = list(known)
            with self._lock:
                self._noted = dict.fromkeys([*self._noted, *every])
            self._is_first = False
        with self._lock:
            noted, self._noted = self._noted, {}
        queue = dict.fromkeys([*noted, *self._open, *sorted(running)])
        return [run_id for run_id in queue if run_id not in self._set_aside]

    def _watch(self, run_id: str, budget: int, now_ns: int, is_running: bool) -> tuple[int, bool]:
        """Look at one run; return how many rows were read, and whether anything was told."""
        try:
            with self._store.read() as connection:
                followed = self._open.get(run_id) or self._opened(connection, run_id)
                num = followed.read(connection, budget, now_ns)
            before = followed.steps.absent
            told = followed.advance(now_ns, is_running=is_running)
            self.num_unmerged += followed.num_unmerged()
            if gone := followed.steps.absent - before:
                _LOG.warning("ranks_not_waited_for run=%s ranks=%s", run_id, sorted(gone)[:16])
            is_over = followed.is_drained and not is_running
            if told or self._is_due(followed, now_ns, is_over=is_over):
                self._keep(followed, told, now_ns)
        except StorageError:
            self._forget(run_id)  # memory is ahead of the store: begin again from there
            self.note(run_id)
            raise
        except Exception:  # noqa: BLE001 - one run's watchers must not silence all runs' alerts
            self._forget(run_id)
            self._set_aside.add(run_id)
            self.num_errors += 1
            _LOG.exception("watching_failed run=%s until=restart", run_id)
            return 0, False
        if is_over:
            self._forget(run_id)
        return num, bool(told)

    def _opened(self, connection: Connection, run_id: str) -> Followed:
        followed = self._open[run_id] = open_run(
            connection,
            run_id,
            schemas=self._schemas,
            watch=self._config.watch,
            merge=self._config.merge,
        )
        return followed

    def _forget(self, run_id: str) -> None:
        self._open.pop(run_id, None)
        self._stored_ns.pop(run_id, None)

    def _is_due(self, followed: Followed, now_ns: int, *, is_over: bool) -> bool:
        if not followed.has_changed:
            return False
        before = self._stored_ns.get(followed.run_id)
        is_old = before is None or now_ns - before >= self._config.save_seconds * 1e9
        return is_old or is_over

    def _keep(self, followed: Followed, told: list[Told], now_ns: int) -> None:
        """Store findings and memory in one transaction."""
        first = followed.saved.next_seq
        rows = [_row(followed.run_id, first + i, one) for i, one in enumerate(told)]
        values = {"body": followed.state(len(told))}
        name = state_name(followed.run_id)
        with self._store.write() as connection:
            if rows:
                connection.execute(findings.insert(), rows)
            statement = insert(connection, engine_state).values(name=name, **values)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["name"], set_=values)
            )
        followed.has_changed = False
        self._stored_ns[followed.run_id] = now_ns


def _row(run_id: str, seq: int, told: Told) -> dict[str, object]:
    finding = told.finding
    return {
        "run_id": run_id,
        "incarnation": COLLECTOR,
        "seq": seq,
        "time_unix_ns": told.time_unix_ns,
        "step": finding.step,
        "attempt": told.attempt,
        "rank": finding.rank,
        "kind": clean(finding.kind),
        "level": finding.level,
        "detector": clean(finding.detector),
        "body": msgspec.msgpack.encode(finding),
    }


__all__ = ["COLLECTOR", "Look", "Watching", "WatchingConfig"]
