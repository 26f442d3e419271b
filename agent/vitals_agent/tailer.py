"""Copies journals to the spool: a row is freed in shared memory only when it is safe on disk.

It also keeps the latest state of a rank: the values for ``/metrics``, its clean exit, and its
acknowledgements of commands.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainvitals.detect.registry import countable_cause
from trainvitals.identity import Identity
from trainvitals.io.journal import JournalReader
from trainvitals.io.segments import CLOSED
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
from trainvitals.wire import Batch, encode_batch
from vitals_agent.process import RankProcess

_BAD = BAD_LOSS | BAD_GRADIENTS


@dataclass(slots=True)
class JournalSummary:
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
    ledger_seq: int = 0
    _newest: tuple[Schema, bytes] | None = None
    _integers: "_Integers | None" = None

    @property
    def values(self) -> dict[str, Value]:
        """Return the last step's row of the rank's journal, by column, for ``/metrics``."""
        newest = self._newest
        return {} if newest is None else newest[0].unpack(newest[1])

    def observe(self, batch: Batch) -> None:
        """Add a batch that the agent read from the journal to the rank's latest state."""
        if batch.header.stream == "steps":
            self._observe_steps(batch)
        elif batch.header.stream == "events":
            for row in decode_events(batch.header.stream_schema, batch.rows):
                if row.event is not None:
                    self._observe_event(row.event)

    def _observe_steps(self, batch: Batch) -> None:
        """Update step and counters for ``/metrics`` from a journal's rows of steps."""
        schema, rows = batch.header.stream_schema, batch.rows
        last = len(rows) - schema.row_size
        self._newest = (schema, rows[last:])
        integers = self._integers
        if integers is None or integers.schema is not schema:
            integers = self._integers = _Integers(schema)
        self.step = integers.unpack_at("step", rows, last)
        self.attempt = integers.unpack_at("attempt", rows, last)
        self.num_steps += batch.header.num_rows
        for start in range(0, len(rows), schema.row_size):
            self.num_nonfinite += bool(integers.unpack_at("verdict", rows, start) & _BAD)

    def _observe_event(self, event: Event) -> None:
        """Update the rank's state from an event that the agent read in its journal."""
        if isinstance(event, RunEnded):
            self.ended = event.state
        elif isinstance(event, CommandAcknowledged):
            self.acked_number = max(self.acked_number, event.ack.number)
        elif isinstance(event, DecisionMade):
            decision = event.decision
            self.ledger_seq = max(self.ledger_seq, decision.ledger_seq)
            if decision.acted and decision.action == "skip_step":
                self.skips = _increment_cause(self.skips, countable_cause(decision.cause))
            if decision.acted and decision.action == "rollback":
                self.rollbacks = _increment_cause(self.rollbacks, countable_cause(decision.cause))


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

    def unpack_at(self, name: str, rows: bytes, start: int) -> int:
        """Return the integer of the journal row that starts at ``start``."""
        if name not in self._places:
            return 0
        valid, bit, offset = self._places[name]
        if not rows[start + valid] >> bit & 1:
            return 0
        return int.from_bytes(rows[start + offset : start + offset + 8], "little", signed=True)


def _increment_cause(counts: dict[str, int], cause: str) -> dict[str, int]:
    """Increment a cause's count for ``/metrics``; unknown names count as one label."""
    is_name = cause.isascii() and cause.replace("_", "").isalnum() and len(cause) <= 40
    key = cause if is_name else "other"
    return {**counts, key: counts.get(key, 0) + 1}


# ----------------------------------------------------------------------- a journal being copied


MAX_READS_PER_CYCLE = 64
ROWS_PER_READ = 1024


class JournalTail:
    """Copies one rank's journal to the spool.

    ``resume`` has the last sequence number per stream that the spool already has.
    """

    def __init__(self, directory: Path, identity: Identity, resume: dict[str, int]) -> None:
        self.directory = directory
        self.identity = identity
        self.process = RankProcess(identity)
        self.last = JournalSummary()
        self.process_values: dict[str, Value] = {}
        self.num_rows = 0
        self.alive = False
        """Whether the process existed at the last check."""
        self.is_quiet = True
        """Whether the last copy found nothing: only then is the process checked."""
        self.exit = ""
        """How the process ended, if known."""
        self.removed = False
        self._reader = JournalReader(directory)
        self._appended = dict(resume)
        self._synced = dict(resume)
        self._observed: dict[str, int] = {}
        self._reader.resume_after(resume)

    def copy(self, append: Callable[[bytes], object]) -> int:
        """Append a rank's new rows to the spool; after an error, read them again."""
        if not self.directory.is_dir():
            self.removed = True  # deleted by another process: nothing is left to copy
            return 0
        num_rows = 0
        self.is_quiet = True  # also after an error: then its process must be checked
        for _ in range(MAX_READS_PER_CYCLE):
            batches = self._reader.read(max_rows=ROWS_PER_READ)
            for batch in batches:
                try:
                    append(encode_batch(batch.header, batch.rows))
                except Exception:
                    unknown = {each.header.stream: -1 for each in batches}
                    self._reader.resume_after({**unknown, **self._appended})
                    raise
                self._appended[batch.header.stream] = batch.header.last_seq
                num_rows += batch.header.num_rows
                self._observe_new_rows(batch)
            if sum(batch.header.num_rows for batch in batches) < ROWS_PER_READ:
                break  # no stream returned its maximum: there are no more rows
        self.num_rows += num_rows
        self.is_quiet = not num_rows
        return num_rows

    @property
    def appended(self) -> Iterable[str]:
        """Return the journal's streams from which rows were appended to the spool."""
        return self._appended.keys()

    def release_synced(self, durable: Mapping[str, int]) -> None:
        """Free journal rows that are durable in the spool; read the others again.

        Call only after the spool's ``sync`` returned. ``durable`` has the last synced sequence
        number of each stream in the spool.
        """
        is_whole = True
        for stream, seq in self._appended.items():
            if self._synced.get(stream, -1) < seq:
                if durable.get(stream, -1) >= seq:
                    self._synced[stream] = seq
                    self._reader.release(stream, seq)
                else:
                    is_whole = False
        if not is_whole:
            self.reread_unsynced()

    @property
    def synced_seqs(self) -> dict[str, int]:
        """Return the last journal row of each stream that is durable in the spool."""
        return dict(self._synced)

    def reread_unsynced(self) -> None:
        """Read journal rows again that may not be on the spool's disk."""
        self.is_quiet = True
        unknown = dict.fromkeys(self._appended, -1)
        self._reader.resume_after({**unknown, **self._synced})
        self._appended = dict(self._synced)

    @property
    def num_dropped(self) -> int:
        """Return how many journal rows the agent could not read."""
        return self._reader.dropped

    @property
    def closed(self) -> bool:
        """Return whether the rank has ended its journal, or the agent has closed it."""
        return (self.directory / CLOSED).exists()

    def take_end(self) -> bool:
        """Return whether the rank ended or was marked dead, and all its rows are spooled."""
        return self.removed or (self._reader.take_end() and self._appended == self._synced)

    def remove(self) -> None:
        """Delete a journal that is completely spooled from the node's shared memory."""
        for stream in self._synced:
            self._reader.release(stream, self._synced[stream])
        self._reader.remove()
        self.removed = True
        if self.process.alive():
            self.process_values = {}  # training has ended, so its values are no longer a rank's

    def _observe_new_rows(self, batch: Batch) -> None:
        """Add rows that the agent reads for the first time to the rank's latest state."""
        stream, last = batch.header.stream, batch.header.last_seq
        if (
            self._observed.get(stream, -1) < last
        ):  # otherwise these rows are read again after a failure
            self._observed[stream] = last
            self.last.observe(batch)


def journal_identity(directory: Path) -> Identity | None:
    """Return the writer's identity, or None while the first segment is missing.

    Raises:
        NewerVersionError: a newer version writes it.
    """
    reader = JournalReader(directory)
    identity = reader.identity
    if identity is None and reader.unreadable_segments:
        reader.read(max_rows=1)  # raises the error if the reason is the version
    return identity


def num_unsynced_rows(directory: Path, synced: dict[str, int]) -> int:
    """Return how many rows of a journal the agent has not made durable in its spool."""
    rest = JournalReader(directory)
    rest.resume_after(synced)
    num_rows = 0
    while batches := rest.read():
        num_rows += sum(batch.header.num_rows for batch in batches)
    return num_rows
