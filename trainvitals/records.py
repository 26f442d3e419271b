"""What is recorded: the row format, the streams, and the events.

A row is what travels from the rank to the store, byte for byte::

    crc32 u32 | zero u32 | seq i64 | validity u64 x W | column | column | ...

Little-endian; ``crc32`` covers everything after itself. Columns are ``f8``, ``i8`` or ``S<n>`` (n
bytes, a multiple of 8). Bit i of the validity words says whether column i was measured at all:
missing is not NaN, and NaN is a value that is kept. Columns only grow; a reader keeps the names it
does not know. A row of zeros (preallocated, never written) fails its checksum.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from trainvitals.errors import FormatError

FORMAT_VERSION = 1
"""Version of rows, segments and batches; raised only when an old reader would misread."""

STREAMS = ("steps", "layers", "scalars", "events", "gpu", "node", "process")
"""Streams a writer may open. Ranks write the first four, agents the events and the last three."""

EVENT_PAYLOAD_BYTES = 936
MAX_COLUMNS = 512

Value = float | int | bytes | None


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One column: its name (in the catalog, where it is a metric) and its type."""

    name: str
    kind: str

    @property
    def size(self) -> int:
        """Bytes in a row."""
        return int(self.kind[1:]) if self.kind.startswith("S") else 8

    def check(self) -> None:
        """Raise FormatError unless the kind is ``f8``, ``i8`` or ``S<multiple of 8>``."""
        sized = re.fullmatch("S([0-9]{1,4})", self.kind)
        size = int(sized[1]) if sized else 0
        if self.kind in ("f8", "i8") or (0 < size <= 4096 and size % 8 == 0):
            return
        raise FormatError(
            f"column {self.name!r} has type {self.kind!r}; known are f8, i8 and S<8n>"
        )


class Schema(msgspec.Struct, frozen=True, dict=True):
    """The columns of one stream, in row order."""

    stream: str
    columns: tuple[Column, ...]

    def check(self) -> Schema:
        """Return self if it can be laid out.

        Raises:
            FormatError: unknown stream, too many columns, duplicate names or unknown types.
        """
        if self.stream not in STREAMS:
            raise FormatError(f"stream is {self.stream!r}; known are {', '.join(STREAMS)}")
        if not 0 < len(self.columns) <= MAX_COLUMNS:
            raise FormatError(f"{len(self.columns)} columns; a row has 1 to {MAX_COLUMNS}")
        if len({c.name for c in self.columns}) != len(self.columns):
            raise FormatError("two columns have the same name")
        for column in self.columns:
            column.check()
        return self

    @cached_property
    def num_validity_words(self) -> int:
        """64-bit words of validity bits."""
        return (len(self.columns) + 63) // 64

    @cached_property
    def row_size(self) -> int:
        """Bytes of a row."""
        return 16 + 8 * self.num_validity_words + sum(c.size for c in self.columns)

    @cached_property
    def index(self) -> dict[str, int]:
        """Column name to position."""
        return {c.name: i for i, c in enumerate(self.columns)}

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Numpy structured type of a row, for ``np.frombuffer(rows, schema.dtype)``."""
        head = [("crc", "<u4"), ("zero", "<u4"), ("seq", "<i8")]
        valid = [("validity", "<u8", (self.num_validity_words,))]
        body = [
            (f"c{i}", c.kind if c.kind.startswith("S") else "<" + c.kind)
            for i, c in enumerate(self.columns)
        ]
        return np.dtype(head + valid + body)

    @cached_property
    def _struct(self) -> struct.Struct:
        codes = {"f8": "d", "i8": "q"}
        body = "".join(codes.get(c.kind) or f"{c.size}s" for c in self.columns)
        return struct.Struct(f"<IIq{self.num_validity_words}Q{body}")

    @cached_property
    def _blank(self) -> tuple[Value, ...]:
        blanks: dict[str, Value] = {"f8": 0.0, "i8": 0}
        return tuple(blanks.get(c.kind, b"") for c in self.columns)

    def pack(self, seq: int, values: Sequence[Value]) -> bytes:
        """Return the row's bytes; ``None`` is a missing value. One value per column, in order."""
        bits = 0
        filled = list(self._blank)
        for i, value in enumerate(values):
            if value is not None:
                bits |= 1 << i
                filled[i] = value
        words = [(bits >> 64 * w) & 0xFFFFFFFFFFFFFFFF for w in range(self.num_validity_words)]
        raw = self._struct.pack(0, 0, seq, *words, *filled)
        return zlib.crc32(raw[4:]).to_bytes(4, "little") + raw[4:]

    def seq_of(self, row: bytes | memoryview) -> int | None:
        """Return the row's sequence number, or None if its checksum does not hold."""
        if len(row) != self.row_size or zlib.crc32(row[4:]) != int.from_bytes(row[:4], "little"):
            return None
        return int(struct.unpack_from("<q", row, 8)[0])

    def unpack(self, row: bytes | memoryview) -> dict[str, Value]:
        """Return the row's valid columns by name. Does not verify the checksum."""
        parts = self._struct.unpack(row)
        words = parts[3 : 3 + self.num_validity_words]
        values = parts[3 + self.num_validity_words :]
        return {
            column.name: values[i]
            for i, column in enumerate(self.columns)
            if words[i // 64] >> (i % 64) & 1
        }


def rows_of(schema: Schema, raw: bytes) -> npt.NDArray[np.void]:
    """Return the rows as a structured array without copying.

    Raises:
        FormatError: the length is not a whole number of rows.
    """
    if len(raw) % schema.row_size:
        raise FormatError(f"{len(raw)} bytes are no whole number of {schema.row_size}-byte rows")
    return np.frombuffer(raw, dtype=schema.dtype)


def column_of(
    schema: Schema, rows: npt.NDArray[np.void], name: str
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """Return one column's values and which of them were measured; none, if it is not there."""
    i = schema.index.get(name)
    if i is None:
        return np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
    bit = np.uint64(1 << (i % 64))
    return rows[f"c{i}"], (rows["validity"][:, i // 64] & bit) != 0


# ---------------------------------------------------------------------------------- findings


Level = Literal["act", "tell"]
ActionName = Literal["continue", "skip_step", "rollback", "halt", "accept_level"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The reduced numbers of one step: what every rank holds alike, and all that detectors see."""

    step: int
    attempt: int
    loss: float | None = None
    loss_max: float | None = None
    loss_max_rank: int = -1
    grad_norm: float | None = None
    loss_limit: float | None = None
    grad_norm_limit: float | None = None
    nonfinite_ranks: tuple[int, ...] = ()
    failed_ranks: tuple[int, ...] = ()
    nonfinite_params: int = 0
    skipped: bool = False
    overflow: bool = False
    learning_rate: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one detector says about one step."""

    kind: str
    level: Level
    step: int
    detector: str
    reason: str
    rank: int = -1
    value: float | None = None
    limit: float | None = None
    onset_step: int = -1
    cause: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the ladder did about findings: one line of the ledger."""

    ledger_seq: int
    action: ActionName
    step: int
    """The step the decision is about."""
    decided_at_step: int
    """The step in whose ``Monitor.step`` it was taken: ``step`` plus the readback lag."""
    attempt: int
    reason: str
    rule: str
    cause: str
    rank: int = -1
    value: float | None = None
    limit: float | None = None
    mode: str = "guard"
    acted: bool = True
    """False in ``observe`` mode: recorded, not done."""
    checkpoint_id: str = ""
    rollback_to_step: int = -1
    new_attempt: int = 0
    skip_batches: int = 0
    lr_factor: float = 1.0
    budget_left: int = -1
    cost_steps: int = 0
    """Updates lost: 1 for a skip, the steps trained again for a rollback."""
    command_number: int = 0
    evidence: dict[str, float] = {}


# ---------------------------------------------------------------------------------- commands


CommandAction = Literal["halt", "rollback", "skip", "lr"]
COMMAND_CODES: dict[str, int] = {"halt": 1, "rollback": 2, "skip": 3, "lr": 4}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal to the ladder, signed with the run's key; takes effect at most once.

    ``number`` is the microsecond of issue: strictly growing, exact in a float64, and comparable
    without memory of earlier commands. ``checkpoint_id`` is a name in the run's own store.
    """

    number: int
    run_id: str
    action: CommandAction
    reason: str
    issued_by: str
    issued_unix_ns: int
    expires_unix_ns: int
    checkpoint_id: str = ""
    argument: float = 0.0
    signature: str = ""


class CommandAck(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command."""

    number: int
    status: Literal["done", "refused", "expired", "invalid"]
    step: int
    detail: str


# ------------------------------------------------------------------------------------ events


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a run: shown and searched, never keys."""

    name: str = ""
    project: str = ""
    user: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, str | int | float | bool | None] = {}
    git_commit: str = ""
    mode: str = "guard"
    world_size: int = 1
    readback_lag: int = 1
    num_params: int = 0
    torch_version: str = ""
    vitals_version: str = ""
    run_dir: str = ""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: step, attempt and times are columns of the event's row, not of its body."""


class RunStarted(_Event, frozen=True, kw_only=True):
    """First event of each incarnation of global rank 0."""

    info: RunInfo


class RankStarted(_Event, frozen=True, kw_only=True):
    """First event of every rank's incarnation."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    node: str
    gpu_uuid: str = ""


class AttemptStarted(_Event, frozen=True, kw_only=True):
    """A new branch of the lineage begins."""

    id: int
    parent: int | None
    fork_step: int
    reason: str


class NamesDefined(_Event, frozen=True, kw_only=True):
    """Gives the names behind the ids of the ``scalars`` or ``layers`` stream."""

    stream: str
    names: dict[int, str]


class FindingRaised(_Event, frozen=True, kw_only=True):
    """A detector in the training loop spoke."""

    finding: Finding


class DecisionMade(_Event, frozen=True, kw_only=True):
    """The ladder decided: an entry of the ledger."""

    decision: Decision


class CommandAcknowledged(_Event, frozen=True, kw_only=True):
    """A command was applied, refused, or came too late."""

    ack: CommandAck


class CheckpointChanged(_Event, frozen=True, kw_only=True):
    """A checkpoint or snapshot changed state."""

    checkpoint_id: str
    checkpoint_step: int
    state: Literal["candidate", "verified", "healthy", "retired", "bad"]
    where: Literal["memory", "disk"]
    num_bytes: int = 0
    detail: str = ""


class DataWindowSkipped(_Event, frozen=True, kw_only=True):
    """Batches that training moved past, by index in the epoch: first inclusive, last exclusive."""

    epoch: int
    first_batch: int
    last_batch: int
    reason: str


class ChangeExpected(_Event, frozen=True, kw_only=True):
    """The user announced a planned change: finite rules take a new baseline."""

    reason: str
    steps: int


class Note(_Event, frozen=True, kw_only=True):
    """Something worth a line: said once, with a stable code."""

    code: str
    text: str
    severity: Literal["info", "warning", "error"] = "info"


class RunEnded(_Event, frozen=True, kw_only=True):
    """Last event of an incarnation that could say goodbye."""

    state: Literal["finished", "halted", "interrupted", "failed"]
    reason: str = ""


Event = (
    RunStarted
    | RankStarted
    | AttemptStarted
    | NamesDefined
    | FindingRaised
    | DecisionMade
    | CommandAcknowledged
    | CheckpointChanged
    | DataWindowSkipped
    | ChangeExpected
    | Note
    | RunEnded
)

_EVENT_ENCODER = msgspec.msgpack.Encoder()
_EVENT_DECODER: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

EVENT_SCHEMA = Schema(
    "events",
    (
        Column("step", "i8"),
        Column("attempt", "i8"),
        Column("time_unix_ns", "i8"),
        Column("monotonic_ns", "i8"),
        Column("part", "i8"),
        Column("num_parts", "i8"),
        Column("length", "i8"),
        Column("payload", f"S{EVENT_PAYLOAD_BYTES}"),
    ),
)


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event with the columns of its row."""

    seq: int
    step: int
    attempt: int
    time_unix_ns: int
    event: Event | None
    """None where this version does not know the event's type."""


def encode_event(
    event: Event, *, step: int, attempt: int, time_unix_ns: int, monotonic_ns: int
) -> list[list[Value]]:
    """Return the event's rows (values in the order of EVENT_SCHEMA); a long event takes several."""
    payload = _EVENT_ENCODER.encode(event)
    num = max(1, -(-len(payload) // EVENT_PAYLOAD_BYTES))
    size = EVENT_PAYLOAD_BYTES
    return [
        [
            step,
            attempt,
            time_unix_ns,
            monotonic_ns,
            part,
            num,
            len(payload),
            payload[part * size : part * size + size],
        ]
        for part in range(num)
    ]


def decode_events(schema: Schema, raw: bytes) -> Iterator[EventRow]:
    """Yield the events in consecutive rows; one whose rows are not all there is passed over.

    A batch always ends at the end of an event (see ``wire``), so passing over means a torn tail.
    """
    pending = b""
    expected = 0
    for start in range(0, len(raw), schema.row_size):
        row = memoryview(raw)[start : start + schema.row_size]
        seq = schema.seq_of(row)
        fields = schema.unpack(row)
        part, num, length = (_whole(fields, name) for name in ("part", "num_parts", "length"))
        if part != expected:
            pending, expected = b"", 0
            if part != 0:
                continue
        payload = fields.get("payload")
        rest = min(length - part * EVENT_PAYLOAD_BYTES, EVENT_PAYLOAD_BYTES)
        pending += (payload if isinstance(payload, bytes) else b"")[:rest].ljust(rest, b"\0")
        expected = part + 1
        if expected < num:
            continue
        yield _event_row(seq or 0, fields, pending)
        pending, expected = b"", 0


def _event_row(seq: int, fields: dict[str, Value], payload: bytes) -> EventRow:
    try:
        event: Event | None = _EVENT_DECODER.decode(payload)
    except msgspec.DecodeError:
        event = None
    return EventRow(
        seq=seq,
        step=_whole(fields, "step"),
        attempt=_whole(fields, "attempt"),
        time_unix_ns=_whole(fields, "time_unix_ns"),
        event=event,
    )


def _whole(fields: dict[str, Value], name: str) -> int:
    """The column's value, 0 where a foreign writer left it out: no ingest may fail by it."""
    value = fields.get(name)
    return value if isinstance(value, int) else 0
