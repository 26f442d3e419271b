"""Knows by checksums whether what is stored still is what was written, and tells of what is not.

A database gives back what its disk gives it. Each body has a CRC-32 beside it, made where it is
written and held against it where it is decoded. What fails is treated as rows that are not there:
the rest of the run is answered, and nobody is given a wrong number. Where there is no checksum, the
row was written before there were any.
"""

import hashlib
import logging
import threading
import zlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from vitals_collector.storage.columns import ColumnChunk

_LOG = logging.getLogger("vitals.collector.store")
_OPTION = "vitals_damage"
_MAX_TOLD = 4_096


class Damage:
    """Counts what was damaged when it was read, and logs it: each piece once."""

    def __init__(self) -> None:
        self.num = 0
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def options(self) -> dict[str, Any]:
        """Return the options of an engine whose readers tell of damage here."""
        return {_OPTION: self}

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
    damage: Damage | None = connection.get_execution_options().get(_OPTION)
    if damage is not None:
        damage.tell(text)


def is_whole(crc: int | None, body: bytes) -> bool:
    """Return whether rows are what was written."""
    return crc is None or crc == zlib.crc32(body)


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
    "as_rows",
    "body_crc",
    "head_crc",
    "is_schema_whole",
    "is_whole",
    "tell_damage",
]
