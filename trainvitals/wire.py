"""How rows travel: one batch of one source and stream, the same bytes in the spool and over HTTP.

    magic 4 | header length u32 | body length u32 | crc32 of header and body u32 | header | body

The header is msgpack (who, which stream, which columns, which sequence numbers), the body is rows
as they lay in the journal. A batch holds consecutive sequence numbers and ends at the end of an
event. A reader that meets unknown header fields or columns keeps going; a newer format version is
an error of its own.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from trainvitals.errors import FormatError, NewerVersionError, UsageError
from trainvitals.identity import Identity
from trainvitals.rows import FORMAT_VERSION, Schema

MAGIC = b"TVB1"
PREFIX = struct.Struct("<4sIII")
MAX_HEADER_BYTES = 65_536
MAX_BODY_BYTES = 4 << 20


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch says of itself. ``dropped`` counts rows lost before it, by the writer's word."""

    version: int = FORMAT_VERSION
    identity: Identity
    stream_schema: Schema
    first_seq: int
    num_rows: int
    dropped: int = 0
    clock_offset_ns: int = 0

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.stream_schema.stream

    @property
    def last_seq(self) -> int:
        """Sequence number of the last row."""
        return self.first_seq + self.num_rows - 1


class Batch(msgspec.Struct, frozen=True):
    """A decoded batch: header and the rows' bytes."""

    header: BatchHeader
    rows: bytes


class IngestReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a stored batch. A spool frees only what lies at or below ``durable_seq``."""

    durable_seq: int
    num_new: int
    num_duplicate: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(BatchHeader)


def encode_batch(header: BatchHeader, rows: bytes) -> bytes:
    """Return the batch's bytes.

    Raises:
        FormatError: the rows do not match the header, or are more than MAX_BODY_BYTES.
    """
    _check(header, len(rows))
    head = _ENCODER.encode(header)
    crc = zlib.crc32(rows, zlib.crc32(head))
    return PREFIX.pack(MAGIC, len(head), len(rows), crc) + head + rows


def batch_size(prefix: bytes) -> int:
    """Return the whole batch's length from its first ``PREFIX.size`` bytes.

    Raises:
        FormatError: these are not the first bytes of a batch, or it claims to be too large.
    """
    if len(prefix) < PREFIX.size:
        raise FormatError(f"a batch begins with {PREFIX.size} bytes; there are {len(prefix)}")
    magic, head, body, _ = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise FormatError(f"a batch begins with {MAGIC!r}; these bytes begin with {magic!r}")
    if head > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise FormatError(f"batch claims a header of {head} and a body of {body} bytes; too large")
    return PREFIX.size + int(head) + int(body)


def decode_batch(raw: bytes) -> Batch:
    """Return the batch, verified.

    Raises:
        FormatError: torn, damaged, or inconsistent with its own header.
        NewerVersionError: written by a newer format.
    """
    size = batch_size(raw)
    if len(raw) != size:
        raise FormatError(f"batch claims {size} bytes and has {len(raw)}")
    _, head_size, _, crc = PREFIX.unpack_from(raw)
    if zlib.crc32(memoryview(raw)[PREFIX.size :]) != crc:
        raise FormatError("the batch's checksum does not hold")
    version_raw = raw[PREFIX.size : PREFIX.size + head_size]
    _refuse_newer(version_raw)
    try:
        header = _DECODER.decode(version_raw)
    except msgspec.DecodeError as error:
        raise FormatError(f"the batch's header cannot be read: {error}") from error
    rows = raw[PREFIX.size + head_size :]
    _check(header, len(rows))
    return Batch(header, rows)


class _Version(msgspec.Struct):
    version: int = 0


def _refuse_newer(head: bytes) -> None:
    try:
        version = msgspec.msgpack.decode(head, type=_Version).version
    except msgspec.DecodeError as error:
        raise FormatError(f"the batch's header cannot be read: {error}") from error
    if version > FORMAT_VERSION:
        raise NewerVersionError(
            f"batch has format version {version}; this Vitals reads up to {FORMAT_VERSION}",
            hint="upgrade this program: pip install -U trainvitals",
        )


def _check(header: BatchHeader, num_bytes: int) -> None:
    try:
        header.identity.check()
    except UsageError as error:
        raise FormatError(f"the batch's identity is malformed: {error.text}") from error
    schema = header.stream_schema.check()
    if num_bytes > MAX_BODY_BYTES:
        raise FormatError(f"{num_bytes} bytes of rows; a batch holds at most {MAX_BODY_BYTES}")
    if header.num_rows < 1 or header.first_seq < 0 or header.dropped < 0:
        raise FormatError("a batch has at least one row and no negative counts")
    if header.num_rows * schema.row_size != num_bytes:
        raise FormatError(
            f"{header.num_rows} rows of {schema.row_size} bytes are not {num_bytes} bytes"
        )
