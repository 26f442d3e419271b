from collections.abc import Sequence
from pathlib import Path

from trainvitals.identity import Identity, new_incarnation, new_run_id
from trainvitals.io.journal import StreamWriter
from trainvitals.io.segments import list_names, sort_segments
from trainvitals.io.spool import Spool, SpoolPosition
from trainvitals.records import Command, Note
from trainvitals.rows import Column, Schema, Value
from trainvitals.wire import Batch, BatchHeader, decode_batch, encode_batch

STEPS = Schema("steps", (Column("step", "i8"), Column("loss", "f8")))
GB = 1 << 30
RUN_ID = new_run_id(1_700_000_000_000_000_000)


def an_identity(*, run_id: str = RUN_ID, source: str = "rank:0") -> Identity:
    return Identity(run_id=run_id, incarnation=new_incarnation(), source=source, node="node-a")


def a_batch(identity: Identity, first_seq: int, num_rows: int, *, stream: str = "steps") -> bytes:
    schema = Schema(stream, STEPS.columns)
    rows = b"".join(schema.pack(first_seq + i, [first_seq + i, 0.5]) for i in range(num_rows))
    header = BatchHeader(
        identity=identity, stream_schema=schema, first_seq=first_seq, num_rows=num_rows
    )
    return encode_batch(header, rows)


def a_command(*, number: int = 1, **changes: object) -> Command:
    values: dict[str, object] = {
        "run_id": RUN_ID,
        "action": "halt",
        "reason": "a test",
        "issued_by": "me",
        "issued_unix_ns": 0,
        "expires_unix_ns": 1_000,
    }
    return Command(number=number, **(values | changes))  # type: ignore[arg-type]


def note(stream: StreamWriter, text: str) -> int:
    event = Note(code="test", text=text)
    return stream.append_event(event, step=1, attempt=2, time_unix_ns=3, monotonic_ns=4)


def values_of(batches: Sequence[Batch], name: str = "loss", stream: str = "steps") -> list[Value]:
    found: list[Value] = []
    for batch in batches:
        schema = batch.header.stream_schema
        if schema.stream == stream:
            for start in range(0, len(batch.rows), schema.row_size):
                found.append(schema.unpack(batch.rows[start : start + schema.row_size]).get(name))
    return found


def seqs_of(batches: Sequence[Batch], stream: str = "steps") -> list[int]:
    found: list[int] = []
    for batch in batches:
        if batch.header.stream == stream:
            found.extend(range(batch.header.first_seq, batch.header.last_seq + 1))
    return found


def fill(spool: Spool, identity: Identity, num: int, *, rows: int = 5, first: int = 0) -> None:
    for i in range(num):
        assert spool.append(a_batch(identity, first + i * rows, rows))
    spool.sync()


def firsts(found: list[tuple[SpoolPosition, bytes]]) -> list[int]:
    return [decode_batch(raw).header.first_seq for _, raw in found]


def list_segments(directory: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return each stream's segments as (index, path), oldest first."""
    return sort_segments(directory, list_names(directory))


def tvs_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tvs"))
