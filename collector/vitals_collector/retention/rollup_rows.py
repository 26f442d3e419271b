"""Takes old rows of one run out of the store, in short transactions that each leave it whole.

A row is either stored or part of the numbers over all ranks, and the transaction that makes it the
one ends its being the other. What is taken away is first given another stream, which is a small
write; the room is freed afterwards, little by little. Rows that were thinned once are marked by the
writer's sequence number and stay as they are.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, case, delete, func, select, update

from trainvitals.rows import Schema, rows_of
from vitals_collector.retention.rollup import (
    NUM_RANKS,
    RANKS,
    Batch,
    OverRanks,
    Rows,
    VolumeSettings,
    Window,
    cut,
    merge_rows,
    thin_hosts,
    thin_layers,
)
from vitals_collector.retention.rollup_candidates import REMOVED, RunAt, bytes_of, in_parts
from vitals_collector.storage.checksums import as_rows
from vitals_collector.storage.columns import encode_rows, whole
from vitals_collector.storage.compaction import rewrite
from vitals_collector.storage.read_rows import Page, read_pages
from vitals_collector.storage.schema import (
    batch_columns,
    batches,
    measured_columns,
    row_schemas,
    thinned,
    thinned_to,
)
from vitals_collector.storage.store import Store, insert

Reason = Literal["age", "size"]
"""Why rows were taken away: they were old, or the run was above its cap."""

_FREED_AT_ONCE = 64


class Why(NamedTuple):
    """Why rows are taken away, and when."""

    reason: Reason
    now_unix_ns: int


class Removed(NamedTuple):
    """What was taken away at once."""

    stream: str
    num_rows: int
    num_bytes: int
    to_step: int
    to_unix_ns: int


# ----------------------------------------------------------------------------- steps of ranks


def cut_batch(
    store: Store, run: RunAt, batch: Batch, before_unix_ns: int, settings: VolumeSettings
) -> bool:
    """Make windows that are due into batches of their own; the rows stay the same.

    Returns:
        Whether there was one, or the batch is damaged and passed over.
    """
    assert run.present is not None, "nothing is due where nobody knows how far the run is"
    with store.read() as connection:
        pages = list(read_pages(connection, batches.c.id == batch.id))
    if not pages:
        return _pass_over(store, run, "steps", batch)
    schema = pages[0].schema
    parts = cut(
        schema,
        pages[0].rows,
        present=run.present,
        before_unix_ns=before_unix_ns,
        settings=settings,
    )
    if len(parts) == 1:
        return False
    with store.write() as connection:
        about = connection.execute(_ABOUT.where(batches.c.id == batch.id)).mappings().first()
        if about is None or not rewrite(connection, pages, parts[0]):
            return False
        for part in parts[1:]:
            put_rows(connection, dict(about), schema, part)
    return True


def thin_window(
    store: Store, run: RunAt, window: Window, settings: VolumeSettings, why: Why
) -> Removed | None:
    """Put the numbers over all ranks in the place of a window's rows, but those of the worst.

    Returns:
        What was taken away; None where the batches were changed meanwhile: look again.
    """
    over = OverRanks(window.first_step, window.end_step)
    source_of: dict[int, str] = {}
    ids = [batch.id for batch in window.batches]
    with store.read() as connection:
        for part_ids in in_parts(ids):
            for page in read_pages(connection, batches.c.id.in_(part_ids)):
                over.add(page.source, page.schema, page.rows)
                source_of[page.id] = page.source
    kept = set(source_of.values()) if window.is_whole else set(over.worst(settings.num_worst_ranks))
    removed_batches = [batch for batch in window.batches if source_of.get(batch.id) not in kept]
    with store.write() as connection:
        if not _are_there(connection, window.batches):
            return None
        removed = Removed(
            "steps",
            sum(batch.num_rows for batch in removed_batches),
            bytes_of(connection, [batch.id for batch in removed_batches]),
            max(batch.last_step for batch in window.batches),
            max(batch.newest_unix_ns for batch in window.batches),
        )
        _add_numbers(connection, run.run_id, window, over)
        _mark(connection, run.run_id, "steps", window.batches)
        for part_ids in in_parts([batch.id for batch in removed_batches]):
            connection.execute(
                update(batches).where(batches.c.id.in_(part_ids)).values(stream=REMOVED + "steps")
            )
        _note(connection, run.run_id, removed, why)
    return removed


def _are_there(connection: Connection, planned_batches: Sequence[Batch]) -> bool:
    read = {batch.id: (batch.last_seq, batch.num_rows) for batch in planned_batches}
    stored: dict[int, tuple[int, int]] = {}
    query = select(batches.c.id, batches.c.first_seq, batches.c.num_rows)
    for part_ids in in_parts(list(read)):
        for row in connection.execute(query.where(batches.c.id.in_(part_ids)).with_for_update()):
            stored[row.id] = (row.first_seq + row.num_rows - 1, row.num_rows)
    return read == stored


def _add_numbers(connection: Connection, run_id: str, window: Window, over: OverRanks) -> None:
    """Store the window's numbers over all ranks, joined with those of ranks that came before."""
    table = batches.c
    mine = (table.run_id == run_id, table.stream == RANKS)
    pages = list(
        read_pages(
            connection,
            *mine,
            table.max_step >= window.first_step,
            table.min_step < window.end_step,
            table.min_attempt <= window.attempt,
            table.max_attempt >= window.attempt,
        )
    )
    schema_and_rows = over.rows(window.attempt)
    if pages:
        connection.execute(delete(batches).where(table.id.in_([page.id for page in pages])))
        schema_and_rows = _joined(pages, schema_and_rows)
    last = connection.execute(select(func.max(table.first_seq + table.num_rows)).where(*mine))
    put_numbers(connection, run_id, *schema_and_rows, first_seq=last.scalar() or 0)


def _joined(
    pages: Sequence[Page], added: tuple[Schema, list[dict[str, float | int]]]
) -> tuple[Schema, list[dict[str, float | int]]]:
    columns = {column.name: column for column in added[0].columns}
    by_key: dict[tuple[float, float], dict[str, float | int]] = {}
    rows = [row for page in pages for row in _as_numbers(page)] + added[1]
    for page in pages:
        columns = {column.name: column for column in page.schema.columns} | columns
    for row in rows:
        key = (row["attempt"], row["step"])
        by_key[key] = merge_rows(by_key[key], row) if key in by_key else row
    return Schema(RANKS, tuple(columns.values())), [by_key[key] for key in sorted(by_key)]


def _as_numbers(page: Page) -> list[dict[str, float | int]]:
    return [
        {
            name: value
            for name, value in page.schema.unpack(bytes(row)).items()
            if isinstance(value, int | float)
        }
        for row in page.rows
    ]


def put_numbers(
    connection: Connection,
    run_id: str,
    schema: Schema,
    number_rows: Sequence[dict[str, float | int]],
    *,
    first_seq: int,
) -> None:
    """Store rows of numbers over all ranks, and the names of their columns."""
    packed = (
        schema.pack(first_seq + i, [row.get(column.name) for column in schema.columns])
        for i, row in enumerate(number_rows)
    )
    rows = rows_of(schema, b"".join(packed))
    body = msgspec.msgpack.encode(schema)
    digest = hashlib.sha256(body).hexdigest()
    schema_insert = insert(connection, row_schemas).values(digest=digest, body=body)
    connection.execute(schema_insert.on_conflict_do_nothing())
    about = {
        "run_id": run_id,
        "incarnation": RANKS,
        "source": RANKS,
        "stream": RANKS,
        "schema_digest": digest,
        "clock_offset_ns": 0,
    }
    put_rows(connection, about, schema, rows)
    names = [NUM_RANKS, *(c.name for c in schema.columns if ":" in c.name)]
    connection.execute(
        insert(connection, measured_columns).on_conflict_do_nothing(),
        [{"run_id": run_id, "stream": RANKS, "name": name} for name in names],
    )


# --------------------------------------------------------------------------- layers and hosts


def thin_batch(
    store: Store, run: RunAt, stream: str, batch: Batch, settings: VolumeSettings, why: Why
) -> Removed | None:
    """Leave of one batch of layers or of a host's samples what is to stay for ever."""
    with store.read() as connection:
        pages = list(read_pages(connection, batches.c.id == batch.id))
    if not pages:
        is_done = _pass_over(store, run, stream, batch)
        return Removed(stream, 0, 0, batch.last_step, batch.newest_unix_ns) if is_done else None
    page = pages[0]
    if stream == "layers":
        rows = thin_layers(page.schema, page.rows, run.near_layers, settings)
    else:
        rows = thin_hosts(page.schema, page.rows, run.near_ns, settings)
    with store.write() as connection:
        before = bytes_of(connection, [batch.id])
        if len(rows) < len(page.rows):
            if not rewrite(connection, pages, rows):
                return None
        elif not _are_there(connection, [batch]):
            return None
        _mark(connection, run.run_id, stream, [batch])
        removed = Removed(
            stream,
            len(page.rows) - len(rows),
            before - bytes_of(connection, [batch.id]),
            batch.last_step,
            batch.newest_unix_ns,
        )
        _note(connection, run.run_id, removed, why)
    return removed


def _pass_over(store: Store, run: RunAt, stream: str, batch: Batch) -> bool:
    """Leave a damaged batch as it is for ever, so that it keeps no other from being thinned.

    Returns:
        False where it is not damaged but was changed meanwhile.
    """
    with store.write() as connection:
        is_there = _are_there(connection, [batch])
        if is_there:
            _mark(connection, run.run_id, stream, [batch])
    return is_there


# ----------------------------------------------------------------------------------- writing


def put_rows(connection: Connection, about: dict[str, Any], schema: Schema, rows: Rows) -> None:
    """Store rows as one columnar batch."""
    values = about | {"first_seq": int(rows["seq"][0]), "num_rows": len(rows), "row_bytes": b""}
    for name in ("step", "attempt", "time_unix_ns"):
        numbers = whole(schema, rows, name)
        values |= {f"min_{name}": int(numbers.min()), f"max_{name}": int(numbers.max())}
    added = connection.execute(batches.insert().values(values).returning(batches.c.id))
    batch_id = added.scalar_one()
    connection.execute(batch_columns.insert(), as_rows(batch_id, encode_rows(schema, rows)))


def _mark(connection: Connection, run_id: str, stream: str, done: Sequence[Batch]) -> None:
    last: dict[str, int] = {}
    for batch in done:
        last[batch.writer] = max(batch.last_seq, last.get(batch.writer, -1))
    key = {"run_id": run_id, "stream": stream}
    statement = insert(connection, thinned_to)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["run_id", "incarnation", "stream"],
            set_={"last_seq": statement.excluded.last_seq},
        ),
        [key | {"incarnation": writer, "last_seq": seq} for writer, seq in sorted(last.items())],
    )


def _note(connection: Connection, run_id: str, removed: Removed, why: Why) -> None:
    """Add to what is said of the run: how many rows were thinned, and up to where."""
    if not removed.num_rows:
        return
    values: dict[str, Any] = {"run_id": run_id, "stream": removed.stream, "reason": why.reason}
    values |= {"num_rows": removed.num_rows, "num_bytes": removed.num_bytes}
    values |= {"to_step": removed.to_step, "to_unix_ns": removed.to_unix_ns}
    own = thinned.c
    statement = insert(connection, thinned).values(values | {"updated_unix_ns": why.now_unix_ns})
    new = statement.excluded
    sums = {name: own[name] + new[name] for name in ("num_rows", "num_bytes")}
    furthest = {
        name: case((own[name] < new[name], new[name]), else_=own[name])
        for name in ("to_step", "to_unix_ns")
    }
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["run_id", "stream", "reason"],
            set_={**sums, **furthest, "updated_unix_ns": why.now_unix_ns},
        )
    )


def free_removed(store: Store, run_id: str) -> bool:
    """Free some of the room of a run's removed rows; return whether there may be more."""
    table = batches.c
    query = select(table.id).where(table.run_id == run_id, table.stream.startswith(REMOVED))
    with store.write() as connection:
        ids = list(connection.execute(query.limit(_FREED_AT_ONCE)).scalars())
        if ids:
            connection.execute(delete(batches).where(table.id.in_(ids)))
    return len(ids) == _FREED_AT_ONCE


_ABOUT = select(
    *(
        batches.c[name]
        for name in (
            "run_id",
            "incarnation",
            "source",
            "stream",
            "schema_digest",
            "clock_offset_ns",
        )
    )
)

__all__ = [
    "Reason",
    "Removed",
    "Why",
    "cut_batch",
    "free_removed",
    "put_numbers",
    "put_rows",
    "thin_batch",
    "thin_window",
]
