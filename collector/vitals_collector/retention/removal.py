"""Removes whole runs: runs that ended long ago, and runs that a user names.

First one transaction hides the run from all readers and records its removal; then its rows are
deleted. An agent that was offline may send such a run again weeks later: rows of starts before the
removal are acknowledged, counted and not stored, so that no part of a run reappears. A start after
it, such as a resumed job, is new.
"""

import logging
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, delete, func, select, update

from trainvitals.errors import UsageError
from trainvitals.records import RunInfo
from vitals_collector.cluster.reports import delete_reports
from vitals_collector.ingest.ingest import is_being_removed, lock_runs
from vitals_collector.live import overview
from vitals_collector.live.live_monitor import delete_watch_progress
from vitals_collector.live.run_status import GUEST, Liveness
from vitals_collector.storage.schema import forgotten, metadata, runs, sources, streams
from vitals_collector.storage.store import (
    RemovalReason,
    Store,
    unknown_run,
    upsert,
    write_audit,
)

KEEP_TAG = "keep"
"""A run with this tag is never deleted because of its age."""
_LOG = logging.getLogger("vitals.collector.retention")
_KEPT_TABLES = (runs, forgotten)


@dataclass(frozen=True, slots=True)
class DeletedRun:
    """A run that was removed."""

    run_id: str
    name: str
    num_bytes: int


def delete_run(
    store: Store, run_id: str, *, by: str, when: Liveness, reason: RemovalReason = "asked"
) -> DeletedRun:
    """Permanently delete a run that is not running, and return what was deleted.

    Raises:
        UsageError: there is no such run, or it is running.
        StorageError: the store refused; ``finish_removals`` completes a started removal.
    """
    with store.write() as connection:
        deleted = _load_started_removal(store, connection, run_id)
        if deleted is None:
            summaries = overview.load_run_summaries(connection, when, run_id)
            if not summaries:
                raise unknown_run(run_id)
            if summaries[0].state == "running":
                raise UsageError(
                    f"run {run_id} is still running; only ended runs can be removed",
                    hint="halt it first (`vitals command`), or wait until it is lost",
                )
            deleted = DeletedRun(run_id, summaries[0].name, store.numbers.num_bytes(run_id))
            _hide_run(connection, deleted, by, reason, when.now_unix_ns)
    counters = store.counters
    with counters.lock:
        counters.removed_runs[reason] = counters.removed_runs.get(reason, 0) + 1
    _LOG.warning(
        "run_removed run=%s reason=%s bytes=%d by=%s", run_id, reason, deleted.num_bytes, by
    )
    _delete_run_rows(store, run_id)
    return deleted


def finish_removals(store: Store) -> None:
    """Delete the remaining rows of removed runs: a collector may have died in between."""
    query = select(forgotten.c.run_id).where(forgotten.c.is_gone.is_(False))
    with store.read_transaction() as connection:
        begun = list(connection.execute(query).scalars())
    for run_id in begun:
        _delete_run_rows(store, run_id)


def delete_old(store: Store, keep_days: float, when: Liveness) -> list[DeletedRun]:
    """Delete runs that were silent for ``keep_days`` and are not pinned; 0 deletes none."""
    if not keep_days:
        return []
    before = when.now_unix_ns - int(keep_days * 86_400e9)
    seen = (sources.c.last_seen_unix_ns, sources.c.last_received_unix_ns)
    query = (
        select(runs.c.run_id, runs.c.info)
        .join(sources, sources.c.run_id == runs.c.run_id)
        .where(
            runs.c.pinned_unix_ns == 0,
            # A sidecar that continues to send after the end of the run does not keep it.
            ~sources.c.source.startswith(f"node:{GUEST}"),
        )
        .group_by(runs.c.run_id, runs.c.info)
        .having(*(func.max(column) < before for column in seen))
    )
    with store.read_transaction() as connection:
        old = connection.execute(query.order_by(runs.c.run_id)).all()
        states = {run.run_id: run.state for run in overview.load_run_summaries(connection, when)}
    return [
        delete_run(store, row.run_id, by="collector", when=when, reason="age")
        for row in old
        if states[row.run_id] != "running" and not _has_keep_tag(row.info)
    ]


def pin(store: Store, run_id: str, *, by: str, now_unix_ns: int, is_kept: bool = True) -> None:
    """Exempt a run from deletion by age, or no longer; raise UsageError for an unknown run."""
    values = {"pinned_unix_ns": now_unix_ns if is_kept else 0}
    with store.write() as connection:
        done = connection.execute(update(runs).where(runs.c.run_id == run_id).values(values))
        if not done.rowcount:
            raise unknown_run(run_id)
        action = "pin" if is_kept else "unpin"
        write_audit(connection, now_unix_ns, by, action, f"run/{run_id}", "")


def _has_keep_tag(info: bytes) -> bool:
    """Return whether a run has the tag that exempts it from deletion by age."""
    return bool(info) and KEEP_TAG in msgspec.msgpack.decode(info, type=RunInfo).tags


def _hide_run(
    connection: Connection, deleted: DeletedRun, by: str, reason: str, now_unix_ns: int
) -> None:
    """Hide a removed run from readers; its row in ``runs`` is deleted when its rows are."""
    run_id = deleted.run_id
    for table in reversed(metadata.sorted_tables):
        if "run_id" in table.c and table not in _KEPT_TABLES:
            connection.execute(delete(table).where(table.c.run_id == run_id))
    delete_watch_progress(connection, run_id)
    delete_reports(connection, [run_id])
    row = {"run_id": run_id, "forgotten_unix_ns": now_unix_ns, "is_gone": False}
    upsert(connection, forgotten, row)
    detail = f"{reason}: {deleted.name!r}, {deleted.num_bytes} bytes"
    write_audit(connection, now_unix_ns, by, "delete", f"run/{run_id}", detail)


def _load_started_removal(store: Store, connection: Connection, run_id: str) -> DeletedRun | None:
    """Return the run whose removal was started and not finished, such as on a full disk."""
    query = select(runs.c.name).where(runs.c.run_id == run_id, is_being_removed())
    name = connection.execute(query).scalar()
    return None if name is None else DeletedRun(run_id, name, store.numbers.num_bytes(run_id))


def _delete_run_rows(store: Store, run_id: str) -> None:
    """Delete the rows of a removed run, and its row in ``runs``."""
    with store.write_rows() as connection:  # no one stores rows of the run in the meantime
        lock_runs(connection, [run_id])
        of_run = select(streams.c.incarnation).where(streams.c.run_id == run_id).distinct()
        # If a later start arrived in the meantime, its rows and the run's row stay.
        later = list(connection.execute(of_run).scalars())
        store.numbers.delete(run_id, later)
        if not later:
            connection.execute(delete(runs).where(runs.c.run_id == run_id))
        is_of_run = forgotten.c.run_id == run_id
        connection.execute(update(forgotten).where(is_of_run).values(is_gone=True))
