"""Counts rows that a spool once held and that can no longer be read from it.

A gap in a stream is counted when the stream continues (``ingest.cut_off_known``). Rows lost at the
end of a stream have no later rows: only the spool's state shows them, because it contains the last
durable number of each stream. These numbers are stored with the stream's offset once the spool was
read up to the position of the state. No row is refused because of them: rows that arrive later,
from the agent or a late page, reduce the loss again.
"""

import logging
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, case, select

from trainvitals.errors import UsageError
from trainvitals.identity import check_incarnation
from trainvitals.io.spool_files import (
    STATE_FILE,
    SpoolPosition,
    SpoolState,
    is_settled,
    is_unchanged,
    read_state,
    spool_files,
)
from vitals_collector.numbers.interface import StreamKey
from vitals_collector.storage.schema import forgotten, streams
from vitals_collector.storage.store import Store, insert

_LOG = logging.getLogger("vitals.collector.folder")
_MAX_SEQ = 2**62
_STREAM_CHARACTERS = 16

Version = tuple[int, int, int]
"""Distinguishes states of a spool: a state is replaced, never overwritten."""


def num_lost_rows() -> ColumnElement[int]:
    """Return how many rows of a stored stream are lost: in its gaps, and at its end."""
    last, promised = streams.c.last_seq, streams.c.expected_seq
    return streams.c.num_lost + case((promised > last, promised - last), else_=0)


class LostRowCounter:
    """Counts rows that a rank wrote but that never arrived, from the state it left in its spool.

    Remembers which states were already compared with the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._compared: dict[Path, Version] = {}  # a few numbers per existing spool

    def read_new_state(self, spool: Path) -> tuple[Version, SpoolState | None] | None:
        """Read a spool's state, unless it was already compared with the store.

        Call this before the spool is read, so that the spool's files contain every row that the
        state counts.

        Returns:
            The version of the state, and the state, which is None if it is damaged; or None if
            there is no state, or no new one.
        """
        path = spool / STATE_FILE
        try:
            file_stat = path.stat()
            version = (file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino)
            return None if self._compared.get(spool) == version else (version, read_state(path))
        except FileNotFoundError:
            return None

    def count(
        self, spool: Path, version: Version, state: SpoolState, position: SpoolPosition, now: float
    ) -> None:
        """Count the rows that a spool's state promises and that never arrived.

        Has no effect if rows between the two may still arrive.

        Raises:
            StorageError: the store refused; it is retried.
        """
        if position < state.scanned and not _is_spool_complete(spool, now):
            return
        promised = (
            {} if _has_removed_files(spool, state) else _promised_seqs(state, spool.parents[2].name)
        )
        with self._store.read_transaction() as connection:
            lost = _count_lost_rows(connection, promised)
        if lost is None:
            return  # maybe another node's spool has introduced the run
        if lost:
            self._record_lost_rows(spool, promised)
        self._compared[spool] = version

    def _record_lost_rows(self, spool: Path, promised: dict[StreamKey, int]) -> None:
        """Store up to which row a spool's streams were written; count those not stored."""
        with self._store.write() as connection:
            lost = _count_lost_rows(connection, promised) or {}
            rows = [
                {"run_id": run, "incarnation": start, "stream": stream, "expected_seq": seq}
                for (run, start, stream), seq in promised.items()
                if (run, start, stream) in lost
            ]
            statement = insert(connection, streams)
            new = {"expected_seq": statement.excluded.expected_seq}
            keys = ["run_id", "incarnation", "stream"]
            if rows:
                upsert = statement.on_conflict_do_update(index_elements=keys, set_=new)
                connection.execute(upsert, rows)
        num_rows = sum(lost.values())
        with self._store.counters.lock:
            self._store.counters.num_lost += num_rows
        text = "%s: %d rows at the end of streams (%d) were written and can no longer be read"
        _LOG.warning(text, spool, num_rows, len(lost))


def _is_spool_complete(spool: Path, now: float) -> bool:
    """Return whether a spool to store and its state have not changed for a while."""
    newest = max((number for number, _ in spool_files(spool)), default=-1)
    return is_unchanged(spool / STATE_FILE, now) and is_settled(spool, newest, now)


def _has_removed_files(spool: Path, state: SpoolState) -> bool:
    """Return whether the spool's agent removed files: their rows were sent, or counted."""
    first = min((number for number, _ in spool_files(spool)), default=state.acked.file)
    return 0 < first <= state.acked.file


def _promised_seqs(state: SpoolState, run_id: str) -> dict[StreamKey, int]:
    """Return the last row numbers that a spool's state promises, by stream."""
    return {
        (run, incarnation, stream): seq
        for run, incarnation, stream, seq in state.last_seqs
        if run == run_id
        and _is_incarnation(incarnation)
        and len(stream) <= _STREAM_CHARACTERS
        and "\0" not in stream
        and 0 <= seq <= _MAX_SEQ
    }


def _is_incarnation(text: str) -> bool:
    try:
        check_incarnation(text)
    except UsageError:
        return False
    return True


def _count_lost_rows(
    connection: Connection, promised: dict[StreamKey, int]
) -> dict[StreamKey, int] | None:
    """Return by stream the missing rows that were not stored or reported; None: unknown run."""
    run_ids = {run_id for run_id, _, _ in promised}
    if not run_ids:
        return {}
    columns = streams.c
    key = (columns.run_id, columns.incarnation, columns.stream)
    query = select(*key, columns.last_seq, columns.expected_seq)
    stream_rows = connection.execute(query.where(columns.run_id.in_(run_ids)))
    highest_seqs = {(run, start, stream): max(seqs) for run, start, stream, *seqs in stream_rows}
    if not highest_seqs:
        removed = select(forgotten.c.run_id).where(forgotten.c.run_id.in_(run_ids))
        return None if connection.execute(removed).first() is None else {}
    lost = {key: seq - highest_seqs.get(key, -1) for key, seq in promised.items()}
    return {key: num for key, num in lost.items() if num > 0}
