"""Turns rows into columns and back, bit for bit, in the form that ``batch_columns`` keeps.

Nothing is compressed: numpy reads and writes each form at memory speed. A column lies as the
smallest of: one constant, a progression (steps), the differences of neighbours as narrow integers
(times, counters), float32 where no value loses a bit by it, or the values as they are. Where some
rows lack it, only the measured values lie there, beside one bit for each row. A column that no row
has is left out; what was not measured reads as zero.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.rows import Schema, column_of

SEQ = ""
"""Name under which the sequence numbers lie, where they do not count up by one."""
SUMMED_ROWS = 256
"""Values that one entry of a summary stands for."""
SUMMARY = np.dtype(
    [
        ("num", "<u4"),
        ("num_nonfinite", "<u4"),
        ("low", "<f8"),
        ("high", "<f8"),
        ("low_step", "<i8"),
        ("high_step", "<i8"),
        ("low_time", "<i8"),
        ("high_time", "<i8"),
    ]
)
"""The least and the greatest of some values, the first of each, and where and when they were."""

MARK = np.dtype([("step", "<i8"), ("time", "<i8"), ("value", "<f8")])
"""One value, kept beside the summary: the first, the last, or one that is not finite."""
_MAX_MARKS = 256

_KEYED = ("layers", "scalars", "process", "events")
"""Streams with several series in one column: a summary of it would mix them."""
_PLAIN = frozenset(column.name for column in ROW_COLUMNS)
_NARROW = ("i1", "i2", "i4")

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.generic]


class ColumnChunk(NamedTuple):
    """One column of consecutive rows, as it is stored."""

    name: str
    kind: str
    encoding: str
    """``constant``, ``progression``, ``i1`` to ``i8`` (differences), ``f4``, ``f8`` or ``S``."""
    base: int
    """The first value of an integer column; else 0."""
    summary: bytes
    """Entries of SUMMARY; empty where rows are to be read instead."""
    marks: bytes
    """With a summary: the first value, those not finite and the last, as MARK; empty where they
    are too many, so that rows are to be read."""
    valid: bytes
    """A bit for each row, little-endian; empty where every row has the column."""
    body: bytes


# ------------------------------------------------------------------------------------ writing


def encode_rows(schema: Schema, rows: npt.NDArray[np.void]) -> list[ColumnChunk]:
    """Return the rows' columns, those that at least one row has."""
    seqs = rows["seq"].astype(np.int64)
    steps, times = (whole(schema, rows, name) for name in ("step", "time_unix_ns"))
    is_summed = _is_one_curve(schema, rows)
    chunks = []
    if len(seqs) and not np.array_equal(seqs, seqs[0] + np.arange(len(seqs))):
        chunks.append(_encode(SEQ, "i8", seqs, None))
    for column in schema.columns:
        values, valid = column_of(schema, rows, column.name)
        if not valid.any():
            continue
        mask = None if valid.all() else valid
        values = np.ascontiguousarray(values) if mask is None else values[mask]
        chunk = _encode(column.name, column.kind, values, mask)
        if is_summed and column.name not in _PLAIN and values.dtype.kind != "S":
            at, when = (steps, times) if mask is None else (steps[mask], times[mask])
            summary, marks = summarize(values, at, when), mark(values, at, when)
            chunk = chunk._replace(summary=summary, marks=marks)
        chunks.append(chunk)
    return chunks


def _is_one_curve(schema: Schema, rows: npt.NDArray[np.void]) -> bool:
    """Return whether neighbours in a column are neighbours on its chart."""
    if schema.stream in _KEYED or not len(rows):
        return False
    if schema.stream != "steps":
        return True
    steps, attempts = (whole(schema, rows, name) for name in ("step", "attempt"))
    return bool(np.all(steps[1:] > steps[:-1]) and np.all(attempts == attempts[0]))


def whole(schema: Schema, rows: npt.NDArray[np.void], name: str) -> Ints:
    """Return a column that every row has, such as its step."""
    return column_of(schema, rows, name)[0].astype(np.int64, copy=False)


def _encode(name: str, kind: str, values: Values, mask: Mask | None) -> ColumnChunk:
    valid = b"" if mask is None else np.packbits(mask, bitorder="little").tobytes()
    if kind == "i8":
        encoding, base, body = _encode_ints(values.astype(np.int64, copy=False))
    elif kind == "f8":
        encoding, base, body = _encode_floats(values.astype(np.float64, copy=False))
    else:
        is_constant = bool(np.all(values == values[0]))
        encoding, base = ("constant" if is_constant else "S"), 0
        body = (values[:1] if is_constant else values).tobytes()
    return ColumnChunk(name, kind, encoding, base, b"", b"", valid, body)


def _encode_ints(values: Ints) -> tuple[str, int, bytes]:
    first = int(values[0])
    differences = np.diff(values)  # what does not fit wraps around, and back again
    if not differences.any():
        return "constant", first, b""
    low, high = int(differences.min()), int(differences.max())
    if low == high:
        return "progression", first, differences[:1].tobytes()
    for code in _NARROW:
        about = np.iinfo(code)
        if about.min <= low and high <= about.max:
            return code, first, differences.astype("<" + code).tobytes()
    return "i8", first, differences.tobytes()


def _encode_floats(values: npt.NDArray[np.float64]) -> tuple[str, int, bytes]:
    bits = values.view(np.int64)  # NaN is not equal to itself, and -0.0 is to 0.0
    if np.all(bits == bits[0]):
        return "constant", 0, values[:1].tobytes()
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
        is_kept = np.array_equal(narrow.astype(np.float64).view(np.int64), bits)
    return ("f4", 0, narrow.tobytes()) if is_kept else ("f8", 0, values.tobytes())


def summarize(values: Values, steps: Ints, times: Ints) -> bytes:
    """Return the summary of a column's measured values."""
    num = -(-len(values) // SUMMED_ROWS)
    numbers = np.full(num * SUMMED_ROWS, np.nan)
    numbers[: len(values)] = values
    by_entry = numbers.reshape(num, SUMMED_ROWS)
    is_finite = np.isfinite(by_entry)
    entries = np.zeros(num, dtype=SUMMARY)
    entries["num"] = SUMMED_ROWS
    entries["num"][-1:] = len(values) - (num - 1) * SUMMED_ROWS
    entries["num_nonfinite"] = entries["num"] - is_finite.sum(axis=1)
    starts = np.arange(num) * SUMMED_ROWS
    lows = starts + np.where(is_finite, by_entry, np.inf).argmin(axis=1)
    highs = starts + np.where(is_finite, by_entry, -np.inf).argmax(axis=1)
    for which, at in (("low", lows), ("high", highs)):
        entries[which] = numbers[at]
        entries[f"{which}_step"] = steps[at]
        entries[f"{which}_time"] = times[at]
    return entries.tobytes()


def mark(values: Values, steps: Ints, times: Ints) -> bytes:
    """Return the values of a column that a summary cannot give back."""
    numbers = values.astype(np.float64, copy=False)
    is_marked = ~np.isfinite(numbers)
    is_marked[:1] = is_marked[-1:] = True
    which = np.flatnonzero(is_marked)
    if len(which) > _MAX_MARKS:
        return b""
    marks = np.empty(len(which), dtype=MARK)
    marks["step"], marks["time"], marks["value"] = steps[which], times[which], numbers[which]
    return marks.tobytes()


# ------------------------------------------------------------------------------------ reading


def decode_valid(chunk: ColumnChunk, num_rows: int) -> Mask | None:
    """Return which of the rows have the column; None where all have it."""
    if not chunk.valid:
        return None
    packed = np.frombuffer(chunk.valid, dtype=np.uint8)
    return np.unpackbits(packed, count=num_rows, bitorder="little").astype(np.bool_)


def decode_values(chunk: ColumnChunk, num: int) -> Values:
    """Return the ``num`` measured values of the column.

    Raises:
        FormatError: a form that this version does not know.
    """
    encoding, body = chunk.encoding, chunk.body
    if encoding in ("f4", "f8"):
        return np.frombuffer(body, dtype="<" + encoding).astype(np.float64)
    if encoding == "S":
        return np.frombuffer(body, dtype=chunk.kind)
    if encoding == "constant":
        if chunk.kind == "i8":
            return np.full(num, chunk.base, dtype=np.int64)
        dtype = chunk.kind if chunk.kind.startswith("S") else "<f8"
        constant: Values = np.frombuffer(body, dtype=dtype)
        same: Values = np.repeat(constant, num)
        return same
    if encoding == "progression":
        rising: Ints = np.arange(num, dtype=np.int64) * np.frombuffer(body, dtype="<i8")
        rising += chunk.base
        return rising
    if encoding not in (*_NARROW, "i8"):
        raise FormatError(
            f"column {chunk.name!r} is stored as {encoding!r}; this version of Vitals cannot read "
            "it",
            hint="upgrade this program: pip install -U trainvitals",
        )
    values = np.empty(num, dtype=np.int64)
    values[0] = chunk.base
    values[1:] = np.frombuffer(body, dtype="<" + encoding)
    np.cumsum(values, out=values)
    return values


def without_values(chunk: ColumnChunk) -> ColumnChunk:
    """Return the column as one of numbers of which no row has one."""
    return chunk._replace(encoding="f8", base=0, summary=b"", marks=b"", valid=b"\0", body=b"")


def decode_rows(
    schema: Schema,
    chunks: Iterable[ColumnChunk],
    first_seq: int,
    num_rows: int,
    which: npt.NDArray[np.intp] | None = None,
) -> npt.NDArray[np.void]:
    """Return rows as ``schema.dtype``, all or some; their checksums are zero."""
    rows = np.zeros(num_rows if which is None else len(which), dtype=schema.dtype)
    seqs = first_seq + np.arange(num_rows)
    rows["seq"] = seqs if which is None else seqs[which]
    for chunk, values, valid in decode_columns(chunks, num_rows):
        if which is not None:
            values, valid = values[which], None if valid is None else valid[which]
        if chunk.name == SEQ:
            rows["seq"] = values
            continue
        i = schema.index[chunk.name]
        rows[f"c{i}"] = values
        bit = np.uint64(1 << (i % 64))
        rows["validity"][:, i // 64] |= bit if valid is None else bit * valid
    return rows


def decode_columns(
    chunks: Iterable[ColumnChunk], num_rows: int
) -> Iterator[tuple[ColumnChunk, Values, Mask | None]]:
    """Yield each column's values for all rows, zero where it was not measured, and its mask."""
    for chunk in chunks:
        mask = decode_valid(chunk, num_rows)
        if mask is None:
            yield chunk, decode_values(chunk, num_rows), None
            continue
        measured = decode_values(chunk, int(np.count_nonzero(mask)))
        values = np.zeros(num_rows, dtype=measured.dtype)
        values[mask] = measured
        yield chunk, values, mask


__all__ = [
    "MARK",
    "SEQ",
    "SUMMARY",
    "SUMMED_ROWS",
    "ColumnChunk",
    "Values",
    "decode_columns",
    "decode_rows",
    "decode_valid",
    "decode_values",
    "encode_rows",
    "mark",
    "summarize",
    "whole",
    "without_values",
]
