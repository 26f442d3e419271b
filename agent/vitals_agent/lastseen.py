"""What a rank's journal said last: the values ``/metrics`` shows, goodbyes and acknowledgements."""

from dataclasses import dataclass, field

import numpy as np

from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CommandAcknowledged,
    DecisionMade,
    Event,
    RunEnded,
    decode_events,
)
from trainvitals.rows import Value, column_of, rows_of
from trainvitals.wire import Batch

_BAD = BAD_LOSS | BAD_GRADIENTS


@dataclass(slots=True)
class LastSeen:
    """Folds a journal's batches; dictionaries are replaced, never changed, so any thread may read.

    Counters count from the start of this agent, as Prometheus expects of a process.
    """

    step: int = -1
    attempt: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    num_steps: int = 0
    num_nonfinite: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    rollbacks: dict[str, int] = field(default_factory=dict)
    ended: str = ""
    acked_number: int = 0

    def observe(self, batch: Batch) -> None:
        """Take in one batch of the journal."""
        if batch.header.stream == "steps":
            self._observe_steps(batch)
        elif batch.header.stream == "events":
            for row in decode_events(batch.header.stream_schema, batch.rows):
                if row.event is not None:
                    self._observe_event(row.event)

    def _observe_steps(self, batch: Batch) -> None:
        schema = batch.header.stream_schema
        last = schema.unpack(memoryview(batch.rows)[-schema.row_size :])
        self.values = last
        self.step = int(last.get("step") or 0)
        self.attempt = int(last.get("attempt") or 0)
        self.num_steps += batch.header.num_rows
        if batch.header.num_rows == 1:
            self.num_nonfinite += bool(int(last.get("verdict") or 0) & _BAD)
        else:
            verdict, valid = column_of(schema, rows_of(schema, batch.rows), "verdict")
            self.num_nonfinite += int(np.count_nonzero(verdict[valid].astype(np.int64) & _BAD))

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


def _counted(counts: dict[str, int], cause: str) -> dict[str, int]:
    """Return the counts with one more; what is no plain name would make labels without bound."""
    is_name = cause.isascii() and cause.replace("_", "").isalnum() and len(cause) <= 40
    key = cause if is_name else "other"
    return {**counts, key: counts.get(key, 0) + 1}
