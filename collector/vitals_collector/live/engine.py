"""Raises alerts from stored events: decisions and findings once, runs' states as they change.

Decisions of the policy inside the job and findings of its detectors arrive as events. Findings that
need the steps of all ranks or samples of nodes come from ``live_monitor`` and are stored in the
same table. Conditions that the job cannot report (that it died) come from the run's state. The
engine works from the store alone, with a cursor per writer in the alerts' transaction, so a
collector that died between storing and alerting continues where it was.

With several collectors, each does this for the runs that it owns, except for the alerts: one of
them, the pager, raises those of all runs, from the stored events and the owners' reports
(``reports``).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, Table, func, select

from trainvitals.alerting import (
    ALERTED_KINDS,
    Alert,
    alert_for_cap,
    alerts_for_absence,
    alerts_for_decision,
    alerts_for_finding,
    alerts_for_run_state,
    is_answered,
)
from trainvitals.clock import Clock
from trainvitals.errors import UNREADABLE, VitalsError
from trainvitals.records import (
    CheckpointChanged,
    Decision,
    DecisionMade,
    EventRow,
    Finding,
    FindingRaised,
    NamesDefined,
    RanksStill,
    RunEnded,
    TrainingPaused,
)
from trainvitals.units import name_ranks
from trainvitals.wire import Batch
from vitals_collector.alerts import commands
from vitals_collector.alerts.deliveries import SqlDeliveryLedger
from vitals_collector.alerts.delivery import Dispatcher, resolve_alert
from vitals_collector.alerts.inbox import (
    AlertOccurrence,
    CurrentRunState,
    Inbox,
    InboxConfig,
    settle_alert,
)
from vitals_collector.alerts.notifiers import Notifier
from vitals_collector.cluster.leases import PAGER, Lease
from vitals_collector.ingest.projections import loss_kind_of
from vitals_collector.live.live_monitor import COLLECTOR, LiveMonitor, unread_runs
from vitals_collector.live.reports import RunReport, RunReporter, report_of
from vitals_collector.live.run_status import (
    AbsentParts,
    Liveness,
    RunStatus,
    RunStatusCache,
    hang_of,
)
from vitals_collector.live.tail_reader import WATCHED
from vitals_collector.storage.schema import decisions, engine_state, findings
from vitals_collector.storage.store import SteadyClock, Store, load_state

_AT_ONCE = 500
_NAMES_AT_ONCE = 10_000
_MAX_LOGGED = 100
"""Internal errors that are logged with a traceback; later ones are only counted."""
_Record = TypeVar("_Record")
_AWAITED = (DecisionMade, FindingRaised)
"""Events that may raise alerts."""
_NOTED = CheckpointChanged | NamesDefined | RanksStill | TrainingPaused
"""Events that change how a run is watched."""
_MOST_CAME = 8
"""Commits that wait to be sorted: each has at most some MB."""
_PAUSE_SECONDS = 0.2
"""Pause between two polls for new rows: those of a large run arrive all the time."""
_RESEND_SECONDS = 60.0
"""Interval at which a change that no notifier has settled is delivered again: after a silence ends
or this process starts."""
_LEFT_SECONDS = 10.0
"""After which the pager acquires runs without an owner."""
_LOG = logging.getLogger("vitals.collector.engine")
_decision = msgspec.msgpack.Decoder(Decision).decode
_finding = msgspec.msgpack.Decoder(Finding).decode

Writer = tuple[str, str]
"""A run and an incarnation in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the alert engine."""

    lost_after_seconds: float = 60.0
    """A run that is silent for longer, and its agent too, is lost."""
    interval_seconds: float = 2.0
    """Interval of the checks of running runs; silence is a condition too."""


class AlertEngine:
    """Reads the store after ingests and at intervals; writes alerts. ``poll`` runs one pass."""

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        *,
        clock: Clock,
        dispatcher: Dispatcher | None = None,
        config: EngineConfig | None = None,
        up_since_unix_ns: int = 0,
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._lease = lease or Lease(store, PAGER, clock=clock, is_shared=False)
        self._epoch: int | None = None
        """Epoch of the pager's lease to which the cached state of other owners belongs."""
        self._clock, self._steady = clock, SteadyClock(clock)
        self._dispatcher = dispatcher
        self._config = config or EngineConfig()
        self._up_since_unix_ns = up_since_unix_ns
        self._lock = threading.Lock()
        self._came: deque[Sequence[tuple[Batch, Sequence[EventRow]]]] = deque()
        """Committed, and not sorted yet."""
        self._dirty: set[Writer] = set()
        self._watching = LiveMonitor(store)
        self._runs = RunStatusCache(is_shared=self._lease.is_shared)
        self._owned: Mapping[str, int] | None = None
        """The owned runs at the last poll; None: all."""
        self._reporter = RunReporter(store)
        self._others: dict[str, RunReport] = {}
        """Reports of other owners about their runs."""
        self._elsewhere: set[str] = set()
        """The runs of other owners."""
        self._ownerless_since: dict[str, int] | None = None
        """Runs without an owner, by when that was noticed, until they are settled; None: not
        checked since this collector became the pager."""
        self._settled: set[str] = set()
        """Runs that need no owner: they ended, and are fully processed."""
        self._wake = threading.Event()
        self._urgent = threading.Event()
        """Set with ``_wake`` for events that may raise alerts."""
        self._stopping = threading.Event()
        self._has_more = False
        self._thread: threading.Thread | None = None
        self._resend_ns: int | None = None
        self._logged: set[str] = set()
        self._gone: dict[str, set[str]] = {}
        """By run, the alerts that applied, or may have, when it was last running."""
        store.after_ingest.append(self.after_ingest)

    def after_ingest(self, new: Sequence[tuple[Batch, Sequence[EventRow]]]) -> None:
        """Note rows that have just arrived for the next poll; reads and writes nothing."""
        # Called by the committing threads before agents get their responses: all work is left to
        # the engine's own thread.
        self._came.append(new)
        if len(self._came) > _MOST_CAME:  # the engine is busy: the sorted rows are bounded
            self._sort_committed_rows()
        if any(isinstance(row.event, _AWAITED) for _, events in new for row in events):
            self._urgent.set()
        self._wake.set()

    def _sort_committed_rows(self) -> None:
        """Sort rows that have just arrived by consumer: detectors, run states, new alerts."""
        rows: list[Batch] = []
        run_ids: set[str] = set()
        changed: set[str] = set()
        noted: set[str] = set()
        with_scalars: set[str] = set()
        dirty: set[Writer] = set()
        while self._came:
            with suppress(IndexError):  # another thread popped it
                for batch, events in self._came.popleft():
                    identity = batch.header.identity
                    run_ids.add(identity.run_id)
                    if batch.header.stream_schema.stream in WATCHED:
                        rows.append(batch)
                    elif batch.header.stream_schema.stream == "scalars":
                        with_scalars.add(identity.run_id)
                    for row in events:
                        if isinstance(row.event, _AWAITED):
                            dirty.add((identity.run_id, identity.incarnation))
                        if isinstance(row.event, DecisionMade | RunEnded):
                            changed.add(identity.run_id)
                        if isinstance(row.event, _NOTED):
                            noted.add(identity.run_id)
        self._watching.add(rows)
        for run_id in noted:
            self._watching.note(run_id)
        for run_id in with_scalars:
            self._watching.note_scalars(run_id)
        self._runs.touch(run_ids, at_once=False)
        self._runs.touch(changed, at_once=True)
        if dirty:
            with self._lock:
                self._dirty |= dirty

    def poll(self, *, only_new: bool = False) -> None:
        """Process new rows of owned runs: detectors, states; report them, or raise new alerts.

        With several collectors, the pager raises alerts for its own runs and all others: new
        decisions and findings, lasting conditions, and undelivered alerts. Commands that were not
        delivered in time expire. With ``only_new``, process only what arrived since the last poll.

        Raises:
            StorageError: the store refused; nothing is lost, call again.
        """
        self._sort_committed_rows()
        epoch = self._lease.epoch()
        if epoch is not None:
            with self._lease.fence_writes(epoch):
                self._read_other_reports(epoch, only_new=only_new)
        self._follow_owned(is_pager=epoch is not None)
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            if epoch is not None:
                with self._lease.fence_writes(epoch):
                    for writer in sorted(dirty):
                        self._consume_decisions(writer)
            changed = self._refresh_runs(only_new=only_new, is_pager=epoch is not None)
            runs_with_findings = self._run_fleet_detectors(only_new=only_new)
            dirty |= {(run_id, COLLECTOR) for run_id in runs_with_findings}
            changed |= {run_id for run_id, _ in dirty}
            present = self._runs.statuses(changed if only_new else None)
            if epoch is None:
                self._report(dirty, present, only_new=only_new)
            else:
                with self._lease.fence_writes(epoch):
                    self._update_alerts(dirty, present, only_new=only_new)
            dirty.clear()
        finally:
            with self._lock:
                self._dirty |= dirty

    def _follow_owned(self, *, is_pager: bool) -> None:
        """Start to process runs that this collector has acquired, from their stored state."""
        owned = self._store.claims.owned()
        if owned is not None:
            before = self._owned or {}
            taken = [run_id for run_id, epoch in owned.items() if before.get(run_id) != epoch]
            self._watching.take_over(taken)
            if is_pager:
                self._mark_unread(taken)
            self._runs.drop(taken)
        self._owned = owned

    def _is_own(self, run_id: str) -> bool:
        """Return whether this engine processes the run's rows: its collector owns it."""
        return self._owned is None or run_id in self._owned

    def is_pager(self) -> bool:
        """Return whether this engine raises the new alerts of all runs, and has started to."""
        if not self._lease.is_shared:
            return True
        return self._epoch is not None and self._lease.epoch() == self._epoch

    def _become_pager(self, epoch: int) -> None:
        """Start to raise new alerts of all runs, from the stored state: as after a restart."""
        # other pagers did so in the meantime: the cached state is outdated
        if self._epoch is not None:
            self._runs = RunStatusCache(is_shared=self._lease.is_shared)
            self._resend_ns = None
            if self._dispatcher is not None:
                self._dispatcher.drop_queues()
        self._others, self._ownerless_since, self._settled = {}, None, set()
        owned = self._store.claims.owned()
        if owned is not None:
            self._reporter.withdraw(owned)
        # before reading what is stored: events committed from now on are noticed
        self._epoch = epoch
        try:
            self._mark_unread()
            self._adopt_receivers()
        except BaseException:
            self._epoch = None
            raise

    def _adopt_receivers(self) -> None:
        """As the new pager, load the receivers' state; resolve alerts of removed ones."""
        if self._dispatcher is not None:
            for alert in self._dispatcher.load_failing_receivers(self._inbox.reported()):
                self._inbox.report(resolve_alert(alert, self._clock.time_ns()))

    # ------------------------------------------------------------------ runs that others own

    def _read_other_reports(self, epoch: int, *, only_new: bool) -> None:
        """Read the states of runs that other owners process, to raise alerts for them."""
        if epoch != self._epoch:
            self._become_pager(epoch)
        elif only_new:
            return
        if self._store.claims.owned() is None:
            return
        with self._store.read_transaction() as connection:
            elsewhere = self._store.claims.elsewhere(connection)
        before, self._others = (
            self._others,
            {run.run_id: report for run in elsewhere if (report := report_of(run)) is not None},
        )
        # An owner that reports nothing, such as a dead one, may have stored events without alerts.
        quiet = {run.run_id for run in elsewhere} | before.keys()
        with_news = {
            run_id
            for run_id, report in self._others.items()
            if run_id not in before or before[run_id].news[:2] != report.news[:2]
        }
        try:
            self._mark_unread(with_news | (quiet - self._others.keys()))
        except BaseException:
            self._others = before
            raise
        self._elsewhere = {run.run_id for run in elsewhere}

    def _claim_orphaned_runs(self) -> None:
        """Acquire, to process them live, runs without an owner that run or have new rows.

        For runs without an owner, mark their unprocessed events at once.
        """
        now, before = self._clock.monotonic_ns(), self._ownerless_since or {}
        owned = self._store.claims.owned()
        if owned is None:
            return
        nobodys = {run.run_id for run in self._runs.statuses()} - self._elsewhere - owned.keys()
        self._settled &= nobodys
        let_go = (
            nobodys - self._settled - before.keys()
            if self._ownerless_since is not None
            else set[str]()
        )
        # The owner may not have reported its last events: the state before may be outdated.
        self._mark_unread(let_go)
        self._runs.touch(let_go, at_once=True)
        self._ownerless_since = {
            run_id: before.get(run_id, now) for run_id in nobodys - self._settled
        }
        # Its agents may be on their way to any collector, and choose better.
        since = now - int(_LEFT_SECONDS * 1e9) if self._elsewhere else now
        due = [
            run_id
            for run_id, at in self._ownerless_since.items()
            if at <= since and run_id not in let_go
        ]
        if not due:
            return
        with self._store.read_transaction() as connection:
            orphaned_runs = self._runs.running.intersection(due).union(unread_runs(connection, due))
        if orphaned_runs:
            self._store.claims.claim(orphaned_runs)
        self._settled.update(due)

    def _report(
        self, dirty: Collection[Writer], present: Iterable[RunStatus], *, only_new: bool
    ) -> None:
        """Report the states of runs processed here to the collector that raises alerts."""
        with_words = [run_id for run_id, _ in dirty]
        runs = [self._current_run_state(run) for run in present if self._is_own(run.run_id)]
        self._reporter.report(self._owned or {}, with_words, runs, only_new=only_new)

    # ----------------------------------------------------------------------------------- one look

    def _update_alerts(
        self, dirty: Collection[Writer], present: Iterable[RunStatus], *, only_new: bool
    ) -> None:
        """Raise new alerts for findings, and update all alerts from the runs' states."""
        others = [run.now for run_id, run in self._others.items() if not self._is_own(run_id)]
        finished = {run.run_id for run in self._runs.statuses() if run.state == "finished"}
        finished |= {run.run_id for run in others if run.state == "finished"}
        # Before the runs' states, which resolve alerts: a renewed condition is not over. And stored
        # steps must not resolve an alert that is raised only now.
        fired = self._consume_findings(sorted(dirty), finished)
        # The conditions of a running run without an owner are unknown; it gets an owner soon.
        runs = [
            self._current_run_state(run)
            for run in present
            if self._is_own(run.run_id) or run.state != "running"
        ]
        if not only_new:
            runs += others
        if runs:
            self._inbox.update(self._add_lasting_conditions(run, fired) for run in runs)
        if not only_new:
            commands.expire_commands(self._store, self._clock.time_ns())
            self._resend_undelivered()
            self._claim_orphaned_runs()

    def _run_fleet_detectors(self, *, only_new: bool) -> frozenset[str]:
        """Run the fleet detectors; return the runs with new findings."""
        running = self._runs.running
        polled = self._watching.poll(
            now_ns=self._clock.monotonic_ns(),
            running=running if self._owned is None else running & self._owned.keys(),
            only_new=only_new,
            owned=self._owned,
        )
        self._has_more = polled.has_more
        return polled.runs_with_findings

    @property
    def has_more(self) -> bool:
        """Return whether the last poll left rows for the next one."""
        return self._has_more

    @property
    def watching(self) -> LiveMonitor:
        """Return the monitor that runs the fleet detectors as rows arrive."""
        return self._watching

    def start(self) -> None:
        """Start the thread that polls for new rows, and raises new alerts."""
        self._thread = threading.Thread(target=self._run, name="vitals-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that raises new alerts, after its current poll."""
        self._stopping.set()
        self._urgent.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """Poll in a thread as rows arrive: soon after an urgent event, otherwise at intervals."""
        interval = int(self._config.interval_seconds * 1e9)
        due = self._clock.monotonic_ns()
        while not self._stopping.is_set():
            self._wake.clear()  # before: events from now on are for the next poll
            self._urgent.clear()
            is_due = self._clock.monotonic_ns() >= due
            if is_due:
                due = self._clock.monotonic_ns() + interval
            try:
                self.poll(only_new=not is_due)
            except Exception as error:  # noqa: BLE001 - a bug of ours must not end alerting
                self._store.counters.fail("engine")
                self._log_error(error)
                self._stopping.wait(self._config.interval_seconds)
                continue
            if not self._has_more:
                # Not at every commit: a thousand agents commit all the time, and one poll costs the
                # same for one row and for a thousand.
                self._urgent.wait(_PAUSE_SECONDS)
                self._wake.wait(max(0.0, (due - self._clock.monotonic_ns()) / 1e9))

    def _log_error(self, error: Exception) -> None:
        """Log the error that ended a poll; log a bug once, with its traceback."""
        if isinstance(error, VitalsError):
            _LOG.warning("engine: %s", error)
            return
        text = repr(error)
        if text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(text)
            _LOG.error("engine: one poll failed, polling continues", exc_info=error)

    # --------------------------------------------------------------------------------- decisions

    def _mark_unread(self, run_ids: Collection[str] | None = None) -> None:
        """Mark writers whose stored events have not raised their alerts yet."""
        if run_ids is not None and not run_ids:
            return
        queries = {
            "decisions": select(
                decisions.c.run_id, decisions.c.incarnation, func.max(decisions.c.seq)
            ).group_by(decisions.c.run_id, decisions.c.incarnation),
            "findings": select(findings.c.run_id, findings.c.incarnation, func.max(findings.c.seq))
            .where(findings.c.kind.in_(ALERTED_KINDS))
            .group_by(findings.c.run_id, findings.c.incarnation),
        }
        with self._store.read_transaction() as connection:
            unread = set[Writer]()
            for what, query in queries.items():
                if run_ids is not None:
                    table = decisions if what == "decisions" else findings
                    query = query.where(table.c.run_id.in_(run_ids))
                last = {(run_id, of): seq for run_id, of, seq in connection.execute(query)}
                cursors = _cursors(connection, what, None if run_ids is None else last)
                unread |= {
                    writer
                    for writer, seq in last.items()
                    if seq > cursors.get(_cursor_name(writer, what), -1)
                }
        with self._lock:
            self._dirty |= unread

    def _consume_decisions(self, writer: Writer) -> None:
        """Raise the new alerts of a writer's decisions that arrived after its cursor."""
        run_id, name = writer[0], _cursor_name(writer)
        while True:
            with self._store.read_transaction() as connection:
                rows = _next_rows(connection, decisions, writer, name)
            if not rows:
                return
            occurrences = [
                AlertOccurrence(run_id, row.time_unix_ns, alert)
                for row, decision in self._decode_readable_rows(rows, _decision)
                for alert in alerts_for_decision(decision, run_id=run_id)
                if alert.point  # the others follow the run's state
            ]
            self._inbox.raise_alerts(occurrences, cursors={name: rows[-1].seq})

    def _decode_readable_rows(
        self, rows: Iterable[Any], decode: Callable[[bytes], _Record]
    ) -> Iterator[tuple[Any, _Record]]:
        """Yield the new events that this version can read, to raise alerts; skip the others.

        A newer collector on the same database may store what an older one, which pages, cannot.
        """
        for row in rows:
            try:
                if row.body:
                    yield row, decode(row.body)
            except UNREADABLE as error:
                self._store.counters.fail("engine")
                self._log_error(error)

    def _consume_findings(
        self, writers: Sequence[Writer], finished: Collection[str]
    ) -> frozenset[str]:
        """Raise the new alerts of findings that arrived; a finished run raises none.

        Findings of all writers together: an alert that several ranks raise names all of them.
        Returns the fingerprints of alerts that started to fire.
        """
        fired: frozenset[str] = frozenset()
        while writers:
            occurrences: list[AlertOccurrence] = []
            cursors: dict[str, int] = {}
            unread: list[Writer] = []
            for writer in writers:
                name = _cursor_name(writer, "findings")
                num, seq, raised = self._read_findings(writer, name, writer[0] in finished)
                occurrences += raised
                if num:
                    cursors[name] = seq
                if num == _AT_ONCE:
                    unread.append(writer)
            if cursors:
                fired |= self._inbox.raise_alerts(occurrences, cursors=cursors)
            writers = unread
        return fired

    def _read_findings(
        self, writer: Writer, cursor: str, is_finished: bool
    ) -> tuple[int, int, list[AlertOccurrence]]:
        """Read a writer's next findings: how many, the last one's number, and new alerts."""
        run_id, is_alerted = writer[0], findings.c.kind.in_(ALERTED_KINDS)
        with self._store.read_transaction() as connection:
            rows = _next_rows(connection, findings, writer, cursor, is_alerted)
            decided = _decided_steps(connection, writer) if rows else {}
            loss_kind = loss_kind_of(connection, run_id) if rows else ""
        timed_findings = [
            (row.time_unix_ns, finding)
            for row, finding in self._decode_readable_rows(rows, _finding)
        ]
        occurrences = [
            AlertOccurrence(run_id, time_unix_ns, alert)
            for time_unix_ns, finding in timed_findings
            if not is_finished and not is_answered(finding, decided.get(finding.step, ()))
            for alert in alerts_for_finding(finding, run_id=run_id, loss_kind=loss_kind)
            if alert.point  # the others last as long as the detectors report them
        ]
        return len(rows), rows[-1].seq if rows else -1, occurrences

    # -------------------------------------------------------------------------------------- runs

    def _refresh_runs(self, *, only_new: bool, is_pager: bool) -> set[str]:
        """Refresh the states of owned runs; the pager adds runs that no collector reports."""
        now = self._steady.time_ns()
        hearing = self._store.ingest_uptime
        if self._store.no_room is not None:
            hearing.restart(now)
        when = Liveness(
            now_unix_ns=now,
            up_since_unix_ns=max(self._up_since_unix_ns, hearing.since(now)),
            lost_after_seconds=self._config.lost_after_seconds,
            is_reading_in=self._store.is_importing,
        )
        owned_runs = None if is_pager or self._owned is None else self._owned.keys()
        others = {run_id for run_id in self._others if not self._is_own(run_id)}
        with self._store.read_transaction() as connection:
            refreshed = self._runs.refresh(
                connection,
                when,
                only_new=only_new,
                of=owned_runs,
                exclude=others if is_pager else (),
            )
        if not only_new:
            hearing.looked(now)
        return refreshed

    def _current_run_state(self, run: RunStatus) -> CurrentRunState:
        """Return a run's state with the conditions for which alerts are raised now."""
        conditions: list[Alert] = [
            *alerts_for_run_state(run.state, run_id=run.run_id, step=run.step, reason=run.reason)
        ]
        since = {alert.fingerprint: run.ended_unix_ns for alert in conditions}
        lasting = set[str]()
        absences = self._alerts_for_absent(run, run.absent)
        conditions += absences
        # This collector has just started: what was silent before may report again, or not.
        unheard = self._alerts_for_absent(run, run.unheard)
        lasting.update(alert.fingerprint for alert in unheard)
        if run.state == "running":
            hang = run.hang
            if run.is_unheard:
                lost = alerts_for_run_state("lost", run_id=run.run_id)
                lasting.update(alert.fingerprint for alert in lost)
            for finding in self._watching.conditions(run.run_id):
                named = _named_alerts(finding, run)
                if finding.kind == "stalled" and not hang:
                    with self._store.read_transaction() as connection:
                        hang = hang_of(connection, run.run_id, run.last_step)
                if finding.kind == "stalled" and (
                    hang or any(alert.severity == "page" for alert in absences)
                    # this explains the stall, and was reported; if it was reported before, it still
                    # applies
                ):
                    lasting.update(alert.fingerprint for alert in named)
                    continue
                conditions += named
            for finding in self._watching.lasting(run.run_id):
                alerts = alerts_for_finding(finding, run_id=run.run_id)
                lasting.update(alert.fingerprint for alert in alerts)
        return CurrentRunState(
            run_id=run.run_id,
            state=run.state,
            last_step=run.last_step,
            last_unhealthy_step=run.last_trouble,
            last_seen_unix_ns=run.last_seen_unix_ns,
            conditions=tuple(conditions),
            since=since,
            lasting=frozenset(lasting),
        )

    def _add_lasting_conditions(
        self, run: CurrentRunState, fired: frozenset[str]
    ) -> CurrentRunState:
        """Add to a run's current state the lasting conditions that only this collector knows."""
        lasting, conditions = run.lasting | fired, run.conditions
        if run.state == "running":
            self._gone[run.run_id] = {alert.fingerprint for alert in conditions} | lasting
        elif run.state == "lost":  # a lost part is still lost when everything else is
            lasting |= self._gone.get(run.run_id, set())
        else:
            self._gone.pop(run.run_id, None)
        over_cap = self._store.counters.over_cap
        if over_cap is None:
            lasting |= {alert_for_cap(run.run_id).fingerprint}
        elif run.run_id in over_cap:
            conditions = (*conditions, alert_for_cap(run.run_id, over_cap[run.run_id]))
        return replace(run, conditions=conditions, lasting=lasting)

    def _alerts_for_absent(self, run: RunStatus, parts: AbsentParts) -> list[Alert]:
        """Return the new alerts about a run's silent nodes, ranks and agents."""
        seconds = self._config.lost_after_seconds
        silent = f"silent for more than {seconds:g} s"
        before = f"; before that: {run.hang}" if run.hang else ""
        kinds = (
            ("NodeLost", parts.nodes, f"{silent}, and no step passed without it"),
            (
                "RankLost",
                [f"rank {rank}" for rank in parts.ranks],
                f"its process ended without a clean exit while the job continues{before}",
            ),
            (
                "AgentLost",
                parts.agents,
                f"{silent} while the run continues: its agent does not report",
            ),
            (
                "AgentLost",
                ["unheard ranks"] if parts.never_heard else [],  # one agent reports for many
                f"{name_ranks(parts.never_heard, 16)}: no report for more than {seconds:g} s "
                "while the run continues",
            ),
        )
        return [
            alert
            for name, names, what in kinds
            for alert in alerts_for_absence(
                name, names, run_id=run.run_id, step=run.last_step, what=what
            )
        ]

    def _resend_undelivered(self) -> None:
        """At polls, once per interval, submit alerts again that a receiver has not had."""
        now = self._clock.monotonic_ns()
        if self._dispatcher is None:
            return
        if not self._dispatcher.is_pager():
            self._resend_ns = None  # at once when it becomes the pager
            return
        if self._resend_ns is not None and now < self._resend_ns:
            return
        self._resend_ns = now + int(_RESEND_SECONDS * 1e9)
        new, posted = self._inbox.undelivered()
        for view, life in new:
            self._dispatcher.resume(view, active_since=life.active_since)
        for view in posted:
            self._dispatcher.keep_posting(view)


class AlertService(NamedTuple):
    """The running parts, connected to each other; close them before the store."""

    inbox: Inbox
    engine: AlertEngine
    dispatcher: Dispatcher
    lease: Lease
    receivers: tuple[str, ...] = ()
    """The notifiers' names."""

    def start(self) -> None:
        """Start the threads that process rows as they arrive, and deliver new alerts."""
        self.lease.start()
        self.dispatcher.start()
        self.engine.start()

    def close(self) -> None:
        """Stop processing rows as they arrive; undelivered alerts wait for the next start."""
        self.engine.close()
        self.dispatcher.close()
        self.lease.close()


def build_alert_service(
    store: Store,
    notifiers: Iterable[Notifier],
    *,
    clock: Clock,
    config: EngineConfig | None = None,
    inbox_config: InboxConfig | None = None,
    up_since_unix_ns: int = 0,
    is_shared: bool = False,
    host_port: str = "",
    is_pager: Callable[[], bool] | None = None,
) -> AlertService:
    """Build what raises new alerts as rows arrive: engine, inbox, dispatcher; nothing runs yet.

    Rows could be received since ``up_since_unix_ns``. With ``is_shared``, other collectors may use
    the store: one of them watches and delivers, chosen by its lease unless ``is_pager`` decides.
    ``host_port`` is a resource that this process holds exclusively (``cluster.leases``).
    """
    lease = Lease(store, PAGER, clock=clock, is_shared=is_shared, process_place=host_port)
    notifiers = list(notifiers)
    dispatcher = Dispatcher(
        notifiers,
        clock=clock,
        on_settled=partial(settle_alert, store),
        ledger=SqlDeliveryLedger(store, clock=clock),
        is_pager=is_pager or (lambda: engine.is_pager()),
        report=lambda alert: inbox.report(alert),
    )
    inbox = Inbox(
        store,
        clock=clock,
        tell=dispatcher.submit,
        hush=dispatcher.withdraw,
        config=inbox_config,
    )
    engine = AlertEngine(
        store,
        inbox,
        clock=clock,
        dispatcher=dispatcher,
        config=config,
        up_since_unix_ns=up_since_unix_ns,
        lease=lease,
    )
    receivers = tuple(notifier.name for notifier in notifiers)
    return AlertService(inbox, engine, dispatcher, lease, receivers)


def _named_alerts(finding: Finding, run: RunStatus) -> tuple[Alert, ...]:
    """Return the new alerts of a lasting finding; for a stall, with the ranks that are behind."""
    raised = alerts_for_finding(finding, run_id=run.run_id)
    if finding.kind != "stalled" or not run.behind:
        return raised
    behind = f"; behind the others: {name_ranks(run.behind, 16)}"
    return tuple(msgspec.structs.replace(alert, summary=alert.summary + behind) for alert in raised)


def _decided_steps(connection: Connection, writer: Writer) -> dict[int, set[str]]:
    """Return a writer's decided actions by step, so that no finding raises an alert for them."""
    query = select(decisions.c.step, decisions.c.action).where(
        decisions.c.run_id == writer[0],
        decisions.c.incarnation == writer[1],
        decisions.c.action != "continue",
    )
    actions: dict[int, set[str]] = {}
    for step, action in connection.execute(query):
        actions.setdefault(step, set()).add(action)
    return actions


def _cursor_name(writer: Writer, what: str = "decisions") -> str:
    """Return the name of the alert engine's cursor for a writer's events."""
    return f"{what}/{writer[0]}/{writer[1]}"


def _next_rows(
    connection: Connection,
    table: Table,
    writer: Writer,
    cursor: str,
    *conditions: ColumnElement[bool],
) -> Sequence[Any]:
    """Return a writer's next decisions or findings after its cursor, in order."""
    of = table.c
    query = select(of.seq, of.time_unix_ns, of.body).where(
        of.run_id == writer[0],
        of.incarnation == writer[1],
        of.seq > _load_cursor(connection, cursor),
        *conditions,
    )
    return connection.execute(query.order_by(of.seq).limit(_AT_ONCE)).all()


def _load_cursor(connection: Connection, name: str) -> int:
    """Return the number of a writer's last event that the alert engine consumed."""
    body = load_state(connection, name)
    return -1 if body is None else msgspec.msgpack.decode(body, type=int)


def _cursors(connection: Connection, what: str, writers: Iterable[Writer] | None) -> dict[str, int]:
    """Return the alert engine's cursors of one kind, for all or some writers."""
    name = engine_state.c.name
    if writers is None:
        filters = [name.startswith(f"{what}/")]
    else:
        names = [_cursor_name(writer, what) for writer in writers]
        filters = [
            name.in_(names[first : first + _NAMES_AT_ONCE])
            for first in range(0, len(names), _NAMES_AT_ONCE)
        ]
    rows = [
        row
        for where in filters
        for row in connection.execute(select(name, engine_state.c.body).where(where))
    ]
    return {name: msgspec.msgpack.decode(body, type=int) for name, body in rows}
