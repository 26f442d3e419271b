"""What a rank's journal said last: the values ``/metrics`` shows, goodbyes and acknowledgements."""

from dataclasses import dataclass, field

from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CommandAcknowledged,
    DecisionMade,
    Event,
    RunEnded,
    decode_events,
)
from trainvitals.rows import Schema, Value
from trainvitals.wire import Batch

_BAD = BAD_LOSS | BAD_GRADIENTS


@dataclass(slots=True)
class LastSeen:
    """Folds a journal's batches; dictionaries are replaced, never changed, so any thread may read.

    Counters count from the start of this agent, as Prometheus expects of a process.
    """

    step: int = -1
    attempt: int = 0
    num_steps: int = 0
    num_nonfinite: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    rollbacks: dict[str, int] = field(default_factory=dict)
    ended: str = ""
    acked_number: int = 0
    _newest: tuple[Schema, bytes] | None = None
    _integers: "_Integers | None" = None

    @property
    def values(self) -> dict[str, Value]:
        """The last step's row by column; unpacked for who asks, which is seldom."""
        newest = self._newest
        return {} if newest is None else newest[0].unpack(newest[1])

    def observe(self, batch: Batch) -> None:
        """Take in one batch of the journal."""
        if batch.header.stream == "steps":
            self._observe_steps(batch)
        elif batch.header.stream == "events":
            for row in decode_events(batch.header.stream_schema, batch.rows):
                if row.event is not None:
                    self._observe_event(row.event)

    def _observe_steps(self, batch: Batch) -> None:
        schema, rows = batch.header.stream_schema, batch.rows
        last = len(rows) - schema.row_size
        self._newest = (schema, rows[last:])
        integers = self._integers
        if integers is None or integers.schema is not schema:
            integers = self._integers = _Integers(schema)
        self.step = integers.read("step", rows, last)
        self.attempt = integers.read("attempt", rows, last)
        self.num_steps += batch.header.num_rows
        for start in range(0, len(rows), schema.row_size):
            self.num_nonfinite += bool(integers.read("verdict", rows, start) & _BAD)

    def _observe_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.ended = event.state
        elif isinstance(event, CommandAcknowledged):
            self.acked_number = max(self.acked_number, event.ack.number)
        elif isinstance(event, DecisionMade) and event.decision.acted:
            if event.decision.action == "skip_step":
                self.skips = _counted(self.skips, event.decision.cause)
            elif event.decision.action == "rollback":
                self.rollbacks = _counted(self.rollbacks, event.decision.cause)


class _Integers:
    """Reads a few integers of a schema's rows, without the other columns; missing is 0."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        fields = schema.dtype.fields
        assert fields is not None
        self._places: dict[str, tuple[int, int, int]] = {}
        for name in ("step", "attempt", "verdict"):
            index = schema.index.get(name)
            if index is not None and schema.columns[index].kind == "i8":
                valid = int(fields["validity"][1]) + index // 8
                self._places[name] = (valid, index % 8, int(fields[f"c{index}"][1]))

    def read(self, name: str, rows: bytes, start: int) -> int:
        """Return the integer of the row that begins at ``start``."""
        if name not in self._places:
            return 0
        valid, bit, offset = self._places[name]
        if not rows[start + valid] >> bit & 1:
            return 0
        return int.from_bytes(rows[start + offset : start + offset + 8], "little", signed=True)


def _counted(counts: dict[str, int], cause: str) -> dict[str, int]:
    """Return the counts with one more; what is no plain name would make labels without bound."""
    is_name = cause.isascii() and cause.replace("_", "").isalnum() and len(cause) <= 40
    key = cause if is_name else "other"
    return {**counts, key: counts.get(key, 0) + 1}
