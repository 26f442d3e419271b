"""What is stored, and a collector that dies amid it."""

from collections.abc import Sequence

import pytest
from sqlalchemy import select

from trainvitals.wire import Batch
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage import schema as tables
from vitals_collector.storage.store import Store


def stored_rows(store: Store) -> list[tuple[str, int]]:
    """Return every stored row as (stream, seq), in order."""
    with store.read_transaction() as connection:
        of_events = connection.execute(select(tables.events.c.seq)).scalars()
        seqs = [("events", seq) for seq in of_events]
        keys = connection.execute(select(tables.streams.c.run_id, tables.streams.c.stream)).all()
    for run_id, stream in {tuple(key) for key in keys}:
        if stream != "events":
            of_stream = store.numbers.scan(RowSpan(run_id, stream), ["seq"])["seq"].values
            seqs += [(stream, seq) for seq in of_stream.tolist()]
    return sorted(seqs)


def die_after_the_rows(store: Store, patch: pytest.MonkeyPatch) -> None:
    """Have the next commit of rows be the last thing that is done."""
    append = store.numbers.append

    def append_and_die(batches: Sequence[Batch]) -> None:
        append(batches)
        raise MemoryError

    patch.setattr(store.numbers, "append", append_and_die)
