"""Rows the agent writes itself: each source with its own incarnation and sequence numbers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trainvitals.clock import Clock
from trainvitals.identity import Identity
from trainvitals.records import EVENT_SCHEMA, Event, encode_event
from trainvitals.rows import Schema, Value
from trainvitals.wire import BatchHeader, encode_batch


class MeasurementTime(NamedTuple):
    """Time of a measurement."""

    time_unix_ns: int
    monotonic_ns: int


class AgentSource:
    """One source of the agent (the node, or one GPU) within one run. Thread-safe.

    Args:
        identity: the writer, with a new incarnation for each start of the agent: its sequence
        numbers start at 0 again, and must not be confused with stored rows.
        put: stores a batch; if it raises or returns False, the rows are lost, and the next batch of
        the stream reports their number.
    """

    def __init__(self, identity: Identity, put: Callable[[bytes], bool], clock: Clock) -> None:
        self.identity = identity
        self.num_rows = 0
        self._put = put
        self._clock = clock
        self._lock = threading.Lock()
        self._next_seq: dict[str, int] = {}
        self._dropped: dict[str, int] = {}

    def sample(
        self,
        schema: Schema,
        values: Sequence[Mapping[str, Value]],
        *,
        taken: MeasurementTime | None = None,
    ) -> None:
        """Write one row per mapping, with time ``taken`` or now; absent columns are missing."""
        taken = taken or MeasurementTime(self._clock.time_ns(), self._clock.monotonic_ns())
        stamp: dict[str, Value] = {"step": -1, "attempt": 0, **taken._asdict()}
        rows = [{**stamp, **measured} for measured in values]
        self._write_batch(schema, [[row.get(c.name) for c in schema.columns] for row in rows])

    def write_event(self, event: Event, *, step: int = -1, attempt: int = 0) -> None:
        """Write an event of the agent into the run."""
        rows = encode_event(
            event,
            step=step,
            attempt=attempt,
            time_unix_ns=self._clock.time_ns(),
            monotonic_ns=self._clock.monotonic_ns(),
        )
        self._write_batch(EVENT_SCHEMA, rows)

    def _write_batch(self, schema: Schema, rows: Sequence[Sequence[Value]]) -> None:
        """Put rows of the agent itself into the run's spool, and count them if that fails."""
        if not rows:
            return
        with self._lock:
            first = self._next_seq.get(schema.stream, 0)
            dropped = self._dropped.get(schema.stream, 0)
            header = BatchHeader(
                identity=self.identity,
                stream_schema=schema,
                first_seq=first,
                num_rows=len(rows),
                dropped=dropped,
            )
            body = b"".join(schema.pack(first + i, row) for i, row in enumerate(rows))
            # Count the rows before they are put: lost rows leave a visible gap.
            self._next_seq[schema.stream] = first + len(rows)
            self._dropped[schema.stream] = dropped + len(rows)
            if self._put(encode_batch(header, body)):
                self._dropped[schema.stream] = 0
                self.num_rows += len(rows)
