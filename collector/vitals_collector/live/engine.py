"""Turns what was stored into alerts: decisions and findings once, runs' states as they change.

The ladder inside the job decided, and its decisions arrive as events; the detectors there found,
and so do their findings. What shows only in the steps of all ranks, and in the nodes' samples, the
engine has looked at by ``watching``, whose findings lie beside the others. What the job cannot say
(that it is gone) comes from the run's state. It works from the store alone, with a cursor per
writer kept beside the alerts, so a collector that died between storing and alerting goes on where
it was.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection, func, select

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
from trainvitals.wire import Batch
from vitals_collector.alerts import commands
from vitals_collector.alerts.deliveries import SqlLedger
from vitals_collector.alerts.delivery import Dispatcher, ended
from vitals_collector.alerts.inbox import Inbox, InboxConfig, Occurrence, RunNow, settle
from vitals_collector.alerts.notifiers import Notifier
from vitals_collector.cluster.leases import LEASE_SECONDS, PAGER, Lease
from vitals_collector.ingest.projections import loss_kind_of
from vitals_collector.live.live_monitor import COLLECTOR, LiveMonitor
from vitals_collector.live.run_status import (
    Absent,
    Liveness,
    RunStatus,
    RunStatusCache,
    hang_of,
)
from vitals_collector.live.tail_reader import WATCHED
from vitals_collector.storage.schema import decisions, engine_state, findings, sources
from vitals_collector.storage.store import Store

_AT_ONCE = 500
_MAX_LOGGED = 100
"""Errors of our own that are logged whole; those beyond are only counted."""
_Record = TypeVar("_Record")
_AWAITED = (DecisionMade, FindingRaised)
"""Events of which people may be told."""
_NOTED = CheckpointChanged | NamesDefined | RanksStill | TrainingPaused
"""Events that change how a run is watched."""
_MOST_CAME = 8
"""Commits that wait for a look: each is some MB at most, and what is sorted has a bound."""
_PAUSE_SECONDS = 0.2
"""Time between two looks at rows that just arrived: those of a large run arrive all the time."""
_RESEND_SECONDS = 60.0
"""How often a change that no notifier has settled is handed out again: the end of a silence, and
the start of this process."""
_RECENT_NS = 60_000_000_000
"""Within it, another collector may have received something of a run; its clock may be off, too."""
_LOG = logging.getLogger("vitals.collector.engine")
_decision = msgspec.msgpack.Decoder(Decision).decode
_finding = msgspec.msgpack.Decoder(Finding).decode

Writer = tuple[str, str]
"""A run and an incarnation in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine looks at runs."""

    lost_after_seconds: float = 60.0
    """A run that is silent for longer, and its agent too, is lost."""
    interval_seconds: float = 2.0
    """How often all runs that go on are looked at; silence tells too."""


class Engine:
    """Reads the store after ingests and at intervals; writes alerts. ``poll`` is one look."""

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
        """The time as the pager to which what is remembered belongs."""
        self._clock = clock
        self._dispatcher = dispatcher
        self._config = config or EngineConfig()
        self._up_since_unix_ns = up_since_unix_ns
        self._lock = threading.Lock()
        self._came: deque[Sequence[tuple[Batch, Sequence[EventRow]]]] = deque()
        """Committed, and not looked at yet."""
        self._dirty: set[Writer] = set()
        self._own: tuple[set[str], set[str]] = set(), set()
        """Runs whose rows this process stored since the last look at those of others, and between
        that and the one before."""
        self._looked_ns = 0
        """When that was."""
        self._watching = LiveMonitor(store)
        self._runs = RunStatusCache()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        """Set with ``_wake`` where people may be waiting for what came."""
        self._stopping = threading.Event()
        self._has_more = False
        self._thread: threading.Thread | None = None
        self._resend_ns: int | None = None
        self._logged: set[str] = set()
        self._gone: dict[str, set[str]] = {}
        """By run the alerts that held, or may, when it was last seen to go on."""
        store.after_ingest.append(self.after_ingest)

    def after_ingest(self, new: Sequence[tuple[Batch, Sequence[EventRow]]]) -> None:
        """Note who wrote what, and have it looked at soon; reads and writes nothing."""
        # Called by the threads that commit, before agents have their answers: all work is left to
        # the engine's own.
        if self._lease.is_shared and self._lease.epoch() is None:
            return  # who watches, or will, reads it from the store
        self._came.append(new)
        if len(self._came) > _MOST_CAME:  # it does not look: what is kept has a bound there
            self._take_in()
        if any(isinstance(row.event, _AWAITED) for _, events in new for row in events):
            self._urgent.set()
        self._wake.set()

    def _take_in(self) -> None:
        """Sort what was committed by whom it is for."""
        rows: list[Batch] = []
        run_ids: set[str] = set()
        changed: set[str] = set()
        noted: set[str] = set()
        dirty: set[Writer] = set()
        while self._came:
            with suppress(IndexError):  # another thread took it
                for batch, events in self._came.popleft():
                    identity = batch.header.identity
                    run_ids.add(identity.run_id)
                    if batch.header.stream_schema.stream in WATCHED:
                        rows.append(batch)
                    for row in events:
                        if isinstance(row.event, _AWAITED):
                            dirty.add((identity.run_id, identity.incarnation))
                        if isinstance(row.event, DecisionMade | RunEnded):
                            changed.add(identity.run_id)
                        if isinstance(row.event, _NOTED):
                            noted.add(identity.run_id)
        self._own[0].update(run_ids)
        self._watching.add(rows)
        for run_id in noted:
            self._watching.note(run_id)
        self._runs.touch(run_ids, at_once=False)
        self._runs.touch(changed, at_once=True)
        if dirty:
            with self._lock:
                self._dirty |= dirty

    def poll(self, *, only_new: bool = False) -> None:
        """Consume decisions and findings, watch, follow the runs' states, tell what was not told.

        Commands that nobody took in time expire.

        Args:
            only_new: look only at what arrived since the last look, which costs little.

        Raises:
            StorageError: the store refused; nothing is lost, call again.
        """
        if not self._lease.is_shared:
            if self._epoch is None:
                self._begin(1)
            self._look(only_new=only_new)
            return
        epoch = self._lease.epoch()
        if epoch is None:
            self._store.hearing.rest()
            self._has_more = False
            return
        with self._lease.fenced(epoch):
            if epoch != self._epoch:
                self._begin(epoch)
            elif not only_new:
                self._look_for_rows_of_others()
            self._look(only_new=only_new)

    def is_pager(self) -> bool:
        """Return whether this collector watches runs and delivers alerts, and has begun to."""
        if not self._lease.is_shared:
            return True
        return self._epoch is not None and self._lease.epoch() == self._epoch

    def _begin(self, epoch: int) -> None:
        """Become the one that watches and delivers, from what is stored: as after a restart."""
        if self._epoch is not None:  # others did so meanwhile: what we remember is of before
            self._watching = LiveMonitor(self._store)
            self._runs = RunStatusCache()
            self._resend_ns = None
            if self._dispatcher is not None:
                self._dispatcher.forget()
        if self._lease.is_shared:
            # Those who told another one, which is gone, may not have found this one yet.
            self._store.hearing.begin(self._clock.time_ns())
        self._epoch = epoch  # before reading what is stored: what is committed from now on is told
        try:
            self._mark_unread()
            self._adopt_receivers()
        except BaseException:
            self._epoch = None
            raise

    def _adopt_receivers(self) -> None:
        """Go on from what was reported of receivers before; one that is no more has no alert."""
        if self._dispatcher is not None:
            for alert in self._dispatcher.adopt(self._inbox.reported()):
                self._inbox.report(ended(alert, self._clock.time_ns()))

    def _look_for_rows_of_others(self) -> None:
        """Take up what other collectors have stored, which nobody here was told of."""
        self._mark_unread()
        self._take_in()
        now = self._clock.monotonic_ns()
        new, before = self._own
        # A run has one owner at a time. What is this one's now, and was at the look before, was so
        # all the while; to read it from the store each time would cost more than to watch it.
        is_sure = now - self._looked_ns < int(LEASE_SECONDS * 1e9)
        mine = new & before if is_sure else set[str]()
        self._own, self._looked_ns = (set(), new), now
        since = self._clock.time_ns() - _RECENT_NS
        query = select(sources.c.run_id).where(sources.c.last_received_unix_ns >= since).distinct()
        with self._store.read() as connection:
            run_ids = set(connection.execute(query).scalars()) - mine
        for run_id in run_ids:
            self._watching.note(run_id)
        self._runs.touch(run_ids, at_once=True)

    def _look(self, *, only_new: bool) -> None:
        self._take_in()
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            for writer in sorted(dirty):
                self._consume(writer)
            refreshed = self._refresh_runs(only_new=only_new)
            runs_with_findings = self._watch(only_new=only_new)
            dirty |= {(run_id, COLLECTOR) for run_id in runs_with_findings}
            changed = refreshed | runs_with_findings if only_new else None
            finished = {run.run_id for run in self._runs.statuses() if run.state == "finished"}
            # Before the runs' present, which resolves: what was renewed meanwhile is not over. And
            # steps that are stored already must not resolve what is told only now.
            fired = self._consume_findings(sorted(dirty), finished)
            dirty.clear()
            if statuses := self._runs.statuses(changed):
                self._inbox.update(self._run_now(status, fired) for status in statuses)
        finally:
            with self._lock:
                self._dirty |= dirty
        if not only_new:
            commands.expire(self._store, self._clock.time_ns())
            self._resend()

    def _watch(self, *, only_new: bool) -> frozenset[str]:
        """Have the watchers look; return the runs of which they found something new."""
        polled = self._watching.poll(
            now_ns=self._clock.monotonic_ns(), running=self._runs.running, only_new=only_new
        )
        self._has_more = polled.has_more
        return polled.runs_with_findings

    @property
    def watching(self) -> LiveMonitor:
        """What looks at the steps of all ranks."""
        return self._watching

    def start(self) -> None:
        """Start the thread that polls."""
        self._thread = threading.Thread(target=self._run, name="vitals-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after its present look."""
        self._stopping.set()
        self._urgent.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        interval = int(self._config.interval_seconds * 1e9)
        due = self._clock.monotonic_ns()
        while not self._stopping.is_set():
            self._wake.clear()  # before: what comes from here on is looked at next time
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
                # Not at every commit: a thousand agents commit all the time, and one look costs the
                # same for one row and for a thousand.
                self._urgent.wait(_PAUSE_SECONDS)
                self._wake.wait(max(0.0, (due - self._clock.monotonic_ns()) / 1e9))

    def _log_error(self, error: Exception) -> None:
        """Log what stopped a look; of an error that is ours, once, where it happened."""
        if isinstance(error, VitalsError):
            _LOG.warning("engine: %s", error)
            return
        text = repr(error)
        if text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(text)
            _LOG.error("engine: one poll failed, polling continues", exc_info=error)

    # --------------------------------------------------------------------------------- decisions

    def _mark_unread(self) -> None:
        """Mark every writer whose words were stored and not consumed, before a restart."""
        queries = {
            "decisions": select(
                decisions.c.run_id, decisions.c.incarnation, func.max(decisions.c.seq)
            ).group_by(decisions.c.run_id, decisions.c.incarnation),
            "findings": select(findings.c.run_id, findings.c.incarnation, func.max(findings.c.seq))
            .where(findings.c.kind.in_(ALERTED_KINDS))
            .group_by(findings.c.run_id, findings.c.incarnation),
        }
        with self._store.read() as connection:
            unread = {
                (run_id, incarnation)
                for what, query in queries.items()
                for cursors in [_cursors(connection, what)]
                for run_id, incarnation, seq in connection.execute(query)
                if seq > cursors.get(_cursor_name((run_id, incarnation), what), -1)
            }
        with self._lock:
            self._dirty |= unread

    def _consume(self, writer: Writer) -> None:
        run_id, incarnation = writer
        name = _cursor_name(writer)
        while True:
            with self._store.read() as connection:
                query = (
                    select(decisions.c.seq, decisions.c.time_unix_ns, decisions.c.body)
                    .where(
                        decisions.c.run_id == run_id,
                        decisions.c.incarnation == incarnation,
                        decisions.c.seq > _cursor(connection, name),
                    )
                    .order_by(decisions.c.seq)
                    .limit(_AT_ONCE)
                )
                rows = connection.execute(query).all()
            if not rows:
                return
            occurrences = [
                Occurrence(run_id, row.time_unix_ns, alert)
                for row, decision in self._readable(rows, _decision)
                for alert in alerts_for_decision(decision, run_id=run_id)
                if alert.point  # the others follow the run's state
            ]
            self._inbox.take(occurrences, cursors={name: rows[-1].seq})

    def _readable(
        self, rows: Iterable[Any], decode: Callable[[bytes], _Record]
    ) -> Iterator[tuple[Any, _Record]]:
        """Yield the rows whose record this version can read; the others keep nobody silent.

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
        """Raise what findings tell by themselves; a finished run has nothing to fire.

        Those of all writers together: of an alert that several ranks raise, all are named at once.
        Returns the fingerprints of alerts that began to fire.
        """
        fired: frozenset[str] = frozenset()
        while writers:
            occurrences: list[Occurrence] = []
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
                fired |= self._inbox.take(occurrences, cursors=cursors)
            writers = unread
        return fired

    def _read_findings(
        self, writer: Writer, cursor: str, is_finished: bool
    ) -> tuple[int, int, list[Occurrence]]:
        """Return how many findings come next, the last one's number, and what they raise."""
        run_id, incarnation = writer
        with self._store.read() as connection:
            query = (
                select(findings.c.seq, findings.c.time_unix_ns, findings.c.body)
                .where(
                    findings.c.run_id == run_id,
                    findings.c.incarnation == incarnation,
                    findings.c.kind.in_(ALERTED_KINDS),
                    findings.c.seq > _cursor(connection, cursor),
                )
                .order_by(findings.c.seq)
                .limit(_AT_ONCE)
            )
            rows = connection.execute(query).all()
            decided = _decided_steps(connection, writer) if rows else {}
            loss_kind = loss_kind_of(connection, run_id) if rows else ""
        timed_findings = [
            (row.time_unix_ns, finding) for row, finding in self._readable(rows, _finding)
        ]
        occurrences = [
            Occurrence(run_id, time_unix_ns, alert)
            for time_unix_ns, finding in timed_findings
            if not is_finished and not is_answered(finding, decided.get(finding.step, ()))
            for alert in alerts_for_finding(finding, run_id=run_id, loss_kind=loss_kind)
            if alert.point  # the others hold as long as the watchers say so
        ]
        return len(rows), rows[-1].seq if rows else -1, occurrences

    # -------------------------------------------------------------------------------------- runs

    def _refresh_runs(self, *, only_new: bool) -> set[str]:
        now = self._clock.time_ns()
        hearing = self._store.hearing
        if self._store.no_room is not None:
            hearing.begin(now)
        when = Liveness(
            now_unix_ns=now,
            up_since_unix_ns=max(self._up_since_unix_ns, hearing.since(now)),
            lost_after_seconds=self._config.lost_after_seconds,
            is_reading_in=self._store.is_reading_in,
        )
        with self._store.read() as connection:
            refreshed = self._runs.refresh(connection, when, only_new=only_new)
        if not only_new:
            hearing.looked(now)
        return refreshed

    def _run_now(self, run: RunStatus, fired: frozenset[str]) -> RunNow:
        conditions: list[Alert] = [
            *alerts_for_run_state(run.state, run_id=run.run_id, step=run.step, reason=run.reason)
        ]
        since = {alert.fingerprint: run.ended_unix_ns for alert in conditions}
        lasting = set(fired)
        absences = self._alerts_for_absent(run, run.absent)
        conditions += absences
        # This collector has just started: what was silent before may speak yet, or not.
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
                    hang = self._hang_of(run)
                if finding.kind == "stalled" and (
                    hang or any(alert.severity == "page" for alert in absences)
                ):  # that is why it stalls, and it was told; where it was told before, it holds
                    lasting.update(alert.fingerprint for alert in named)
                    continue
                conditions += named
            for finding in self._watching.lasting(run.run_id):
                alerts = alerts_for_finding(finding, run_id=run.run_id)
                lasting.update(alert.fingerprint for alert in alerts)
            self._gone[run.run_id] = {alert.fingerprint for alert in conditions} | lasting
        elif run.state == "lost":  # what was gone is not back for all the rest being gone as well
            lasting |= self._gone.get(run.run_id, set())
        else:
            self._gone.pop(run.run_id, None)
        over_cap = self._store.counters.over_cap
        if over_cap is None:
            lasting.add(alert_for_cap(run.run_id).fingerprint)
        elif run.run_id in over_cap:
            conditions.append(alert_for_cap(run.run_id, over_cap[run.run_id]))
        return RunNow(
            run_id=run.run_id,
            state=run.state,
            last_step=run.last_step,
            last_unhealthy_step=run.last_trouble,
            last_seen_unix_ns=run.last_seen_unix_ns,
            conditions=tuple(conditions),
            since=since,
            lasting=frozenset(lasting),
        )

    def _hang_of(self, run: RunStatus) -> str:
        with self._store.read() as connection:
            return hang_of(connection, run.run_id, run.last_step)

    def _alerts_for_absent(self, run: RunStatus, parts: Absent) -> list[Alert]:
        seconds = self._config.lost_after_seconds
        silent = f"silent for more than {seconds:g} s"
        before = f"; before that: {run.hang}" if run.hang else ""
        kinds = (
            ("NodeLost", parts.nodes, f"{silent}, and no step passed without it"),
            (
                "RankLost",
                [f"rank {rank}" for rank in parts.ranks],
                f"its process ended without a word while the job goes on{before}",
            ),
            (
                "AgentLost",
                parts.agents,
                f"{silent} while the run goes on: its agent does not report",
            ),
            (
                "AgentLost",
                ["unheard ranks"] if parts.never_heard else [],  # one agent reports for many
                f"{_listed(parts.never_heard)}: no report for more than {seconds:g} s while the "
                "run goes on",
            ),
        )
        return [
            alert
            for name, names, what in kinds
            for alert in alerts_for_absence(
                name, names, run_id=run.run_id, step=run.last_step, what=what
            )
        ]

    def _resend(self) -> None:
        now = self._clock.monotonic_ns()
        if self._dispatcher is None:
            return
        if not self._dispatcher.is_pager():
            self._resend_ns = None  # at once when it becomes this one's turn
            return
        if self._resend_ns is not None and now < self._resend_ns:
            return
        self._resend_ns = now + int(_RESEND_SECONDS * 1e9)
        new, posted = self._inbox.untold()
        for view, life in new:
            self._dispatcher.resume(view, active_since=life.active_since)
        for view in posted:
            self._dispatcher.keep_posting(view)


class Acting(NamedTuple):
    """The parts that act, wired to each other; close them before the store."""

    inbox: Inbox
    engine: Engine
    dispatcher: Dispatcher
    lease: Lease
    receivers: tuple[str, ...] = ()
    """The notifiers' names."""

    def start(self) -> None:
        """Start their threads."""
        self.lease.start()
        self.dispatcher.start()
        self.engine.start()

    def close(self) -> None:
        """Stop them; what was not delivered is handed out again at the next start."""
        self.engine.close()
        self.dispatcher.close()
        self.lease.close()


def assemble(
    store: Store,
    notifiers: Iterable[Notifier],
    *,
    clock: Clock,
    config: EngineConfig | None = None,
    inbox_config: InboxConfig | None = None,
    up_since_unix_ns: int = 0,
    is_shared: bool = False,
    place: str = "",
    is_pager: Callable[[], bool] | None = None,
) -> Acting:
    """Return inbox, engine and dispatcher over one store; nothing runs yet.

    Args:
        store: what they read and write.
        notifiers: where alerts go.
        clock: when "now" is.
        config: how the engine looks at runs.
        inbox_config: when alerts fire and resolve.
        up_since_unix_ns: since when rows could be received.
        is_shared: other collectors may use the store: one of them watches and delivers.
        place: names what this process alone holds while it lives (``cluster.leases``).
        is_pager: whether this collector delivers; None: while it watches.
    """
    lease = Lease(store, PAGER, clock=clock, is_shared=is_shared, place=place)
    notifiers = list(notifiers)
    dispatcher = Dispatcher(
        notifiers,
        clock=clock,
        on_settled=partial(settle, store),
        ledger=SqlLedger(store, clock=clock),
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
    engine = Engine(
        store,
        inbox,
        clock=clock,
        dispatcher=dispatcher,
        config=config,
        up_since_unix_ns=up_since_unix_ns,
        lease=lease,
    )
    receivers = tuple(notifier.name for notifier in notifiers)
    return Acting(inbox, engine, dispatcher, lease, receivers)


_MOST_NAMED = 16
"""Ranks that a summary names."""


def _named_alerts(finding: Finding, run: RunStatus) -> tuple[Alert, ...]:
    """Return what a finding that holds raises; of a stall, with the ranks that are behind."""
    raised = alerts_for_finding(finding, run_id=run.run_id)
    if finding.kind != "stalled" or not run.behind:
        return raised
    behind = f"; behind the others: {_listed(run.behind)}"
    return tuple(msgspec.structs.replace(alert, summary=alert.summary + behind) for alert in raised)


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if ranks[_MOST_NAMED:] else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _decided_steps(connection: Connection, writer: Writer) -> dict[int, set[str]]:
    """Return what a writer's policy decided, by the step it is about."""
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
    return f"{what}/{writer[0]}/{writer[1]}"


def _cursor(connection: Connection, name: str) -> int:
    query = select(engine_state.c.body).where(engine_state.c.name == name)
    body = connection.execute(query).scalar()
    return -1 if body is None else msgspec.msgpack.decode(body, type=int)


def _cursors(connection: Connection, what: str) -> dict[str, int]:
    query = select(engine_state.c.name, engine_state.c.body).where(
        engine_state.c.name.startswith(f"{what}/")
    )
    return {
        name: msgspec.msgpack.decode(body, type=int) for name, body in connection.execute(query)
    }


__all__ = ["Acting", "Engine", "EngineConfig", "assemble"]
