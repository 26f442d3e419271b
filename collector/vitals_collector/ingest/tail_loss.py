"""Counts the rows that a spool once held and that nobody can read from it any more.

A hole in a stream is counted when the stream goes on (``ingest.cut_off_known``). Rows lost at the
end of a stream have nothing behind them: there only the spool's state knows, which names the last
number of each stream that was durable. What it promises is kept beside the stream's offset once the
spool was read as far as the state goes. It refuses no row: rows that come after all, from the
agent or a page that was late, take their part of the loss back.
"""

import logging
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, case, select

from trainvitals.errors import UsageError
from trainvitals.identity import check_incarnation
from trainvitals.io.spool_files import (
    STATE_FILE,
    Position,
    State,
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
"""Tells one state of a spool from the next: it is replaced, never written over."""


def num_lost_rows() -> ColumnElement[int]:
    """Return how many rows of a stream are lost: in holes of it, and of its end."""
    last, promised = streams.c.last_seq, streams.c.expected_seq
    return streams.c.num_lost + case((promised > last, promised - last), else_=0)


class TailLoss:
    """Knows which states of spools were compared with the store already."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[Path, Version] = {}  # a few words for each spool there is

    def read(self, spool: Path) -> tuple[Version, State | None] | None:
        """Return the spool's state, None in it where it is damaged; None: there is nothing new.

        To be asked before the spool is read: what the state names lies in the files by then.
        """
        path = spool / STATE_FILE
        try:
            file_stat = path.stat()
            version = (file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino)
            return None if self._kept.get(spool) == version else (version, read_state(path))
        except FileNotFoundError:
            return None

    def count(
        self, spool: Path, version: Version, state: State, position: Position, now: float
    ) -> None:
        """Take note of what the state promised, where the spool was read to ``position``.

        Nothing is done where what lies between the two may yet arrive.

        Raises:
            StorageError: the store refused; it is tried again.
        """
        if position < state.scanned and not _is_all_there(spool, now):
            return
        promised = {} if _was_removed(spool, state) else _checked(state, spool.parents[2].name)
        with self._store.read() as connection:
            lost = _lost(connection, promised)
        if lost is None:
            return  # perhaps another node's spool knows the run
        if lost:
            self._note(spool, promised)
        self._kept[spool] = version

    def _note(self, spool: Path, promised: dict[StreamKey, int]) -> None:
        with self._store.write() as connection:
            lost = _lost(connection, promised) or {}
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


def _is_all_there(spool: Path, now: float) -> bool:
    newest = max((number for number, _ in spool_files(spool)), default=-1)
    return is_unchanged(spool / STATE_FILE, now) and is_settled(spool, newest, now)


def _was_removed(spool: Path, state: State) -> bool:
    """Return whether the spool's owner has removed files: what they held was sent, or counted."""
    first = min((number for number, _ in spool_files(spool)), default=state.acked.file)
    return 0 < first <= state.acked.file


def _checked(state: State, run_id: str) -> dict[StreamKey, int]:
    """Return what is promised of the run whose folder it is, without what no stream is called."""
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


def _lost(connection: Connection, promised: dict[StreamKey, int]) -> dict[StreamKey, int] | None:
    """Return of which streams rows are missing that nobody told of; None: the run is not known."""
    run_ids = {run_id for run_id, _, _ in promised}
    if not run_ids:
        return {}
    own = streams.c
    fields = (own.run_id, own.incarnation, own.stream, own.last_seq, own.expected_seq)
    stream_rows = connection.execute(select(*fields).where(own.run_id.in_(run_ids)))
    highest_seqs = {(run, start, stream): max(seqs) for run, start, stream, *seqs in stream_rows}
    if not highest_seqs:
        removed = select(forgotten.c.run_id).where(forgotten.c.run_id.in_(run_ids))
        return None if connection.execute(removed).first() is None else {}
    lost = {key: seq - highest_seqs.get(key, -1) for key, seq in promised.items()}
    return {key: num for key, num in lost.items() if num > 0}


__all__ = ["TailLoss", "num_lost_rows"]
