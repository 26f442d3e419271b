import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.errors import FormatError
from trainvitals.records import (
    EVENT_PAYLOAD_BYTES,
    EVENT_SCHEMA,
    Decision,
    DecisionMade,
    Event,
    NamesDefined,
    Note,
    RunInfo,
    RunStarted,
    decode_events,
    encode_event,
)
from trainvitals.rows import Column, Schema, Value, column_of, rows_of

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
INTS = st.integers(-(2**63), 2**63 - 1)
VALUES = {"f8": FLOATS, "i8": INTS, "S8": st.binary(min_size=8, max_size=8)}


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=140))
    columns = tuple(Column(f"c{i}", kind) for i, kind in enumerate(kinds))
    return Schema("steps", columns).check()


@st.composite
def rows(draw: st.DrawFn) -> tuple[Schema, list[Value]]:
    schema = draw(schemas())
    return schema, [draw(st.none() | VALUES[c.kind]) for c in schema.columns]  # type: ignore[operator]


def same(left: Value, right: Value) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return (
        left == right and math.copysign(1, left) == math.copysign(1, right)
        if (isinstance(left, float) and isinstance(right, float))
        else left == right
    )


@given(row=rows(), seq=st.integers(0, 2**62))
def test_a_row_comes_back_with_nan_and_missing_kept_apart(
    row: tuple[Schema, list[Value]], seq: int
) -> None:
    schema, values = row
    raw = schema.pack(seq, values)
    assert schema.row_size == len(raw) == schema.dtype.itemsize
    assert seq == schema.seq_of(raw)
    found = schema.unpack(raw)
    assert {c.name for c, v in zip(schema.columns, values, strict=True) if v is not None} == set(
        found
    )
    for column, value in zip(schema.columns, values, strict=True):
        assert value is None or same(value, found[column.name])


@given(data=st.data(), schema=schemas())
def test_what_the_row_before_lacked_changes_nothing(data: st.DataObject, schema: Schema) -> None:
    fresh = Schema(schema.stream, schema.columns)
    for _ in range(4):
        values = [data.draw(st.none() | VALUES[c.kind]) for c in schema.columns]  # type: ignore[operator]
        again = Schema(schema.stream, schema.columns)
        assert again.pack(3, values) == fresh.pack(3, values)


def test_a_row_of_the_wrong_kind_or_length_is_an_error_and_the_next_one_is_not() -> None:
    schema = Schema("steps", (Column("step", "i8"), Column("loss", "f8")))
    for wrong in ([1], [1, 2.0, None], ["1", 2.0], [1.5, 2.0], [None, "x"]):
        with pytest.raises((struct.error, ValueError, IndexError)):
            schema.pack(0, wrong)  # type: ignore[arg-type]
        assert {"step": 1, "loss": 2.0} == schema.unpack(schema.pack(0, [1, 2.0]))
        assert {"loss": 2.0} == schema.unpack(schema.pack(0, [None, 2.0]))


@given(row=rows())
def test_numpy_sees_what_was_packed(row: tuple[Schema, list[Value]]) -> None:
    schema, values = row
    array = rows_of(schema, schema.pack(7, values) * 3)
    assert [7, 7, 7] == array["seq"].tolist()
    for column, value in zip(schema.columns, values, strict=True):
        found, valid = column_of(schema, array, column.name)
        assert [value is not None] * 3 == valid.tolist()
        if isinstance(value, float | int):
            assert same(value, found[0].item())


@given(row=rows(), data=st.data())
def test_any_flipped_bit_is_found(row: tuple[Schema, list[Value]], data: st.DataObject) -> None:
    schema, values = row
    raw = bytearray(schema.pack(1, values))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert schema.seq_of(bytes(raw)) is None


@given(schema=schemas())
def test_a_row_never_written_is_no_row(schema: Schema) -> None:
    assert schema.seq_of(bytes(schema.row_size)) is None
    assert schema.seq_of(b"") is None


def test_a_column_that_is_not_there_was_never_measured() -> None:
    schema = Schema("steps", (Column("loss", "f8"),))
    values, valid = column_of(schema, rows_of(schema, schema.pack(0, [1.0])), "other")
    assert (np.zeros(1).tolist(), [False]) == (values.tolist(), valid.tolist())


def test_half_a_row_is_an_error() -> None:
    schema = Schema("steps", (Column("loss", "f8"),))
    with pytest.raises(FormatError, match="not a whole number"):
        rows_of(schema, schema.pack(0, [1.0])[:-1])


@pytest.mark.parametrize(
    ("stream", "columns", "reason"),
    [
        ("other", [("a", "f8")], "stream is 'other'"),
        ("steps", [], "0 columns"),
        ("steps", [("a", "f8")] * 2, "the same name"),
        ("steps", [(f"c{i}", "f8") for i in range(513)], "513 columns"),
        *[
            ("steps", [("a", kind)], "has type")
            for kind in ("f4", "", "S", "S7", "S0", "S-8", "S9000")
        ],
    ],
)
def test_columns_that_cannot_be_laid_out_are_refused(
    stream: str, columns: Sequence[tuple[str, str]], reason: str
) -> None:
    with pytest.raises(FormatError, match=reason):
        Schema(stream, tuple(Column(*c) for c in columns)).check()


# ------------------------------------------------------------------------------- events


def event_rows(events: Sequence[Event]) -> list[bytes]:
    seq, raw = 0, []
    for event in events:
        for values in encode_event(event, step=1, attempt=2, time_unix_ns=3, monotonic_ns=4):
            raw.append(EVENT_SCHEMA.pack(seq, values))
            seq += 1
    return raw


EVENTS = st.one_of(
    st.builds(Note, code=st.text(max_size=5), text=st.text(max_size=2500)),
    st.builds(
        NamesDefined,
        stream=st.just("scalars"),
        names=st.dictionaries(st.integers(0, 99), st.text(max_size=50), max_size=60),
    ),
    st.builds(RunStarted, info=st.builds(RunInfo, name=st.text(max_size=3000))),
)


@given(events=st.lists(EVENTS, max_size=5))
def test_events_come_back_whole(events: list[Event]) -> None:
    found = list(decode_events(EVENT_SCHEMA, b"".join(event_rows(events))))
    assert events == [row.event for row in found]
    assert all((1, 2, 3) == (row.step, row.attempt, row.time_unix_ns) for row in found)


@given(events=st.lists(EVENTS, min_size=1, max_size=4), data=st.data())
def test_a_lost_row_costs_its_event_and_no_other(events: list[Event], data: st.DataObject) -> None:
    raw = event_rows(events)
    lost = data.draw(st.integers(0, len(raw) - 1))
    sizes = [len(event_rows([event])) for event in events]
    hit = next(i for i in range(len(events)) if lost < sum(sizes[: i + 1]))
    found = list(decode_events(EVENT_SCHEMA, b"".join(raw[:lost] + raw[lost + 1 :])))
    assert events[:hit] + events[hit + 1 :] == [row.event for row in found]


def test_an_event_of_an_unknown_type_keeps_its_place() -> None:
    import msgspec

    payload = msgspec.msgpack.encode({"type": "FromTheFuture", "x": 1})
    values: list[Value] = [1, 2, 3, 4, 0, 1, len(payload), payload]
    raw = EVENT_SCHEMA.pack(5, values) + event_rows([Note(code="a", text="b")])[0]
    assert [None, Note(code="a", text="b")] == [r.event for r in decode_events(EVENT_SCHEMA, raw)]


def test_an_event_that_is_nested_too_deeply_keeps_its_place() -> None:
    payload = b"\x81\xa5later" + b"\x91" * 900 + b"\xc0"
    values: list[Value] = [1, 2, 3, 4, 0, 1, len(payload), payload]
    raw = EVENT_SCHEMA.pack(5, values) + event_rows([Note(code="a", text="b")])[0]
    assert [None, Note(code="a", text="b")] == [r.event for r in decode_events(EVENT_SCHEMA, raw)]


def test_a_decision_fits_one_row() -> None:
    decision = Decision(
        ledger_seq=1,
        action="skip_step",
        step=5,
        decided_at_step=6,
        attempt=1,
        reason="x" * 200,
        rule="nonfinite",
        cause="nan",
        evidence={"loss": math.nan},
    )
    rows = encode_event(
        DecisionMade(decision=decision), step=5, attempt=1, time_unix_ns=0, monotonic_ns=0
    )
    assert 1 == len(rows)
    assert EVENT_PAYLOAD_BYTES >= int(rows[0][6] or 0)


ODD_EVENT = st.tuples(
    *[st.none() | st.sampled_from([-(2**63), -1, 0, 1, 2, 937, 2**62])] * 7,
    st.none() | st.binary(max_size=EVENT_PAYLOAD_BYTES),
)


@given(values=st.lists(ODD_EVENT, max_size=5))
def test_odd_event_rows_with_right_checksums_never_crash_the_decoder(
    values: list[tuple[Value, ...]],
) -> None:
    raw = b"".join(EVENT_SCHEMA.pack(i, row) for i, row in enumerate(values))
    assert len(list(decode_events(EVENT_SCHEMA, raw))) <= len(values)


def test_events_in_a_schema_without_their_columns_are_passed_over() -> None:
    schema = Schema("events", (Column("step", "i8"), Column("part", "f8")))
    raw = schema.pack(0, [1, math.nan]) + schema.pack(1, [2, 0.0])
    assert [] == [row for row in decode_events(schema, raw) if row.event is not None]
