"""The row format: a rank writes, a disk stores, a wire carries and a store reads the same bytes.

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
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from trainvitals.errors import FormatError, NewerVersionError

FORMAT_VERSION = 1
"""Version of rows, segments and batches; raised only when an old reader would misread."""


def refuse_newer_version(version: int, name: object) -> None:
    """Refuse a file or batch that a later version wrote.

    Raises:
        NewerVersionError: its format version is above ``FORMAT_VERSION``.
    """
    if version > FORMAT_VERSION:
        raise NewerVersionError(
            f"{name} has format version {version}; this program reads up to {FORMAT_VERSION}",
            hint="upgrade this program: pip install -U trainvitals",
        )


STREAMS = ("steps", "layers", "scalars", "events", "gpu", "node", "process")
"""Streams a writer may open. Ranks write the first four, agents the events and the last three."""

MAX_COLUMNS = 512

Value = float | int | bytes | None


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One column: its name (for a metric, as in the catalog) and its type."""

    name: str
    kind: str

    @property
    def size(self) -> int:
        """Return the bytes of the column in a row."""
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
        """Check the columns of a stream's rows: return self if a row can be laid out.

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
        """Return how many 64-bit words of validity bits a row has."""
        return (len(self.columns) + 63) // 64

    @cached_property
    def row_size(self) -> int:
        """Return the bytes of a row."""
        return 16 + 8 * self.num_validity_words + sum(c.size for c in self.columns)

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the position of each column in a row, by name."""
        return {c.name: i for i, c in enumerate(self.columns)}

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Return numpy's structured type of a row, for ``np.frombuffer(rows, schema.dtype)``."""
        head = [("crc", "<u4"), ("zero", "<u4"), ("seq", "<i8")]
        valid = [("validity", "<u8", (self.num_validity_words,))]
        body = [
            (f"c{i}", c.kind if c.kind.startswith("S") else "<" + c.kind)
            for i, c in enumerate(self.columns)
        ]
        return np.dtype(head + valid + body)

    @cached_property
    def _struct_format(self) -> str:
        """Return the format of a row for ``struct``, after its checksum."""
        codes = {"f8": "d", "i8": "q"}
        columns = "".join(codes.get(c.kind) or f"{c.size}s" for c in self.columns)
        return f"Iq{self.num_validity_words}Q{columns}"

    @cached_property
    def pack(self) -> Callable[[int, Sequence[Value]], bytes]:
        """Return the function (seq, values) -> bytes of a row; ``None`` is a missing value.

        Takes one value per column, in order.
        """
        return _RowPacker(self).pack

    def seq_of(self, row: bytes | memoryview) -> int | None:
        """Return the row's sequence number, or None if its checksum is wrong."""
        if len(row) != self.row_size or zlib.crc32(row[4:]) != int.from_bytes(row[:4], "little"):
            return None
        return int(struct.unpack_from("<q", row, 8)[0])

    def unpack(self, row: bytes | memoryview) -> dict[str, Value]:
        """Return the row's valid columns by name. Does not verify the checksum."""
        parts = struct.unpack_from(f"<{self._struct_format}", row, 4)
        validity_words = parts[2 : 2 + self.num_validity_words]
        values = parts[2 + self.num_validity_words :]
        return {
            column.name: values[i]
            for i, column in enumerate(self.columns)
            if validity_words[i // 64] >> (i % 64) & 1
        }


class _RowPacker:
    """Packs rows of one schema in one call of ``struct``, without asking after each value.

    A row usually lacks the same columns as the row before it. So the gaps of the last row are
    filled, and ``struct`` itself refuses a ``None`` anywhere else: only then is the row searched.
    """

    __slots__ = ("_blank", "_gaps", "_num_words", "_pack")

    def __init__(self, schema: Schema) -> None:
        blanks: dict[str, Value] = {"f8": 0.0, "i8": 0}
        self._blank = [blanks.get(c.kind, b"") for c in schema.columns]
        self._num_words = schema.num_validity_words
        self._pack = struct.Struct(f"<{schema._struct_format}").pack
        self._gaps = self._gaps_of(self._blank)

    def pack(self, seq: int, values: Sequence[Value]) -> bytes:
        """Pack one row, with the last row's gaps if it has the same."""
        missing, gap_words = self._gaps
        filled = list(values)
        for i in missing:
            if filled[i] is not None:
                return self._pack_new_gaps(seq, values)
            filled[i] = self._blank[i]
        try:
            body = self._pack(0, seq, *gap_words, *filled)
        except struct.error:
            return self._pack_new_gaps(seq, values)
        return zlib.crc32(body).to_bytes(4, "little") + body

    def _pack_new_gaps(self, seq: int, values: Sequence[Value]) -> bytes:
        """Pack one row whose missing columns differ from the last row's."""
        gaps = self._gaps_of(values)
        filled = [blank if v is None else v for v, blank in zip(values, self._blank, strict=True)]
        body = self._pack(0, seq, *gaps[1], *filled)
        self._gaps = gaps
        return zlib.crc32(body).to_bytes(4, "little") + body

    def _gaps_of(self, values: Sequence[Value]) -> tuple[list[int], list[int]]:
        """Return the positions of missing values, and the corresponding validity words."""
        missing = [i for i, value in enumerate(values) if value is None]
        bits = (1 << len(self._blank)) - 1 - sum(1 << i for i in missing)
        gap_words = [(bits >> 64 * w) & 0xFFFFFFFFFFFFFFFF for w in range(self._num_words)]
        return missing, gap_words


def rows_of(schema: Schema, raw: bytes) -> npt.NDArray[np.void]:
    """Return the rows of a stream as a structured array without copying.

    Raises:
        FormatError: the length is not a whole number of rows.
    """
    if len(raw) % schema.row_size:
        raise FormatError(f"{len(raw)} bytes are not a whole number of {schema.row_size}-byte rows")
    return np.frombuffer(raw, dtype=schema.dtype)


def column_of(
    schema: Schema, rows: npt.NDArray[np.void], name: str
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """Return one column of rows: values, and which were measured; none if it does not exist."""
    i = schema.index.get(name)
    if i is None:
        return np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
    bit = np.uint64(1 << (i % 64))
    return rows[f"c{i}"], (rows["validity"][:, i // 64] & bit) != 0
