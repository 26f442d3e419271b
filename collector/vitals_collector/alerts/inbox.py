"""The inbox of alerts: dedupe, life cycle, acknowledge and silence; all of its state is stored.

The same problem of the same run is one alert, delivered once, whose step and summary are updated. A
*point* alert reports a decision: it fires at once and resolves after healthy steps. A *condition*
alert reports the run's state: it may be pending until the state has lasted, and resolves when it
ends. A change that no notifier has settled is submitted again, also after a restart: alerts are
delivered at least once.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Row, select

from trainvitals.alerting import Alert, AlertState, AlertStatus, advance, point_is_over
from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.redaction import redact_text
from trainvitals.units import name_ranks
from trainvitals.views import (
    AckRequest,
    AlertView,
    EndSilenceRequest,
    RunState,
    SilenceRequest,
    SilenceView,
)
from vitals_collector.alerts.silences import (
    ActiveSilences,
    add_silence,
    end_silence,
    load_active_silences,
    load_open_silences,
    names_run,
    parse_matchers,
    unknown_silence,
)
from vitals_collector.storage.schema import alerts, engine_state
from vitals_collector.storage.store import (
    UNKNOWN,
    SteadyClock,
    Store,
    remove_nul,
    upsert,
    write_audit,
)

MAX_LISTED = 1_000
MAX_WORDS = 500
MAX_SILENCE_SECONDS = 30 * 86_400.0
"""Longest silence: each has an end, because a silence without one would be forgotten."""

Tell = Callable[[AlertView], None]


class _WithdrawCallback(Protocol):
    """Called when an alert was silenced or acknowledged: reposts may continue."""

    def __call__(self, fingerprint: str, *, keep_posting: bool = False) -> None: ...


NewestBy = Literal["updated_unix_ns", "started_unix_ns"]


class StoredAlertState(msgspec.Struct, frozen=True, kw_only=True):
    """Stored state of an alert in addition to its view."""

    point: bool
    active_since: float | None = None
    """Since when it is raised, by this collector's clock, in seconds; None once it is over."""
    settled: str = ""
    """The state that every notifier has had."""
    ranks: tuple[int, ...] = ()
    """Ranks that raised it during this firing, if each rank raises it separately."""


class InboxAlert(NamedTuple):
    """An alert's view, with the inbox's own state."""

    view: AlertView
    life: StoredAlertState


class InboxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When alerts fire and resolve."""

    healthy_steps: int = 100
    """Steps without trouble after which a point alert resolves."""
    lost_hold_seconds: float = 15.0
    """How long a run must be lost before that fires; every other condition fires at once."""


class CurrentRunState(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a run, as the inbox needs it."""

    run_id: str
    state: RunState
    last_step: int
    last_unhealthy_step: int
    last_seen_unix_ns: int
    """By the run's own clocks. A run that is read months later did not recover today."""
    conditions: tuple[Alert, ...]
    """The condition alerts that hold now."""
    since: Mapping[str, int] = {}
    """By fingerprint, when some of them started, by the run's own clocks. The others start now."""
    lasting: frozenset[str] = frozenset()
    """Fingerprints of alerts that do not resolve yet: their condition lasts, or is unknown."""


class AlertOccurrence(NamedTuple):
    """A point alert and its time, by the run's own clock."""

    run_id: str
    time_unix_ns: int
    alert: Alert


def list_alerts(
    store: Store,
    *,
    now_unix_ns: int,
    run_id: str = "",
    state: str = "",
    newest_by: NewestBy = "updated_unix_ns",
    reach: frozenset[str] | None = None,
) -> tuple[AlertView, ...]:
    """Return the inbox's alerts, the latest first, with active silences; of all runs, or some."""
    query = select(alerts).order_by(alerts.c[newest_by].desc(), alerts.c.fingerprint)
    if run_id:
        query = query.where(alerts.c.run_id == run_id)
    if state:
        query = query.where(alerts.c.state == state)
    with store.read_transaction() as connection:
        quiet = load_active_silences(connection, now_unix_ns)
        if reach is None:
            query = query.limit(MAX_LISTED)
        rows = [row for row in connection.execute(query) if reach is None or row.run_id in reach]
    return tuple(_apply_silence(alert_from_row(row).view, quiet) for row in rows[:MAX_LISTED])


def list_silences(
    store: Store, *, now_unix_ns: int, reach: frozenset[str] | None = None
) -> tuple[SilenceView, ...]:
    """Return the silences in force and to come, with how many alerts each silences now.

    Only silences that concern these runs alone, if there is a ``reach``.
    """
    with store.read_transaction() as connection:
        views = load_open_silences(connection, _open_views(connection), now_unix_ns)
        return tuple(view for view in views if _is_silence_in_reach(connection, view, reach))


def check_alert(store: Store, fingerprint: str, reach: frozenset[str] | None) -> None:
    """Raise UsageError for an unknown alert, or one that belongs to none of these runs."""
    with store.read_transaction() as connection:
        if reach is not None and not _is_alert_in_reach(connection, fingerprint, reach):
            raise unknown_alert(fingerprint)


def check_silence(store: Store, silence_id: int, reach: frozenset[str] | None) -> None:
    """Raise UsageError for an unknown silence, or one that concerns other runs as well."""
    views = list_silences(store, now_unix_ns=0, reach=reach) if reach is not None else ()
    if reach is not None and all(view.id != silence_id for view in views):
        raise unknown_silence(silence_id)


def _is_silence_in_reach(
    connection: Connection, view: SilenceView, reach: frozenset[str] | None
) -> bool:
    """Return whether a silence concerns only runs that a token reaches."""
    if reach is None:
        return True
    if view.fingerprint:
        return _is_alert_in_reach(connection, view.fingerprint, reach)
    return names_run(view.matchers, reach)


def _is_alert_in_reach(connection: Connection, fingerprint: str, reach: frozenset[str]) -> bool:
    """Return whether an alert in the inbox belongs to a run that a token reaches."""
    entry = _load_alert(connection, fingerprint)
    return entry is not None and entry.view.run_id in reach


class Inbox:
    """All alerts. Thread-safe: each change is one transaction, delivered after its commit."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        tell: Tell,
        hush: _WithdrawCallback,
        config: InboxConfig | None = None,
    ) -> None:
        self._store = store
        self._clock, self._steady = clock, SteadyClock(clock)
        self._tell, self._hush = tell, hush
        self._config = config or InboxConfig()
        self._lock = threading.Lock()
        self._fired: Counter[tuple[str, str]] = Counter()

    # --------------------------------------------------------------------------- from the engine

    def raise_alerts(
        self, occurrences: Sequence[AlertOccurrence], *, cursors: Mapping[str, int]
    ) -> frozenset[str]:
        """Raise point alerts and move the events' cursors, in one transaction.

        Returns the fingerprints of those that started to fire.
        """
        now = self._clock.time_ns()
        newly_firing: dict[str, AlertView] = {}
        with self._store.write() as connection:
            for occurrence in occurrences:
                entry = _load_alert(connection, occurrence.alert.fingerprint)
                raised = _raise_point_alert(entry, occurrence, now)
                _save_alert(connection, raised)
                fingerprint = raised.view.fingerprint
                if entry is None or entry.view.state != "firing" or fingerprint in newly_firing:
                    newly_firing[fingerprint] = raised.view
            for name, seq in cursors.items():
                body = msgspec.msgpack.encode(seq)
                row = {"name": name, "body": body, "updated_unix_ns": now}
                upsert(connection, engine_state, row)
        self._submit_alerts(newly_firing.values())
        return frozenset(newly_firing)

    def update(self, runs: Iterable[CurrentRunState]) -> None:
        """Update every alert from its run's current state."""
        now = self._clock.time_ns()
        with self._store.read_transaction() as connection:
            open_alerts = _load_open_alerts(connection)
        changed = [
            (before, after)
            for run in runs
            for before, after in self._alert_changes(run, open_alerts.get(run.run_id, {}), now)
        ]
        if not changed:
            return
        news: dict[str, AlertView] = {}
        with self._store.write() as connection:
            for before, after in changed:
                # Delivered or acknowledged in between: that part of the row is not ours.
                entry = _merge_stored_alert(_load_alert(connection, after.view.fingerprint), after)
                _save_alert(connection, entry)
                if _is_deliverable_change(before, after):
                    news[entry.view.fingerprint] = entry.view
        self._submit_alerts(news.values())

    def _alert_changes(
        self, run: CurrentRunState, open_entries: dict[str, InboxAlert], now: int
    ) -> list[tuple[InboxAlert | None, InboxAlert]]:
        """Return the alerts of a run that change, each before and after the change."""
        holding = {alert.fingerprint: alert for alert in run.conditions}
        changes: list[tuple[InboxAlert | None, InboxAlert]] = []
        for entry in open_entries.values():
            if entry.view.fingerprint in run.lasting:
                continue
            if entry.life.point and self._is_over(entry, run):
                changes.append(
                    (entry, _resolved_alert(entry, now, min(now, run.last_seen_unix_ns)))
                )
            elif not entry.life.point and entry.view.fingerprint not in holding:
                changes.append((entry, self._advance_condition_alert(entry, None, run, now)))
        for fingerprint, alert in holding.items():
            before = open_entries.get(fingerprint)
            after = self._advance_condition_alert(before, alert, run, now)
            if before is None or before.view.state != after.view.state:
                changes.append((before, after))
        return changes

    def _is_over(self, entry: InboxAlert, run: CurrentRunState) -> bool:
        """Return whether a point alert resolves: the run was healthy for long enough."""
        return run.state == "finished" or point_is_over(
            raised_step=entry.view.step,
            last_step=run.last_step,
            last_unhealthy_step=run.last_unhealthy_step,
            healthy_steps=self._config.healthy_steps,
        )

    def _advance_condition_alert(
        self, entry: InboxAlert | None, alert: Alert | None, run: CurrentRunState, now: int
    ) -> InboxAlert:
        """Return a condition alert's next state; ``alert`` is None if the condition ended."""
        status = AlertStatus()
        if entry is not None:
            status = AlertStatus(
                state=AlertState(entry.view.state), active_since=entry.life.active_since
            )
        is_lost = alert is not None and alert.name == "RunLost"
        moved = advance(
            status,
            breached=alert is not None,
            now=self._steady.time_ns() / 1e9,
            hold_seconds=self._config.lost_hold_seconds if is_lost else 0.0,
        )
        if alert is None:
            assert entry is not None, "only a known alert ends"
            return _resolved_alert(entry, now, now)
        state = cast(Literal["pending", "firing"], moved.state.value)
        life = StoredAlertState(point=False, active_since=moved.active_since)
        # A condition found in a directory months later also started months ago.
        started = min(now, run.since.get(alert.fingerprint) or now)
        return InboxAlert(_alert_view(alert, run.run_id, state, started, now), life)

    # ------------------------------------------------------------------------- about no run

    def report(self, view: AlertView) -> None:
        """Store and deliver an alert about Vitals itself, which concerns no run."""
        with self._store.write() as connection:
            present = _load_alert(connection, view.fingerprint)
            life = StoredAlertState(point=False, active_since=view.updated_unix_ns / 1e9)
            entry = _merge_stored_alert(present, InboxAlert(view, life))
            _save_alert(connection, entry)
        self._submit_alerts([entry.view])

    def reported(self) -> tuple[AlertView, ...]:
        """Return the alerts about Vitals itself that fire."""
        query = select(alerts).where(alerts.c.run_id.is_(None), alerts.c.state == "firing")
        with self._store.read_transaction() as connection:
            return tuple(alert_from_row(row).view for row in connection.execute(query))

    # ------------------------------------------------------------------------------ for people

    def acknowledge(self, fingerprint: str, request: AckRequest, *, caller: str = "") -> AlertView:
        """Acknowledge an alert, or silence it for a while; both are written into the audit log.

        ``caller`` is the owner of the token, because the name in the request is free text.

        Raises:
            UsageError: no such alert, no valid name, or a silence without reason or end.
        """
        request = self._check_request(request)
        now = self._clock.time_ns()
        with self._store.write() as connection:
            entry = _load_alert(connection, fingerprint)
            if entry is None:
                raise unknown_alert(fingerprint)
            if request.silence_seconds:
                add_silence(connection, request, starts=now, fingerprint=fingerprint)
            else:
                entry = InboxAlert(replace(entry.view, acknowledged_by=request.by), entry.life)
                _save_alert(connection, entry)
            action = "silence" if request.silence_seconds else "acknowledge"
            _write_audit(connection, action, f"alert/{fingerprint}", request, now, caller)
            quiet = load_active_silences(connection, now)
        if quiet.silence_of(entry.view) is not None:
            self._hush(fingerprint)
        elif entry.view.acknowledged_by and entry.view.state == "firing":
            self._hush(fingerprint, keep_posting=True)
        return _apply_silence(entry.view, quiet)

    def silence(self, request: SilenceRequest, *, caller: str = "") -> SilenceView:
        """Silence all alerts that match the matchers, from now or a later time.

        Raises:
            UsageError: no matcher or an invalid one, no valid name, no reason, or no end.
        """
        matchers = parse_matchers(request.matchers)
        as_ack = self._check_request(
            AckRequest(by=request.by, reason=request.reason, silence_seconds=request.seconds)
        )
        now = self._clock.time_ns()
        starts = max(now, request.starts_unix_ns)
        if not request.seconds or starts - now > MAX_SILENCE_SECONDS * 1e9:
            raise UsageError(
                f"the silence is {request.seconds:g} s long and starts in {(starts - now) / 1e9:g} "
                f"s; it needs a length, and must start within {MAX_SILENCE_SECONDS:g} s"
            )
        matchers_json = msgspec.json.encode(request.matchers).decode()
        with self._store.write() as connection:
            silence_id = add_silence(connection, as_ack, starts=starts, matchers=matchers_json)
            _write_audit(connection, "silence", f"alert/{matchers_json}", as_ack, now, caller)
            fitting = [
                view.fingerprint
                for view in _open_views(connection)
                if starts <= now and all(m.fits(view) for m in matchers)
            ]
        for fingerprint in fitting:
            self._hush(fingerprint)
        return SilenceView(
            id=silence_id,
            matchers=request.matchers,
            by=request.by,
            reason=as_ack.reason,
            starts_unix_ns=starts,
            ends_unix_ns=starts + int(request.seconds * 1e9),
            num_firing=len(fitting),
        )

    def end_silence(
        self, silence_id: int, request: EndSilenceRequest, *, caller: str = ""
    ) -> SilenceView:
        """End a silence now; firing alerts that it hid are delivered within a minute.

        Raises:
            UsageError: there is no such active silence, or no valid name.
        """
        as_ack = self._check_request(AckRequest(by=request.by, reason=request.reason))
        now = self._clock.time_ns()
        with self._store.write() as connection:
            view = end_silence(connection, silence_id, now)
            subject = f"silence/{silence_id}"
            _write_audit(connection, "end silence", subject, as_ack, now, caller)
        return view

    def _check_request(self, request: AckRequest) -> AckRequest:
        """Return the request to store: its reason without secrets."""
        for name, text, least in (("by", request.by, 1), ("reason", request.reason, 0)):
            if not least <= len(text.strip()) <= MAX_WORDS or not text.isprintable():
                raise UsageError(
                    f"{name} has {len(text)} characters; give {least} to {MAX_WORDS} printable ones"
                )
        longest = MAX_SILENCE_SECONDS
        if not 0 <= request.silence_seconds <= longest:
            raise UsageError(
                f"silence_seconds is {request.silence_seconds}; it must be 0 to {longest:g}"
            )
        if request.silence_seconds and not request.reason.strip():
            raise UsageError(
                "a silence needs a reason: others must be able to see why no alert was sent"
            )
        return msgspec.structs.replace(request, reason=redact_text(request.reason))

    # ---------------------------------------------------------------------------- for notifiers

    def undelivered(self) -> tuple[list[InboxAlert], list[AlertView]]:
        """Return undelivered alerts, and delivered ones that fire; neither silenced."""
        with self._store.read_transaction() as connection:
            quiet = load_active_silences(connection, self._clock.time_ns())
            query = select(alerts).where(
                (alerts.c.state == "firing")
                | (alerts.c.notified_unix_ns < alerts.c.updated_unix_ns)
            )
            entries = [alert_from_row(row) for row in connection.execute(query)]
        loud = [
            e for e in entries if quiet.silence_of(e.view) is None and e.view.state != "pending"
        ]
        new = [
            e
            for e in loud
            if e.life.settled != e.view.state
            and not (e.view.state == "firing" and e.view.acknowledged_by)
        ]
        return new, [e.view for e in loud if e.view.state == "firing" and e not in new]

    def fired(self) -> dict[tuple[str, str], int]:
        """Return how often alerts started to fire in this process, by (name, severity)."""
        with self._lock:
            return dict(self._fired)

    def _submit_alerts(self, views: Iterable[AlertView]) -> None:
        """Count alerts that fire, and deliver those that are neither pending nor silenced."""
        views = list(views)
        if not views:
            return
        with self._lock:
            self._fired.update((v.name, v.severity) for v in views if v.state == "firing")
        with self._store.read_transaction() as connection:
            quiet = load_active_silences(connection, self._clock.time_ns())
        for view in views:
            if view.state != "pending" and quiet.silence_of(view) is None:
                self._tell(view)


def settle_alert(store: Store, view: AlertView) -> None:
    """Note that every notifier has had this state, unless the alert has moved on since."""
    with store.write() as connection:
        entry = _load_alert(connection, view.fingerprint)
        if entry is not None and entry.view.state == view.state:
            _save_alert(connection, InboxAlert(entry.view, replace(entry.life, settled=view.state)))


# ----------------------------------------------------------------------------------- life cycle


def _alert_view(
    alert: Alert, run_id: str, state: Literal["pending", "firing"], started: int, now: int
) -> AlertView:
    """Return an alert for the inbox as clients see it, with its texts cleaned."""
    return AlertView(
        fingerprint=alert.fingerprint,
        name=alert.name,
        run_id=run_id,
        severity=alert.severity,
        state=state,
        summary=_one_line(alert.summary),
        labels={key: remove_nul(value) for key, value in alert.labels.items()},
        step=alert.step,
        started_unix_ns=started,
        updated_unix_ns=now,
    )


def _one_line(text: str) -> str:
    """Return an alert's summary as one line of printable characters.

    A new line could forge one of the collector's log, and others could steer a terminal.
    """
    printable = "".join(c if c.isprintable() else " " for c in remove_nul(text)[: 2 * MAX_WORDS])
    return " ".join(printable.split())[:MAX_WORDS]


def _raise_point_alert(
    entry: InboxAlert | None, occurrence: AlertOccurrence, now: int
) -> InboxAlert:
    """Return the point alert after one more occurrence: a new firing, or the same one moved on."""
    alert = occurrence.alert
    is_new = entry is None or entry.view.state != "firing"
    ranks: tuple[int, ...] = ()
    if alert.rank >= 0:
        earlier = () if is_new or entry is None else entry.life.ranks
        ranks = tuple(sorted({*earlier, alert.rank}))
        alert = replace(alert, summary=f"{alert.summary} (on {name_ranks(ranks)})")
    view = _alert_view(alert, occurrence.run_id, "firing", occurrence.time_unix_ns, now)
    if entry is None or is_new:
        return _start_firing(
            entry,
            InboxAlert(view, StoredAlertState(point=True, active_since=now / 1e9, ranks=ranks)),
        )
    updated_view = replace(
        view,
        started_unix_ns=entry.view.started_unix_ns,
        acknowledged_by=entry.view.acknowledged_by,
    )
    return InboxAlert(updated_view, replace(entry.life, ranks=ranks))


def _resolved_alert(entry: InboxAlert, now: int, ended: int) -> InboxAlert:
    """Return a stored alert as it is after its condition ended."""
    # An alert that was only pending was never delivered; its end is not either.
    settled = "resolved" if entry.view.state == "pending" else entry.life.settled
    ended = max(ended, entry.view.started_unix_ns)
    view = replace(entry.view, state="resolved", updated_unix_ns=now, ended_unix_ns=ended)
    return InboxAlert(view, replace(entry.life, active_since=None, settled=settled))


def _merge_stored_alert(present: InboxAlert | None, after: InboxAlert) -> InboxAlert:
    """Return ``after`` with the acknowledgement, and the start of a lasting condition."""
    if present is None or present.view.state == "resolved":
        return after if after.view.state == "resolved" else _start_firing(present, after)
    view = replace(
        after.view,
        started_unix_ns=present.view.started_unix_ns,
        acknowledged_by=present.view.acknowledged_by,
    )
    return InboxAlert(view, after.life)


def _start_firing(last: InboxAlert | None, entry: InboxAlert) -> InboxAlert:
    """Return the new firing, begun after the last one of this alert was over.

    The start identifies deliveries: with an equal one, receivers would drop it as a duplicate. A
    run that is lost twice may have the same last row both times.
    """
    if last is None:
        return entry
    earliest = max(last.view.started_unix_ns + 1, last.view.ended_unix_ns or 0)
    started = max(earliest, entry.view.started_unix_ns)
    return InboxAlert(replace(entry.view, started_unix_ns=started), entry.life)


def _is_deliverable_change(before: InboxAlert | None, after: InboxAlert) -> bool:
    """Return whether receivers have to know of an alert's change."""
    return after.view.state == "firing" or (before is not None and before.view.state == "firing")


# ------------------------------------------------------------------------------- the rows of alerts

_LIFE = msgspec.msgpack.Decoder(StoredAlertState)


def alert_from_row(row: Row[Any]) -> InboxAlert:
    """Return the inbox's alert of a row of ``alerts``."""
    view = AlertView(
        fingerprint=row.fingerprint,
        name=row.name,
        run_id=row.run_id or "",
        severity=row.severity,
        state=row.state,
        summary=row.summary,
        labels=msgspec.json.decode(row.labels, type=dict[str, str]) if row.labels else {},
        step=row.step,
        started_unix_ns=row.started_unix_ns,
        updated_unix_ns=row.updated_unix_ns,
        ended_unix_ns=row.ended_unix_ns,
        acknowledged_by=row.acknowledged_by,
    )
    return InboxAlert(view, _LIFE.decode(row.body))


def _load_alert(connection: Connection, fingerprint: str) -> InboxAlert | None:
    """Return one alert of the inbox, or None."""
    query = select(alerts).where(alerts.c.fingerprint == fingerprint)
    if connection.get_execution_options().get("vitals_write"):  # it is written back whole
        query = query.with_for_update()
    row = connection.execute(query).first()
    return None if row is None else alert_from_row(row)


def _load_open_alerts(connection: Connection) -> dict[str, dict[str, InboxAlert]]:
    """Return the inbox's pending and firing alerts, by run and fingerprint."""
    open_entries: dict[str, dict[str, InboxAlert]] = defaultdict(dict)
    query = select(alerts).where(alerts.c.state.in_(("pending", "firing")))
    for row in connection.execute(query):
        open_entries[row.run_id or ""][row.fingerprint] = alert_from_row(row)
    return open_entries


def _open_views(connection: Connection) -> list[AlertView]:
    """Return the inbox's pending and firing alerts of all runs."""
    open_entries = _load_open_alerts(connection)
    return [e.view for entries in open_entries.values() for e in entries.values()]


def _save_alert(connection: Connection, entry: InboxAlert) -> None:
    view = entry.view
    row = {
        "fingerprint": view.fingerprint,
        "run_id": view.run_id or None,
        "name": view.name,
        "severity": view.severity,
        "state": view.state,
        "summary": view.summary,
        "labels": msgspec.json.encode(view.labels).decode(),
        "step": view.step,
        "started_unix_ns": view.started_unix_ns,
        "updated_unix_ns": view.updated_unix_ns,
        "ended_unix_ns": view.ended_unix_ns,
        "acknowledged_by": view.acknowledged_by,
        "notified_unix_ns": view.updated_unix_ns if entry.life.settled == view.state else 0,
        "body": msgspec.msgpack.encode(entry.life),
    }
    upsert(connection, alerts, row)


def _apply_silence(view: AlertView, quiet: ActiveSilences) -> AlertView:
    """Return an alert's view with the silence that is in force on it."""
    silence = quiet.silence_of(view)
    if silence is None:
        return view
    return replace(view, silenced_until_unix_ns=silence.ends_unix_ns, silence_reason=silence.reason)


def unknown_alert(fingerprint: str) -> UsageError:
    """Return the error for a fingerprint that no alert in the inbox has."""
    return UsageError(
        f"there is no alert {fingerprint[:64]!r}",
        hint="`vitals alerts list` shows the fingerprints",
        code=UNKNOWN,
    )


def _write_audit(
    connection: Connection, action: str, subject: str, request: AckRequest, now: int, caller: str
) -> None:
    """Append a user's response to an alert to the audit log."""
    length = f"{request.silence_seconds:g} s: " if request.silence_seconds else ""
    actor = f"{request.by} ({caller})" if caller else request.by
    write_audit(connection, now, actor, action, subject, f"{length}{request.reason}")
