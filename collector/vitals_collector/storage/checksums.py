"""Knows by checksums whether what is stored still is what was written, and tells of what is not.

A database gives back what its disk gives it. Each body has a CRC-32 beside it, made where it is
written and held against it where it is decoded. What fails is treated as rows that are not there:
the rest of the run is answered, and nobody is given a wrong number.
"""

import hashlib
import logging
import threading
import zlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, LargeBinary, TypeDecorator
from sqlalchemy.engine.interfaces import Dialect

from vitals_collector.storage.columns import ColumnChunk

_LOG = logging.getLogger("vitals.collector.store")
_NAME = "vitals_damage"
_CRC_BYTES = 4
_MAX_TOLD = 4_096


class Damage:
    """Counts what was damaged when it was read, and logs it: each piece once."""

    def __init__(self) -> None:
        self.num = 0
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def be_told(self, dialect: Dialect) -> None:
        """Have whoever reads with this engine's dialect tell of damage here."""
        setattr(dialect, _NAME, self)

    def tell(self, text: str) -> None:
        """Count a damaged piece, unless it was told before."""
        with self._lock:
            if text in self._told:
                return
            if len(self._told) >= _MAX_TOLD:
                self._told.clear()
            self._told.add(text)
            self.num += 1
        _LOG.error("%s is damaged: its rows are left out; `vitals store check` lists all", text)


def tell_damage(connection: Connection, text: str) -> None:
    """Count and log, once, that a piece of the store is damaged."""
    _tell(connection.dialect, text)


def _tell(dialect: Dialect, text: str) -> None:
    damage: Damage | None = getattr(dialect, _NAME, None)
    if damage is not None:
        damage.tell(text)


class Record(TypeDecorator[bytes]):
    """The body of one record, which lies behind its checksum; a damaged one reads as empty."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the bytes to store."""
        return zlib.crc32(value).to_bytes(_CRC_BYTES, "big") + value if value else value

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the body; empty where it is damaged, which is told."""
        if not value:
            return value
        if not is_record_whole(value):
            _tell(dialect, f"a record ({value[:_CRC_BYTES].hex()})")
            return b""
        return value[_CRC_BYTES:]


def is_record_whole(stored: bytes) -> bool:
    """Return whether a record's body is the one that its checksum was made of."""
    return zlib.crc32(stored[_CRC_BYTES:]).to_bytes(_CRC_BYTES, "big") == stored[:_CRC_BYTES]


def is_whole(crc: int | None, body: bytes) -> bool:
    """Return whether rows are what was written."""
    return crc == zlib.crc32(body)


def is_schema_whole(digest: str, body: bytes) -> bool:
    """Return whether a schema is the one that was stored under its digest."""
    return hashlib.sha256(body).hexdigest() == digest


def head_crc(name: str, summary: bytes, marks: bytes) -> int:
    """Return the checksum of what an overview reads of a column."""
    return zlib.crc32(marks, zlib.crc32(summary, zlib.crc32(name.encode())))


def body_crc(chunk: ColumnChunk) -> int:
    """Return the checksum of all that makes a column's values."""
    about = f"{chunk.name}\0{chunk.kind}\0{chunk.encoding}\0{chunk.base}"
    return zlib.crc32(chunk.body, zlib.crc32(chunk.valid, zlib.crc32(about.encode())))


def as_rows(batch_id: int, chunks: Sequence[ColumnChunk]) -> list[dict[str, Any]]:
    """Return the columns of a batch as rows of ``batch_columns``."""
    return [
        {
            "batch_id": batch_id,
            "head_crc": head_crc(chunk.name, chunk.summary, chunk.marks),
            "body_crc": body_crc(chunk),
            **chunk._asdict(),
        }
        for chunk in chunks
    ]


__all__ = [
    "Damage",
    "Record",
    "as_rows",
    "body_crc",
    "head_crc",
    "is_record_whole",
    "is_schema_whole",
    "is_whole",
    "tell_damage",
]
