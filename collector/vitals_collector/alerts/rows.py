"""The rows an alert is kept in: the alert itself, its silences, and what people ordered."""

from collections import defaultdict
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Row, select

from trainvitals.views import AckRequest, AlertView
from vitals_collector.storage.schema import alerts, audit, engine_state, silences
from vitals_collector.storage.store import insert


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What an alert's row keeps beside its view."""

    point: bool
    active_since: float | None = None
    settled: str = ""
    """The state that every notifier has had."""


class Entry(NamedTuple):
    """An alert as people see it, with what only the inbox needs."""

    view: AlertView
    life: Life


_LIFE = msgspec.msgpack.Decoder(Life)


def entry_of(row: Row[Any]) -> Entry:
    """Return the alert of a row of ``alerts``."""
    view = AlertView(
        fingerprint=row.fingerprint,
        name=row.name,
        run_id=row.run_id,
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
    return Entry(view, _LIFE.decode(row.body))


def load(connection: Connection, fingerprint: str) -> Entry | None:
    """Return one alert, or None."""
    row = connection.execute(select(alerts).where(alerts.c.fingerprint == fingerprint)).first()
    return None if row is None else entry_of(row)


def load_open(connection: Connection) -> dict[str, dict[str, Entry]]:
    """Return what is pending or firing, by run and fingerprint."""
    open_entries: dict[str, dict[str, Entry]] = defaultdict(dict)
    query = select(alerts).where(alerts.c.state.in_(("pending", "firing")))
    for row in connection.execute(query):
        open_entries[row.run_id][row.fingerprint] = entry_of(row)
    return open_entries


def save(connection: Connection, entry: Entry) -> None:
    """Write the alert over what its row says now."""
    view = entry.view
    key = {"fingerprint": view.fingerprint}
    values = {
        "run_id": view.run_id,
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
    statement = insert(connection, alerts).values(key | values)
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=values))


def remember(connection: Connection, name: str, seq: int, *, now_unix_ns: int) -> None:
    """Keep how far a writer's decisions were consumed."""
    values = {"body": msgspec.msgpack.encode(seq), "updated_unix_ns": now_unix_ns}
    statement = insert(connection, engine_state).values(name=name, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


def silences_now(connection: Connection, now: int) -> dict[str, Row[Any]]:
    """Return the silence in force of each fingerprint, the one that ends last."""
    query = select(silences).where(silences.c.ends_unix_ns > now).order_by(silences.c.ends_unix_ns)
    return {row.fingerprint: row for row in connection.execute(query)}


def silenced(view: AlertView, quiet: dict[str, Row[Any]]) -> AlertView:
    """Return the view with the silence that is in force on it."""
    silence = quiet.get(view.fingerprint)
    if silence is None:
        return view
    return replace(view, silenced_until_unix_ns=silence.ends_unix_ns, silence_reason=silence.reason)


def add_silence(connection: Connection, fingerprint: str, request: AckRequest, now: int) -> None:
    """Store a silence from now on; earlier ones stay as they are."""
    values = {
        "fingerprint": fingerprint,
        "created_by": request.by,
        "reason": request.reason,
        "starts_unix_ns": now,
        "ends_unix_ns": now + int(request.silence_seconds * 1e9),
    }
    connection.execute(silences.insert().values(values))


def write_audit(connection: Connection, fingerprint: str, request: AckRequest, now: int) -> None:
    """Append who ordered what to the audit."""
    detail = f"{request.silence_seconds:g} s: {request.reason}" if request.silence_seconds else ""
    values = {
        "time_unix_ns": now,
        "actor": request.by,
        "action": "silence" if request.silence_seconds else "acknowledge",
        "subject": f"alert/{fingerprint}",
        "detail": detail or request.reason,
    }
    connection.execute(audit.insert().values(values))
