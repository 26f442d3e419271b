"""Knows how far each writer's stream is stored: what makes at-least-once exactly once.

Everything here happens inside the transaction that stores the rows. Two collectors on one database
take turns at a run, by a lock that ends with the transaction; SQLite has one writer at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, bindparam, func, select

from trainvitals.errors import FormatError
from trainvitals.identity import Identity
from trainvitals.wire import Batch
from vitals_collector.storage.schema import runs, sources, streams
from vitals_collector.storage.store import clean, insert

StreamKey = tuple[str, str, str]
"""Run, incarnation and stream."""

_MAX_INT64 = 2**63 - 1
_LOCK_SEED = 7_460_211
"""Keeps our advisory locks apart from those of others in the same database."""


@dataclass(slots=True)
class StreamOffset:
    """How far one stream is stored, and what is known of its columns."""

    key: StreamKey
    source: str
    last_seq: int = -1
    schema_digest: str = ""
    measured: int = 0
    num_rows: int = 0
    """New in this transaction; so is the next."""
    num_lost: int = 0
    expected_seq: int = -1
    """Up to there, what is missing was counted already."""


def key_of(batch: Batch) -> StreamKey:
    """Return which stream a batch belongs to."""
    identity = batch.header.identity
    return identity.run_id, identity.incarnation, batch.header.stream


def read_marks(connection: Connection, batches: Sequence[Batch]) -> dict[StreamKey, StreamOffset]:
    """Return the marks of all streams in the batches; a stream that is not known has none."""
    incarnations: dict[str, set[str]] = {}
    for batch in batches:
        identity = batch.header.identity
        incarnations.setdefault(identity.run_id, set()).add(identity.incarnation)
    marks: dict[StreamKey, StreamOffset] = {}
    for run_id, run_incarnations in incarnations.items():
        mark_rows = connection.execute(
            _MARKS, {"of_run": run_id, "of_writers": sorted(run_incarnations)}
        )
        for incarnation, stream, last_seq, promised, digest, measured, source in mark_rows:
            bits = int(measured, 16) if measured else 0
            key = run_id, incarnation, stream
            marks[key] = StreamOffset(key, source, last_seq, digest, bits, expected_seq=promised)
    return marks


def lock_runs(connection: Connection, batches: Iterable[Batch]) -> None:
    """Wait until no other collector writes to these runs; hold them until the transaction ends.

    In order, so that two that want the same runs do not wait for each other.
    """
    if connection.dialect.name == "sqlite":
        return
    for run_id in sorted({batch.header.identity.run_id for batch in batches}):
        connection.execute(_LOCK, {"of_run": run_id})


def register_streams(
    connection: Connection, marks: dict[StreamKey, StreamOffset], new: Sequence[Batch]
) -> None:
    """Make the rows that new streams hang on, and add the streams' marks.

    A batch whose identity no database takes is left out: it gets no mark.
    """
    new = [batch for batch in new if _fits(batch.header.identity)]
    if not new:
        return
    started: dict[str, int] = {}
    writers: dict[tuple[str, str], Identity] = {}
    for identity in (batch.header.identity for batch in new):
        earliest = started.get(identity.run_id, identity.started_unix_ns)
        started[identity.run_id] = min(earliest, identity.started_unix_ns)
        writers.setdefault((identity.run_id, identity.incarnation), identity)
    keys = sorted({key_of(batch) for batch in new})
    connection.execute(
        insert(connection, runs).on_conflict_do_nothing(),
        [{"run_id": run_id, "started_unix_ns": ns} for run_id, ns in started.items()],
    )
    connection.execute(
        insert(connection, sources).on_conflict_do_nothing(),
        [_source_row(identity) for identity in writers.values()],
    )
    connection.execute(
        insert(connection, streams).on_conflict_do_nothing(),
        [{"run_id": run, "incarnation": inc, "stream": stream} for run, inc, stream in keys],
    )
    marks.update(read_marks(connection, new))


def check_mark(batch: Batch, mark: StreamOffset | None) -> StreamOffset:
    """Return the mark if the batch may move it.

    Raises:
        FormatError: the incarnation is known as another source, or could not be introduced.
    """
    identity = batch.header.identity
    if mark is None:
        raise FormatError("a number in the batch's header does not fit 64 bits")
    if mark.source != identity.source:
        raise FormatError(
            f"incarnation {identity.incarnation} is known as {mark.source}, not {identity.source}",
            hint="each start of each source makes an incarnation of its own",
        )
    return mark


def _fits(identity: Identity) -> bool:
    numbers = (
        identity.pid,
        identity.rank,
        identity.local_rank,
        identity.world_size,
        identity.started_unix_ns,
    )
    return all(-_MAX_INT64 <= number <= _MAX_INT64 for number in numbers)


def _source_row(identity: Identity) -> dict[str, str | int]:
    return {
        "run_id": identity.run_id,
        "incarnation": identity.incarnation,
        "source": identity.source,
        "node": identity.node,
        "pid": identity.pid,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "gpu_uuid": clean(identity.gpu_uuid),
        "started_unix_ns": identity.started_unix_ns,
    }


_MARKS = (
    select(
        streams.c.incarnation,
        streams.c.stream,
        streams.c.last_seq,
        streams.c.expected_seq,
        streams.c.schema_digest,
        streams.c.measured,
        sources.c.source,
    )
    .join(
        sources,
        (sources.c.run_id == streams.c.run_id) & (sources.c.incarnation == streams.c.incarnation),
    )
    .where(
        streams.c.run_id == bindparam("of_run"),
        streams.c.incarnation.in_(bindparam("of_writers", expanding=True)),
    )
)
_LOCK = select(
    func.pg_advisory_xact_lock(
        func.hashtextextended(bindparam("of_run"), bindparam("seed", _LOCK_SEED, BigInteger))
    )
)

__all__ = [
    "StreamKey",
    "StreamOffset",
    "check_mark",
    "key_of",
    "lock_runs",
    "read_marks",
    "register_streams",
]
