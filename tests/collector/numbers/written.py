"""Batches as ranks write them, of any columns."""

from collections.abc import Mapping, Sequence

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.identity import Identity
from trainvitals.rows import Column, Schema, Value
from trainvitals.wire import Batch, BatchHeader

RUN = "01J00000000000000000000001"
OTHER_RUN = "01J00000000000000000000002"
_SCHEMAS: dict[tuple[str, tuple[Column, ...]], Schema] = {}


def identity(run_id: str = RUN, *, rank: int = 0, start: int = 0) -> Identity:
    """Return who a rank is, at its n-th start."""
    return Identity(
        run_id=run_id,
        incarnation=f"{rank:08x}{start:08x}",
        source=f"rank:{rank}",
        node="node-0",
        pid=1,
        rank=rank,
        local_rank=rank,
        world_size=8,
    )


def batch(
    who: Identity,
    rows: Sequence[Mapping[str, Value]],
    *,
    first_seq: int = 0,
    kinds: Mapping[str, str] | None = None,
    stream: str = "steps",
) -> Batch:
    """Return rows of named values: step, attempt and times are there unless they are given.

    Args:
        who: the writer.
        rows: each row's values; a name that is not there is missing.
        first_seq: number of the first.
        kinds: the columns besides step, attempt and times, floats unless said.
        stream: of which they are.
    """
    kinds = dict.fromkeys((name for row in rows for name in row), "f8") if kinds is None else kinds
    own = {column.name for column in ROW_COLUMNS}
    columns = (*ROW_COLUMNS, *(Column(n, k) for n, k in kinds.items() if n not in own))
    # One object for all batches of a writer, as what decodes them gives.
    schema = _SCHEMAS.setdefault((stream, columns), Schema(stream, columns))
    packed = []
    for i, row in enumerate(rows):
        now = 1_700_000_000_000_000_000 + first_seq + i
        keys = {"step": first_seq + i, "attempt": 1, "time_unix_ns": now, "monotonic_ns": now}
        values = keys | dict(row)
        packed.append(schema.pack(first_seq + i, [values.get(c.name) for c in columns]))
    header = BatchHeader(
        identity=who, stream_schema=schema, first_seq=first_seq, num_rows=len(packed)
    )
    return Batch(header, b"".join(packed))
