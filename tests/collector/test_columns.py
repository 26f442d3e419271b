import math
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.rows import Column, Schema, Value, column_of, rows_of
from vitals_collector.storage.columns import (
    MARK,
    SEQ,
    SUMMARY,
    SUMMED_ROWS,
    ColumnChunk,
    decode_columns,
    decode_rows,
    decode_values,
    encode_rows,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
BITS = st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0]
)
FLOATS = (
    BITS | st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e300])
)
VALUES: dict[str, st.SearchStrategy[Value]] = {
    "f8": FLOATS,
    "i8": INT64 | st.integers(-300, 300) | st.integers(-(2**33), 2**33),
    "S8": st.binary(max_size=8),
    "S16": st.sampled_from([b"", b"cpu", b"a\0b"]),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, npt.NDArray[np.void]]:
    """Draw any columns and any rows of them, in runs of equal, rising or free values."""
    stream = draw(st.sampled_from(["steps", "layers", "gpu"]))
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=70))
    columns = (*ROW_COLUMNS, *(Column(f"m{i}", kind) for i, kind in enumerate(kinds)))
    schema = Schema(stream, columns).check()
    num = draw(st.integers(1, 40))
    filled = [_draw_column(draw, column, num) for column in columns]
    first = draw(st.integers(0, 2**40))
    gap = draw(st.sampled_from([1, 1, 3]))
    packed = [schema.pack(first + i * gap, row) for i, row in enumerate(zip(*filled, strict=True))]
    return schema, rows_of(schema, b"".join(packed))


def _draw_column(draw: st.DrawFn, column: Column, num: int) -> list[Value]:
    how = draw(st.sampled_from(["same", "free", "some", "none", "rising"]))
    if column in ROW_COLUMNS:
        how = draw(st.sampled_from(["same", "free", "rising"]))
    if how == "rising" and column.kind == "i8":
        base, by = draw(st.integers(0, 2**61)), draw(st.integers(-(2**40), 2**40))
        return [base + i * by for i in range(num)]
    if how == "none":
        return [None] * num
    if how == "same":
        return [draw(VALUES[column.kind])] * num
    one = VALUES[column.kind] if how != "some" else st.none() | VALUES[column.kind]
    return draw(st.lists(one, min_size=num, max_size=num))


def _bytes_of(rows: npt.NDArray[np.void]) -> bytes:
    copy = rows.copy()
    copy["crc"] = 0
    return copy.tobytes()


@settings(max_examples=150, deadline=None)
@given(tables())
def test_rows_come_back_bit_for_bit(table: tuple[Schema, npt.NDArray[np.void]]):
    schema, rows = table
    chunks = encode_rows(schema, rows)
    back = decode_rows(schema, chunks, int(rows["seq"][0]), len(rows))
    assert _bytes_of(rows) == _bytes_of(back)
    which = np.arange(0, len(rows), 3)
    some = decode_rows(schema, chunks, int(rows["seq"][0]), len(rows), which)
    assert _bytes_of(rows[which]) == _bytes_of(some)


def rows_with(**columns: list[Value]) -> tuple[Schema, npt.NDArray[np.void]]:
    """Return step rows with these columns, one step and one second apart."""
    kinds = {
        name: "i8" if all(isinstance(v, int) for v in values) else "f8"
        for name, values in columns.items()
    }
    schema = Schema("steps", (*ROW_COLUMNS, *(Column(name, kind) for name, kind in kinds.items())))
    packed = [
        schema.pack(i, [i, 1, 1_000 * i, i, *row])
        for i, row in enumerate(zip(*columns.values(), strict=True))
    ]
    return schema, rows_of(schema, b"".join(packed))


def encoding_of(values: list[Value]) -> tuple[str, int]:
    """Return the form of a column with these values, and its bytes."""
    chunk = encode_rows(*rows_with(m=values))[-1]
    assert "m" == chunk.name
    return chunk.encoding, len(chunk.body)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([7, 7, 7, 7], ("constant", 0), id="equal"),
        pytest.param([7, 9, 11, 13], ("progression", 8), id="evenly"),
        pytest.param([7, 9, 12, 13], ("i1", 3), id="byte"),
        pytest.param([7, 900, 12, 13], ("i2", 6), id="two-bytes"),
        pytest.param([0, 2**31, 0, 13], ("i8", 24), id="eight-bytes"),
        pytest.param([0.5, 0.5, 0.5, 0.5], ("constant", 8), id="equal-floats"),
        pytest.param([0.5, 1.5, math.nan, -0.0], ("f4", 16), id="float32"),
        pytest.param([0.5, 1.5, 0.1, -0.0], ("f8", 32), id="float64"),
        pytest.param([0.0, -0.0, 0.0, 0.0], ("f4", 16), id="two-zeros"),
    ],
)
def test_a_column_lies_in_the_smallest_form_that_keeps_it(
    values: list[Value], expected: tuple[str, int]
):
    assert expected == encoding_of(values)


def test_what_no_row_has_takes_no_room_and_only_measured_values_are_kept():
    schema, rows = rows_with(loss=[1.5, None, 2.5, None], never=[None] * 4)
    chunks = {chunk.name: chunk for chunk in encode_rows(schema, rows)}
    assert "never" not in chunks
    assert (8, 1) == (len(chunks["loss"].body), len(chunks["loss"].valid))


def test_sequence_numbers_lie_there_only_where_rows_are_missing():
    schema, rows = rows_with(loss=[1.0, 2.0, 3.0])
    assert SEQ not in [chunk.name for chunk in encode_rows(schema, rows)]
    assert SEQ in [chunk.name for chunk in encode_rows(schema, rows[[0, 2]])]


def test_a_summary_names_extremes_with_their_step_and_counts_what_is_not_finite():
    values: list[Value] = [float(i % 7) for i in range(SUMMED_ROWS + 3)]
    values[100], values[200], values[SUMMED_ROWS] = 50.0, -50.0, math.nan
    schema, rows = rows_with(loss=values)
    chunk = next(c for c in encode_rows(schema, rows) if c.name == "loss")
    first, second = np.frombuffer(chunk.summary, dtype=SUMMARY)
    assert (50.0, 100, 100_000) == (first["high"], first["high_step"], first["high_time"])
    assert (-50.0, 200, 200_000) == (first["low"], first["low_step"], first["low_time"])
    assert [(256, 0), (3, 1)] == [(e["num"], e["num_nonfinite"]) for e in (first, second)]
    assert [0, SUMMED_ROWS, SUMMED_ROWS + 2] == np.frombuffer(chunk.marks, MARK)["step"].tolist()


def test_where_too_many_values_are_not_finite_the_rows_are_to_be_read():
    chunk = encode_rows(*rows_with(loss=[math.nan] * 1_000))[-1]
    assert (b"", 4) == (chunk.marks, len(chunk.summary) // SUMMARY.itemsize)


@pytest.mark.parametrize("steps", [[0, 1, 1], [0, 2, 1]], ids=["again", "back"])
def test_rows_that_are_no_single_curve_have_no_summary(steps: list[int]):
    schema, rows = rows_with(loss=[1.0, 2.0, 3.0])
    rows = rows.copy()
    rows["c0"] = steps
    assert {b""} == {chunk.summary for chunk in encode_rows(schema, rows)}


def test_columns_are_read_one_by_one():
    schema, rows = rows_with(loss=[1.5, None, 2.5])
    chunks = [chunk for chunk in encode_rows(schema, rows) if chunk.name == "loss"]
    ((_, values, valid),) = decode_columns(chunks, 3)
    known, known_valid = column_of(schema, rows, "loss")
    assert known.tolist() == values.tolist()
    assert valid is not None
    assert known_valid.tolist() == valid.tolist()


def test_a_form_of_a_newer_version_is_an_error_that_says_so():
    chunk = ColumnChunk("loss", "f8", "zip9", 0, b"", b"", b"", b"1234")
    with pytest.raises(FormatError, match="stored as 'zip9'") as caught:
        decode_values(chunk, 4)
    assert "upgrade" in caught.value.hint
