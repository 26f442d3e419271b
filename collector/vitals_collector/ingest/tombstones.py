"""Knows at the ingest's door which runs were removed (``retention``): their rows stay outside."""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, and_, select

from trainvitals.wire import Batch
from vitals_collector.storage.schema import forgotten, runs, streams


def forgotten_runs(connection: Connection, of: Iterable[Batch]) -> dict[str, int]:
    """Return which of the batches' runs were removed, and when."""
    ids = sorted({batch.header.identity.run_id for batch in of})
    if not ids:
        return {}
    query = select(forgotten.c.run_id, forgotten.c.forgotten_unix_ns)
    removals = connection.execute(query.where(forgotten.c.run_id.in_(ids)))
    return {row.run_id: row.forgotten_unix_ns for row in removals}


def is_being_removed() -> ColumnElement[bool]:
    """Return the condition that a row of ``runs`` only waits for its batches to be gone."""
    begun = select(forgotten.c.run_id).where(
        forgotten.c.run_id == runs.c.run_id, forgotten.c.is_gone.is_(False)
    )
    later = select(streams.c.run_id).where(streams.c.run_id == runs.c.run_id)
    return and_(begun.exists(), ~later.exists())


def is_forgotten(batch: Batch, removed: Mapping[str, int]) -> bool:
    """Return whether the batch is of a start before its run was removed."""
    identity = batch.header.identity
    return identity.run_id in removed and identity.started_unix_ns <= removed[identity.run_id]


def without_forgotten(new: Sequence[Batch], removed: Mapping[str, int]) -> list[Batch]:
    """Return the batches that may be stored."""
    return [batch for batch in new if not is_forgotten(batch, removed)]


__all__ = ["forgotten_runs", "is_being_removed", "is_forgotten", "without_forgotten"]
