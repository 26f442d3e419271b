"""Transport format: one batch of one stream, the same bytes in the spool and over HTTP.

    magic 4 | crc32 u32 | header length u32 | body length u32 | num_rows u32 |
    first_seq i64 | dropped i64 | clock_offset_ns i64 | header | body

``crc32`` covers everything after itself. The header is msgpack (identity, stream, columns): the
same bytes in all batches of one writer's stream, so a reader decodes and checks it once. The body
is rows as in the journal. A batch holds consecutive sequence numbers and ends at the end of an
event. A reader ignores unknown header fields and columns; a later format version is a separate
error. Batches that are sent together are concatenated.
"""

import struct
import zlib
from functools import lru_cache

import msgspec

from trainvitals.errors import UNREADABLE, DamagedBatchError, FormatError, UsageError
from trainvitals.identity import Identity
from trainvitals.rows import FORMAT_VERSION, Schema, refuse_newer_version

MAGIC = b"TVB2"
PREFIX = struct.Struct("<4sIIIIqqq")
CRC_FROM = 8
"""The checksum covers a batch from this byte on."""
MAX_HEADER_BYTES = 65_536
MAX_BODY_BYTES = 4 << 20
MAX_BATCHES = 4_096
"""Batches that may travel together."""
ASK_HEADER = "Vitals-Holes"
"""Header of a request: with ``ask`` the reply to a batch after a hole is the start of the hole."""
WRITER_KEY_HEADER = "Vitals-Writer-Key"
"""A request's header: secret of the agent that sends the batches, in hexadecimal digits. The first
batch of each incarnation sets the key of the later ones."""
OWNER_HEADER = "Vitals-Owner"
"""Header of a response: URL of the collector that owns the run."""
OWNED_ELSEWHERE = 421
"""Status of that response: "misdirected request"."""
REMEMBERED_BYTES = 2_048
"""Headers up to this size are remembered once they were decoded."""
_SCHEMA_BYTES = 4_096
"""So are schemas: there are few, and batches of one schema are processed together."""
_EVENTS, _HEAD_BYTES = b"\xa6events", 1_024
"""The msgpack bytes of that stream's name in a header, and where to search for them."""


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Header of a batch. ``dropped`` counts rows lost before it, as reported by the writer."""

    version: int = FORMAT_VERSION
    identity: Identity
    stream_schema: Schema
    first_seq: int
    num_rows: int
    dropped: int = 0
    clock_offset_ns: int = 0

    @property
    def stream(self) -> str:
        """Return the name of the stream whose rows the batch holds."""
        return self.stream_schema.stream

    @property
    def last_seq(self) -> int:
        """Return the sequence number of the last row in the batch."""
        return self.first_seq + self.num_rows - 1


class Batch(msgspec.Struct, frozen=True, gc=False):
    """A decoded batch: header and the rows' bytes."""

    header: BatchHeader
    rows: bytes


class ResendableBatch(Batch, frozen=True, gc=False):
    """A batch whose sender prefers to fill a hole before it, instead of counting it as lost."""


class IngestReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Reply to one batch. A spool frees only batches at or below ``durable_seq``.

    A refused batch among accepted ones has the error's code and text. A batch that was sent with
    ``ASK_HEADER`` and starts after a hole is not stored: ``from_seq`` is the start of the hole. Its
    sender sends what it still has of the hole, then the batch without that header.
    """

    durable_seq: int
    num_new: int
    num_duplicate: int
    code: str = ""
    text: str = ""
    from_seq: int = -1


class _WriterHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the header that all batches of one writer's stream share."""

    version: int = FORMAT_VERSION
    identity: Identity
    stream_schema: msgspec.Raw


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_WriterHeader)


def encode_batch(header: BatchHeader, rows: bytes) -> bytes:
    """Return the batch's bytes.

    Raises:
        FormatError: the rows do not match the header, or are more than MAX_BODY_BYTES.
    """
    head = _encode_writer(header.version, header.identity, header.stream_schema)
    _check_batch_numbers(header, len(rows))
    return frame_batch(header, head, rows)


@lru_cache(maxsize=256)
def _encode_writer(version: int, identity: Identity, schema: Schema) -> bytes:
    """Return the header's bytes in the batch format, once for all batches of a writer's stream."""
    _check_writer(identity, schema)
    return _ENCODER.encode({"version": version, "identity": identity, "stream_schema": schema})


def frame_batch(header: BatchHeader, head: bytes, rows: bytes) -> bytes:
    """Frame header bytes and rows in the batch format, with a checksum; check nothing else."""
    prefix = PREFIX.pack(
        MAGIC,
        0,
        len(head),
        len(rows),
        header.num_rows,
        header.first_seq,
        header.dropped,
        header.clock_offset_ns,
    )[CRC_FROM:]
    crc = zlib.crc32(rows, zlib.crc32(head, zlib.crc32(prefix)))
    return b"".join((MAGIC, crc.to_bytes(4, "little"), prefix, head, rows))


def batch_size(raw: bytes, start: int = 0) -> int:
    """Return the length of the encoded batch at ``start``, from its first ``PREFIX.size`` bytes.

    Raises:
        FormatError: these are not the first bytes of a batch, or it claims to be too large.
    """
    magic, _, head, body, *_ = _prefix_at(raw, start)
    return _check_batch_size(magic, head, body)


def _prefix_at(raw: bytes, start: int) -> tuple[bytes, int, int, int, int, int, int, int]:
    """Return the fields with which each encoded batch starts."""
    if len(raw) - start < PREFIX.size:
        text = f"a batch begins with {PREFIX.size} bytes; there are {len(raw) - start}"
        raise FormatError(text)
    return PREFIX.unpack_from(raw, start)


def _check_batch_size(magic: bytes, head: int, body: int) -> int:
    """Return the length that the prefix of an encoded batch claims; refuse one too large."""
    if magic != MAGIC:
        raise FormatError(f"a batch begins with {MAGIC!r}; these bytes begin with {magic!r}")
    if head > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise FormatError(f"batch claims a header of {head} and a body of {body} bytes; too large")
    return PREFIX.size + head + body


def is_intact_batch(raw: bytes) -> bool:
    """Return whether bytes are exactly one batch in the format of rows, with a right checksum."""
    crc = int.from_bytes(raw[4:CRC_FROM], "little")
    return len(raw) == batch_size(raw) and crc == zlib.crc32(memoryview(raw)[CRC_FROM:])


def is_of_events(raw: bytes) -> bool:
    """Return whether encoded rows seem to be event records, by their bytes; not verified."""
    return raw.find(_EVENTS, 0, _HEAD_BYTES) >= 0


def split_batches(raw: bytes) -> list[bytes]:
    """Split encoded rows into the batches of their format; checksums are not verified.

    Raises:
        FormatError: there is none, there are more than MAX_BATCHES, or one is truncated.
    """
    batches: list[bytes] = []
    start = 0
    while start < len(raw) or not batches:
        size = batch_size(raw, start)
        if start + size > len(raw):
            raise DamagedBatchError(f"batch claims {size} bytes and has {len(raw) - start}")
        if len(batches) == MAX_BATCHES:
            raise FormatError(f"more than {MAX_BATCHES} batches at once")
        batches.append(raw[start : start + size])
        start += size
    return batches


def decode_batch(raw: bytes) -> Batch:
    """Decode a batch of rows from its format, and verify it.

    Raises:
        DamagedBatchError: torn or damaged.
        FormatError: inconsistent with its header.
        NewerVersionError: written by a newer format.
    """
    magic, crc, head_size, body, num_rows, first_seq, dropped, offset = _prefix_at(raw, 0)
    size = _check_batch_size(magic, head_size, body)
    if len(raw) != size:
        raise DamagedBatchError(f"batch claims {size} bytes and has {len(raw)}")
    if crc != zlib.crc32(memoryview(raw)[CRC_FROM:]):
        raise DamagedBatchError("the batch's checksum does not match")
    end = PREFIX.size + head_size
    head = raw[PREFIX.size : end]
    # Long headers are not cached: the cache must stay small.
    version, identity, schema = (
        _decode_writer(head) if head_size <= REMEMBERED_BYTES else _decode_writer.__wrapped__(head)
    )
    header = BatchHeader(
        version=version,
        identity=identity,
        stream_schema=schema,
        first_seq=first_seq,
        num_rows=num_rows,
        dropped=dropped,
        clock_offset_ns=offset,
    )
    rows = raw[end:]
    _check_batch_numbers(header, len(rows))
    return Batch(header, rows)


@lru_cache(maxsize=16_384)
def _decode_writer(head: bytes) -> tuple[int, Identity, Schema]:
    """Return format version, writer and schema of rows from the header of an encoded batch."""
    _refuse_newer(head)
    try:
        writer = _DECODER.decode(head)
        raw = bytes(writer.stream_schema)
        schema = (
            _decode_schema(raw) if len(raw) <= _SCHEMA_BYTES else _decode_schema.__wrapped__(raw)
        )
    except UNREADABLE as error:
        raise FormatError(f"the batch's header cannot be read: {error}") from error
    _check_writer(writer.identity, schema)
    return writer.version, writer.identity, schema


@lru_cache(maxsize=256)
def _decode_schema(raw: bytes) -> Schema:
    """Return the schema of encoded rows: one object for all writers with these columns."""
    return msgspec.msgpack.decode(raw, type=Schema)


class _Version(msgspec.Struct):
    version: int = 0


def _refuse_newer(head: bytes) -> None:
    """Refuse an encoded batch of a later format version: raise NewerVersionError."""
    try:
        version = msgspec.msgpack.decode(head, type=_Version).version
    except UNREADABLE as error:
        raise FormatError(f"the batch's header cannot be read: {error}") from error
    refuse_newer_version(version, "batch")


def _check_writer(identity: Identity, schema: Schema) -> None:
    """Check the identity and the schema of the rows in an encoded batch."""
    try:
        identity.check()
    except UsageError as error:
        raise FormatError(f"the batch's identity is malformed: {error.text}") from error
    schema.check()


def _check_batch_numbers(header: BatchHeader, num_bytes: int) -> None:
    """Check that the numbers in an encoded batch's header match its rows."""
    if num_bytes > MAX_BODY_BYTES:
        raise FormatError(f"{num_bytes} bytes of rows; a batch holds at most {MAX_BODY_BYTES}")
    if header.num_rows < 1 or header.first_seq < 0 or header.dropped < 0:
        raise FormatError("a batch has at least one row and no negative counts")
    row_size = header.stream_schema.row_size
    if header.num_rows * row_size != num_bytes:
        raise FormatError(f"{header.num_rows} rows of {row_size} bytes are not {num_bytes} bytes")
