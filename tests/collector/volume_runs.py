"""Runs of several ranks for the tests of volumes, and what is left of their rows."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from sqlalchemy import func, select

from tests.collector.rows import RUN, Writer
from trainvitals.rows import column_of
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.live_monitor import state_name
from vitals_collector.storage.compaction import compact
from vitals_collector.storage.read_rows import read_pages
from vitals_collector.storage.schema import batches, engine_state, streams
from vitals_collector.storage.store import Store, insert

HOUR = 3_600 * 1_000_000_000
Value = Callable[[int, int], float]
"""What a rank measured at a step."""


def slower(rank: int, step: int) -> float:
    """Steps that last the longer the higher the rank is."""
    return 1.0 + rank / 1_000 + (step % 7) / 100


def like_the_others(rank: int, step: int) -> float:
    """Losses that are all alike."""
    return 2.0 + rank / 1_000


def write_steps(
    store: Store,
    writers: Sequence[Writer],
    steps: range,
    *,
    seconds: Value = slower,
    loss: Value = like_the_others,
    attempt: int = 1,
    at_once: int = 100,
) -> None:
    """Store the steps of all ranks, as agents would send them; rank N is the Nth writer."""
    for start in range(steps.start, steps.stop, at_once):
        some = range(start, min(start + at_once, steps.stop))
        raws = [
            writer.steps(
                some,
                attempt=attempt,
                step_duration_seconds=[seconds(writer.identity.rank, step) for step in some],
                rank_loss=[loss(writer.identity.rank, step) for step in some],
            )
            for writer in writers
        ]
        ingest_all(store, raws, 0)


def ranks(num: int, *, run: str = RUN) -> list[Writer]:
    """Return a writer for each rank."""
    return [Writer(f"rank:{rank}", run=run, world_size=num) for rank in range(num)]


def all_read(store: Store, run: str = RUN, *, but: Sequence[str] = ()) -> None:
    """Have the watchers be done with everything that is stored, but of those incarnations."""
    query = select(streams.c.incarnation, streams.c.stream, streams.c.last_seq)
    with store.write() as connection:
        found = connection.execute(query.where(streams.c.run_id == run)).all()
        done = {f"{one}/{stream}": seq for one, stream, seq in found if one not in but}
        values = {"body": msgspec.msgpack.encode({"done": done})}
        statement = insert(connection, engine_state).values(name=state_name(run), **values)
        connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


def settled(store: Store, run: str = RUN) -> None:
    """Compact everything, and have the watchers be done with it."""
    compact(store, run_id=run)
    all_read(store, run)


def steps_left(store: Store, source: str, run: str = RUN) -> list[int]:
    """Return the steps that a rank has whole rows of."""
    return values_of(store, "steps", "step", source, run)


def ranks_of_steps(store: Store, run: str = RUN) -> dict[int, int]:
    """Return how many whole rows of ranks other than 0 each step has."""
    found: Counter[int] = Counter()
    with store.read() as connection:
        where = (batches.c.run_id == run, batches.c.stream == "steps")
        for page in read_pages(connection, *where, batches.c.source != "rank:0"):
            found.update(column_of(page.schema, page.rows, "step")[0].tolist())
    return dict(found)


def values_of(
    store: Store, stream: str, column: str, source: str = "", run: str = RUN
) -> list[float]:
    """Return the measured values of a column, in the order they are stored in."""
    where = [batches.c.run_id == run, batches.c.stream == stream]
    if source:
        where.append(batches.c.source == source)
    found: list[float] = []
    with store.read() as connection:
        for page in read_pages(connection, *where):
            values, valid = column_of(page.schema, page.rows, column)
            found += np.asarray(values)[valid].tolist()
    return found


def numbers(store: Store, column: str, run: str = RUN) -> dict[int, float]:
    """Return a column of the numbers over all ranks, by step."""
    steps = values_of(store, "ranks", "step", run=run)
    return dict(zip(map(int, steps), values_of(store, "ranks", column, run=run), strict=True))


def num_batches(store: Store, stream: str) -> int:
    """Return how many batches there are."""
    with store.read() as connection:
        query = select(func.count()).where(batches.c.stream.startswith(stream))
        return int(connection.execute(query).scalar_one())
