"""Annotations: notes of users at steps of a run, and announcements of the training."""

import msgspec
from sqlalchemy import Connection, select

from trainvitals.records import ChangeExpected
from trainvitals.units import humanize_count
from trainvitals.views import AnnotationView
from vitals_collector.storage.schema import annotations, events

MAX_ANNOUNCED = 10_000
_expected = msgspec.msgpack.Decoder(ChangeExpected).decode


def annotations_of(connection: Connection, run_id: str) -> tuple[AnnotationView, ...]:
    """Return annotations by step, then time, with only the latest of many announced changes."""
    table = annotations.c
    fields = (table.step, table.time_unix_ns, table.text, table.written_by)
    written = connection.execute(select(*fields).where(table.run_id == run_id))
    views = [AnnotationView(step=s, time_unix_ns=t, text=x, by=b) for s, t, x, b in written]
    columns = events.c
    of_run = (columns.run_id == run_id, columns.kind == ChangeExpected.__name__)
    query = select(columns.step, columns.time_unix_ns, columns.body).where(*of_run)
    newest = query.order_by(columns.time_unix_ns.desc(), columns.id.desc()).limit(MAX_ANNOUNCED)
    for step, time, body in connection.execute(newest):
        if not body:
            continue  # skip damaged rows
        change = _expected(body)
        text = f"{change.reason} (a change expected for {humanize_count(change.steps, 'step')})"
        views.append(AnnotationView(step=step, time_unix_ns=time, text=text, by=""))
    return tuple(sorted(views, key=lambda view: (view.step, view.time_unix_ns, view.by, view.text)))
