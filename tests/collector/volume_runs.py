"""Runs of several ranks for the tests of volumes, and what is left of their rows."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import select

from tests.collector.rows import RUN, Writer
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.live_monitor import watch_state_name
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.schema import engine_state, streams
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
) -> None:
    """Store the steps of all ranks in one commit; rank N is the Nth writer."""
    raws = [
        writer.steps(
            steps,
            attempt=attempt,
            step_duration_seconds=[seconds(writer.identity.rank, step) for step in steps],
            rank_loss=[loss(writer.identity.rank, step) for step in steps],
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
        marks = connection.execute(query.where(streams.c.run_id == run)).all()
        done = {f"{who}/{stream}": seq for who, stream, seq in marks if who not in but}
        values = {"body": msgspec.msgpack.encode({"done": done})}
        statement = insert(connection, engine_state).values(name=watch_state_name(run), **values)
        connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


def steps_left(store: Store, source: str, run: str = RUN) -> list[int]:
    """Return the steps that a rank has whole rows of."""
    return [int(step) for step in values_of(store, "steps", "step", source, run)]


def ranks_of_steps(store: Store, run: str = RUN) -> dict[int, int]:
    """Return how many whole rows of ranks other than 0 each step has."""
    rows = store.numbers.scan(RowSpan(run, "steps"), ["step", "rank"])
    return dict(Counter(rows["step"].values[rows["rank"].values > 0].tolist()))


def values_of(
    store: Store, stream: str, column: str, source: str = "", run: str = RUN
) -> list[float]:
    """Return the measured values of a column, by step, rank and time."""
    span = RowSpan(run, stream, (source,) if source else ())
    values = store.numbers.scan(span, [column])[column]
    measured: list[float] = values.values[~values.is_missing].tolist()
    return measured


def numbers(store: Store, column: str, run: str = RUN) -> dict[int, float]:
    """Return a column of the numbers over all ranks, by step."""
    steps = values_of(store, "ranks", "step", run=run)
    return dict(zip(map(int, steps), values_of(store, "ranks", column, run=run), strict=True))
