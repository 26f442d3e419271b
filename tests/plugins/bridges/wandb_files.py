"""Files as wandb writes them."""

import json
import struct
import zlib

from vitals_plugins.bridges.importers.wandb_file import (
    BLOCK,
    FIRST,
    FRAME,
    FULL,
    HEAD,
    LAST,
    MIDDLE,
)


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def call(values: dict[str, object], *, step: int | None = None) -> bytes:
    """Return the record of one ``wandb.log``."""
    items = b""
    for name, value in values.items():
        said = json.dumps(value).encode()
        items += field(1, field(2, name.encode()) + field(16, said))
    items += b"" if step is None else field(2, field(1, step))
    return field(1, 7) + field(2, items)


def framed(records: list[bytes]) -> bytes:
    """Return a file of these records, cut into blocks as LevelDB cuts them."""
    out = bytearray(HEAD)
    for record in records:
        at, is_first = 0, True
        while is_first or at < len(record):
            left = BLOCK - len(out) % BLOCK
            if left < FRAME.size:
                out += bytes(left)
                left = BLOCK
            piece = record[at : at + left - FRAME.size]
            at += len(piece)
            kind = {(1, 1): FULL, (1, 0): FIRST, (0, 1): LAST, (0, 0): MIDDLE}[
                is_first, at >= len(record)
            ]
            is_first = False
            checksum = zlib.crc32(bytes([kind]) + piece)
            out += FRAME.pack(checksum, len(piece), kind) + piece
    return bytes(out)
