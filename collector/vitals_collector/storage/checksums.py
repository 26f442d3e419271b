"""Knows by checksums whether what is stored still is what was written, and tells of what is not.

A database gives back what its disk gives it. Each body has a CRC-32 beside it, made where it is
written and held against it where it is decoded. What fails is treated as rows that are not there:
the rest of the run is answered, and nobody is given a wrong number.
"""

import logging
import threading
import zlib

from sqlalchemy import LargeBinary, TypeDecorator
from sqlalchemy.engine.interfaces import Dialect

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
        _LOG.error("%s is damaged: it is left out; `vitals store check` says more", text)


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


__all__ = ["Damage", "Record", "is_record_whole"]
