"""Makes batches as ranks and agents would, with as few words as a test can have."""

from collections.abc import Sequence

from sqlalchemy import func, select

from trainvitals.catalog import NODE_SCHEMA, PROCESS_SCHEMA, SCALARS_SCHEMA, steps_schema
from trainvitals.identity import Identity, new_incarnation
from trainvitals.records import EVENT_SCHEMA, Event, encode_event
from trainvitals.rows import Schema, Value
from trainvitals.wire import BatchHeader, encode_batch
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.schema import events, streams
from vitals_collector.storage.store import Store

RUN = "01JD0000000000000000000000"
OTHER_RUN = "01JD0000000000000000000001"
SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
STEPS = steps_schema()


class Writer:
    """One incarnation of a source: numbers its rows and hands out batches."""

    def __init__(
        self,
        source: str = "rank:0",
        *,
        run: str = RUN,
        node: str = "node-a",
        started: int = START,
        world_size: int = 2,
        pid: int = 100,
    ) -> None:
        rank = int(source.removeprefix("rank:")) if source.startswith("rank:") else -1
        self.identity = Identity(
            run_id=run,
            incarnation=new_incarnation(),
            source=source,
            node=node,
            pid=pid,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            started_unix_ns=started,
        )
        self.next_seq: dict[str, int] = {}
        self.started = started

    def batch(self, schema: Schema, rows: Sequence[Sequence[Value]], *, lose: int = 0) -> bytes:
        """Return the next rows of a stream; ``lose`` numbers before them are never sent."""
        first = self.next_seq.get(schema.stream, 0) + lose
        self.next_seq[schema.stream] = first + len(rows)
        raw = b"".join(schema.pack(first + i, row) for i, row in enumerate(rows))
        header = BatchHeader(
            identity=self.identity, stream_schema=schema, first_seq=first, num_rows=len(rows)
        )
        return encode_batch(header, raw)

    def steps(
        self,
        steps: Sequence[int],
        *,
        attempt: int = 1,
        lose: int = 0,
        **columns: Value | list[Value],
    ) -> bytes:
        """Return step rows, a second apart; a column is one value for all, or a list."""
        given = [columns.get(column.name) for column in STEPS.columns[4:]]
        lists = [value if isinstance(value, list) else [value] * len(steps) for value in given]
        heads = ((step, attempt, self.time_of(step), step * SECOND) for step in steps)
        rows = [(*head, *rest) for head, *rest in zip(heads, *lists, strict=True)]
        return self.batch(STEPS, rows, lose=lose)

    def time_of(self, step: int) -> int:
        """Return when the step is said to have ended."""
        return self.started + step * SECOND

    def events(
        self, *events: Event, step: int = 0, attempt: int = 1, at: int | None = None
    ) -> bytes:
        """Return events of one step."""
        time = self.time_of(step) if at is None else at
        rows = [
            row
            for event in events
            for row in encode_event(
                event, step=step, attempt=attempt, time_unix_ns=time, monotonic_ns=0
            )
        ]
        return self.batch(EVENT_SCHEMA, rows)

    def scalars(self, name: int, values: dict[int, float], *, attempt: int = 1) -> bytes:
        """Return rows of one named scalar."""
        rows = [[s, attempt, self.time_of(s), 0, name, v] for s, v in values.items()]
        return self.batch(SCALARS_SCHEMA, rows)

    def node_rows(self, seconds: Sequence[int], cpu_ratio: float = 0.5) -> bytes:
        """Return rows of a node's own measurements."""
        rest: list[Value] = [None] * (len(NODE_SCHEMA.columns) - 5)
        rows = [[-1, 0, self.started + s * SECOND, 0, cpu_ratio, *rest] for s in seconds]
        return self.batch(NODE_SCHEMA, rows)

    def process_rows(self, second: int, alive: dict[int, tuple[int, int]]) -> bytes:
        """Return one row per rank: rank -> (pid, alive)."""
        rest: list[Value] = [None] * (len(PROCESS_SCHEMA.columns) - 7)
        rows = [
            [-1, 0, self.started + second * SECOND, 0, rank, pid, is_alive, *rest]
            for rank, (pid, is_alive) in alive.items()
        ]
        return self.batch(PROCESS_SCHEMA, rows)


def seqs_stored(store: Store, stream: str = "steps", run: str = RUN) -> list[int]:
    """Return the numbers of a stream's stored rows, of all writers."""
    return sorted(store.numbers.scan(RowSpan(run, stream), ["seq"])["seq"].values.tolist())


def num_stored(store: Store) -> int:
    """Return how many rows are stored, events included."""
    with store.read_transaction() as connection:
        keys = connection.execute(select(streams.c.run_id, streams.c.stream).distinct()).all()
        num_events = connection.execute(select(func.count()).select_from(events)).scalar_one()
    return num_events + sum(
        len(seqs_stored(store, stream, run)) for run, stream in keys if stream != "events"
    )
