import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.errors import FormatError, NewerVersionError
from trainvitals.identity import Identity
from trainvitals.rows import FORMAT_VERSION, MAX_COLUMNS, Column, Schema
from trainvitals.wire import (
    MAGIC,
    MAX_BATCHES,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    REMEMBERED_BYTES,
    Batch,
    BatchHeader,
    _decode_writer,
    _encode_writer,
    batch_size,
    decode_batch,
    encode_batch,
    frame_batch,
    is_of_events,
    split_batches,
)

IDENTITY = Identity("01ARZ3NDEKTSV4RRFFQ69G5FAV", "0" * 16, "rank:0", "node-a")
SCHEMA = Schema("steps", (Column("loss", "f8"), Column("step", "i8")))


def a_header(num_rows: int = 1, **changes: object) -> BatchHeader:
    header = BatchHeader(identity=IDENTITY, stream_schema=SCHEMA, first_seq=0, num_rows=num_rows)
    return msgspec.structs.replace(header, **changes)


def by_hand(head: object, body: bytes = b"", **numbers: int) -> bytes:
    raw = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    return frame_batch(a_header(**numbers), raw, body)


def said(header: BatchHeader) -> dict[str, object]:
    """Return what a header says beside the numbers of the batch."""
    return {
        "version": header.version,
        "identity": msgspec.to_builtins(header.identity),
        "stream_schema": msgspec.to_builtins(header.stream_schema),
    }


@given(
    values=st.lists(st.tuples(st.none() | st.floats(), st.none() | st.integers(0, 9)), min_size=1),
    first_seq=st.integers(0, 2**50),
    dropped=st.integers(0, 9),
)
def test_a_batch_comes_back_byte_for_byte(
    values: list[tuple[float | None, int | None]], first_seq: int, dropped: int
) -> None:
    rows = b"".join(SCHEMA.pack(first_seq + i, row) for i, row in enumerate(values))
    header = a_header(len(values), first_seq=first_seq, dropped=dropped)
    raw = encode_batch(header, rows)
    assert len(raw) == batch_size(raw[: PREFIX.size])
    assert Batch(header, rows) == decode_batch(raw)
    assert ("steps", first_seq + len(values) - 1) == (header.stream, header.last_seq)


@given(raw=st.binary(max_size=300))
def test_arbitrary_bytes_are_a_format_error(raw: bytes) -> None:
    for attempt in (raw, MAGIC + raw):
        with pytest.raises(FormatError):
            decode_batch(attempt)


@given(head=st.binary(max_size=200), body=st.binary(max_size=50))
def test_arbitrary_bytes_with_a_right_checksum_are_a_format_error(head: bytes, body: bytes) -> None:
    with pytest.raises(FormatError):
        decode_batch(by_hand(head, body))


JSON = st.recursive(
    st.none() | st.integers(-5, 2**40) | st.text(max_size=5) | st.floats() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


@given(
    key=st.sampled_from(["version", "identity", "stream_schema"]),
    value=JSON,
    numbers=st.fixed_dictionaries(
        {},
        optional={
            "num_rows": st.integers(0, 2**32 - 1),
            "first_seq": st.integers(-(2**63), 2**63 - 1),
            "dropped": st.integers(-(2**63), 2**63 - 1),
        },
    ),
)
def test_a_header_with_an_odd_field_is_a_format_error_or_a_batch(
    key: str, value: object, numbers: dict[str, int]
) -> None:
    head = {**said(a_header()), key: value}
    try:
        batch = decode_batch(by_hand(head, SCHEMA.pack(0, [1.0, 1]), **numbers))
    except FormatError:
        return
    assert batch.header.num_rows * batch.header.stream_schema.row_size == len(batch.rows)


@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    raw = bytearray(encode_batch(a_header(), SCHEMA.pack(0, [1.0, 1])))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_batch(bytes(raw))


def test_a_batch_torn_at_any_byte_is_a_format_error() -> None:
    raw = encode_batch(a_header(), SCHEMA.pack(0, [1.0, 1]))
    for size in range(len(raw)):
        with pytest.raises(FormatError):
            decode_batch(raw[:size])
    with pytest.raises(FormatError, match="claims"):
        decode_batch(raw + b"x")


@pytest.mark.parametrize("depth", [100, 1_000, 50_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["lists", "maps"])
@pytest.mark.parametrize("key", ["later", "identity", "stream_schema"])
def test_values_nested_at_any_depth_are_a_format_error_or_passed_over(
    key: str, opening: bytes, depth: int
) -> None:
    depth = min(depth, MAX_HEADER_BYTES // len(opening) - 600)
    whole = {name: value for name, value in said(a_header()).items() if name != key}
    head = msgspec.msgpack.encode({**whole, key: None})[:-1] + opening * depth + b"\xc0"
    raw = by_hand(head, SCHEMA.pack(0, [1.0, 1]))
    if key == "later" and depth == 100:
        assert 1 == decode_batch(raw).header.num_rows
        return
    with pytest.raises(FormatError):
        decode_batch(raw)


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
@pytest.mark.parametrize("key", ["later", "identity", "stream_schema"])
def test_a_size_that_is_only_claimed_takes_no_memory(key: str, claim: bytes) -> None:
    whole = {name: value for name, value in said(a_header()).items() if name != key}
    head = msgspec.msgpack.encode({**whole, key: None})[:-1] + claim + b"\xff" * 4
    raw = by_hand(head)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode_batch(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_widest_rows_cost_their_own_size_and_no_more() -> None:
    columns = tuple(Column(f"c{i}", "S4096") for i in range(MAX_COLUMNS))
    schema = Schema("events", columns)
    num_rows = MAX_BODY_BYTES // schema.row_size
    header = a_header(num_rows, stream_schema=schema)
    raw = encode_batch(header, bytes(num_rows * schema.row_size))
    tracemalloc.start()
    try:
        assert header == decode_batch(raw).header
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BODY_BYTES
    finally:
        tracemalloc.stop()


def test_a_batch_of_events_is_known_by_a_look() -> None:
    columns = tuple(Column(f"events{i}", "f8") for i in range(4))
    steps, events = Schema("steps", columns), Schema("events", columns)
    for schema, is_it in ((steps, False), (events, True)):
        raw = encode_batch(a_header(1, stream_schema=schema), bytes(schema.row_size))
        assert is_it == is_of_events(raw)


def test_writers_share_a_schema_whose_header_is_too_long_to_be_remembered() -> None:
    schema = Schema("steps", tuple(Column(f"learning_rate.{i:03}", "f8") for i in range(120)))
    raws = [
        encode_batch(
            msgspec.structs.replace(a_header(1, stream_schema=schema), first_seq=seq),
            bytes(schema.row_size),
        )
        for seq in range(2)
    ]
    assert len(raws[0]) - schema.row_size > REMEMBERED_BYTES
    one, other = (decode_batch(raw).header.stream_schema for raw in raws)
    assert one is other


def test_headers_without_number_leave_little_behind() -> None:
    remembered = _decode_writer.cache_info().maxsize
    assert remembered is not None
    assert remembered * REMEMBERED_BYTES <= 1 << 25
    _decode_writer.cache_clear()
    tracemalloc.start()
    try:
        for i in range(300):  # long ones are not remembered at all
            identity = msgspec.structs.replace(IDENTITY, gpu_uuid=f"{i:0{REMEMBERED_BYTES}}")
            decode_batch(encode_batch(a_header(identity=identity), SCHEMA.pack(0, [1.0, 1])))
        assert 0 == _decode_writer.cache_info().currsize
        _encode_writer.cache_clear()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_unknown_fields_of_the_same_version_are_passed_over() -> None:
    head = {
        **said(a_header()),
        "later": [1, 2],
        "identity": {**msgspec.to_builtins(IDENTITY), "also_later": 1},
    }
    assert a_header() == decode_batch(by_hand(head, SCHEMA.pack(0, [1.0, 1]))).header


def test_a_newer_version_is_an_error_of_its_own() -> None:
    with pytest.raises(NewerVersionError, match=f"reads up to {FORMAT_VERSION}") as caught:
        decode_batch(by_hand({"version": FORMAT_VERSION + 1, "everything": "else"}))
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": 0},
        {"num_rows": 2},
        {"first_seq": -1},
        {"dropped": -1},
        {"identity": msgspec.structs.replace(IDENTITY, run_id="../../etc")},
        {"identity": msgspec.structs.replace(IDENTITY, node="a/b")},
        {"stream_schema": Schema("unheard", SCHEMA.columns)},
        {"stream_schema": Schema("steps", (Column("a", "f8"), Column("a", "f8")))},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused_both_ways(changes: dict[str, object]) -> None:
    header, rows = a_header(**changes), SCHEMA.pack(0, [1.0, 1])
    with pytest.raises(FormatError):
        encode_batch(header, rows)
    with pytest.raises(FormatError):
        decode_batch(frame_batch(header, msgspec.msgpack.encode(said(header)), rows))


def test_a_batch_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(FormatError, match="too large"):
        batch_size(PREFIX.pack(MAGIC, 0, 10, MAX_BODY_BYTES + 1, 1, 0, 0, 0))
    with pytest.raises(FormatError, match="too large"):
        batch_size(PREFIX.pack(MAGIC, 0, 1 << 30, 0, 1, 0, 0, 0))
    num = MAX_BODY_BYTES // SCHEMA.row_size + 1
    with pytest.raises(FormatError, match="at most"):
        encode_batch(a_header(num), bytes(num * SCHEMA.row_size))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_batches_that_travel_together_come_apart_again(sizes: list[int]) -> None:
    batches = [
        encode_batch(a_header(num), b"".join(SCHEMA.pack(i, [1.0, i]) for i in range(num)))
        for num in sizes
    ]
    assert batches == split_batches(b"".join(batches))


@given(raw=st.binary(max_size=300))
def test_arbitrary_bytes_are_not_taken_for_batches_that_travel_together(raw: bytes) -> None:
    whole = encode_batch(a_header(), SCHEMA.pack(0, [1.0, 1]))
    for bad in (raw, whole + raw + b"x", whole[:-1]):
        with pytest.raises(FormatError):
            split_batches(bad)


def test_more_batches_than_may_travel_together_are_refused() -> None:
    whole = encode_batch(a_header(), SCHEMA.pack(0, [1.0, 1]))
    assert MAX_BATCHES == len(split_batches(whole * MAX_BATCHES))
    with pytest.raises(FormatError, match="more than"):
        split_batches(whole * (MAX_BATCHES + 1))


def test_a_header_is_read_once_for_all_batches_of_a_writer() -> None:
    first, second = (
        decode_batch(encode_batch(a_header(first_seq=i), SCHEMA.pack(i, [1.0, i]))).header
        for i in range(2)
    )
    assert first.stream_schema is second.stream_schema
    assert (0, 1) == (first.first_seq, second.first_seq)
