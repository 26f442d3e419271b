"""Parses protobuf messages by the numbers of their fields (protobuf.dev, "Encoding")."""

import struct
from collections.abc import Iterator

from trainvitals.errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63


def read_fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of a protobuf message's fields: bytes, or the bits of a number.

    Raises:
        FormatError: the bytes are not a message.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        size = 8
        if kind == BYTES:
            size, at = _read_varint(message, at)
        elif kind == FIXED32:
            size = 4
        elif kind != FIXED64:
            raise FormatError(
                f"byte {at} of a message: a field of kind {kind}, which does not exist"
            )
        if at + size > end:
            raise FormatError(f"byte {at} of a message: {size} bytes, of which {end - at} are left")
        part = message[at : at + size]
        at += size
        yield key >> 3, part if kind == BYTES else int.from_bytes(part, "little")


def encode_varint(number: int) -> bytes:
    """Return a number of at least 0 as a protobuf varint."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def decode_int64(value: int) -> int:
    """Return the number of a protobuf varint that is an ``int64``."""
    return value - (1 << 64) if value >> 63 else value


def decode_sint64(value: int) -> int:
    """Return the number of a protobuf varint that is a ``sint64``."""
    return (value >> 1) ^ -(value & 1)


def decode_double(bits: int) -> float:
    """Return the number of a ``fixed64`` that is a ``decode_double``."""
    (number,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    assert isinstance(number, float)
    return number


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return a protobuf varint at ``at`` as a number, and the position after it."""
    value = shift = 0
    while at < len(message) and shift <= _MAX_SHIFT:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise FormatError(f"byte {at} of a message: an unterminated number")
