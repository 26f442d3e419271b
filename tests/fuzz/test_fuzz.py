"""Bytes of others are read or refused with an error of ours, in bounded time and memory.

The short run is the same at every run; the long one (`make fuzz`) is another one each time, and
says by which seed a failure comes again.
"""

import random
import shutil
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collector.rows import STEPS, Writer
from tests.fuzz.mutation import mutated, sealed
from tests.fuzz.target import Target, refused
from tests.fuzz.targets import TARGETS
from trainvitals.catalog import ROW_COLUMNS
from trainvitals.errors import FormatError
from trainvitals.identity import Identity
from trainvitals.records import EVENT_SCHEMA
from trainvitals.rows import STREAMS, Schema
from trainvitals.wire import MAGIC, PREFIX

LONG_SECONDS = 600.0
"""Of the long run, shared by all targets."""


def example(target: Target, seed: int) -> bytes:
    rng = random.Random(seed)
    raw = mutated(rng.choice(target.samples()), rng)
    return target.reseal(raw) if target.reseal is not None and rng.random() < 0.7 else raw


def try_seed(target: Target, seed: int, folder: Path) -> bool:
    raw = example(target, seed)
    try:
        return refused(target, raw, folder)
    except BaseException as error:
        error.add_note(f"{target.name}, seed {seed}: {len(raw)} bytes, {raw[:200]!r}")
        raise


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_valid_sample_is_read(target: Target, tmp_path: Path):
    for i, raw in enumerate(target.samples()):
        assert not refused(target, raw, tmp_path / str(i)) or target.is_partial


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_however_its_bytes_are_changed_it_is_read_or_refused_in_our_words(
    target: Target, tmp_path: Path
):
    for seed in range(max(2, target.weight // 3)):
        try_seed(target, seed, tmp_path / str(seed))


texts = st.text(max_size=40) | st.sampled_from(["", "\0", "\x1b[2J", "step", "loss", "payload"])
numbers = st.integers(-(2**63), 2**64 - 1)
identities = st.dictionaries(
    st.sampled_from([field.name for field in msgspec.structs.fields(Identity)]),
    texts | numbers,
    max_size=1,
).map(lambda odd: msgspec.to_builtins(Writer().identity) | odd)
kinds = st.sampled_from(["f8", "f8", "i8", "S8", "S936", "S4096", "S0", "O", "f4"])
names = st.sampled_from([column.name for column in STEPS.columns]) | texts
columns = st.lists(st.tuples(names, kinds), max_size=70, unique_by=lambda column: column[0])
own = [(column.name, column.kind) for column in ROW_COLUMNS]
schemas = st.sampled_from([STEPS, EVENT_SCHEMA]).map(msgspec.to_builtins) | st.builds(
    lambda stream, more: {"stream": stream, "columns": [*own, *more]},
    st.sampled_from([*STREAMS, "odd"]),
    columns,
)


@st.composite
def made_up_batches(draw: st.DrawFn) -> bytes:
    """Batches whose lengths and checksums hold, and little else has to."""
    schema = draw(schemas)
    head = {"version": draw(st.sampled_from([1, 1, 1, 0, 2])), "identity": draw(identities)}
    head_raw = msgspec.msgpack.encode(head | {"stream_schema": schema})
    num, first = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 5, -1, 2**62, 2**63 - 1]))
    try:
        size = msgspec.convert(schema, Schema).check().row_size
    except (FormatError, msgspec.ValidationError):
        size = 8
    one = draw(st.binary(max_size=64)).ljust(size, b"\xff")[:size]
    rows = b"".join(numbered(one, first + i) for i in range(num))
    prefix = PREFIX.pack(MAGIC, 0, len(head_raw), len(rows), num, first, 0, 0)
    return sealed(prefix + head_raw + rows)


def numbered(row: bytes, seq: int) -> bytes:
    """Return the row with a number and a checksum that hold."""
    body = row[4:8] + (seq % 2**63).to_bytes(8, "little") + row[16:]
    return zlib.crc32(body).to_bytes(4, "little") + body


def store_made_up(num: int) -> None:
    target = next(target for target in TARGETS if target.name == "ingest")
    codes: set[str] = set()

    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=num < 100,
        suppress_health_check=list(HealthCheck),
    )
    @given(raw=made_up_batches())
    def store(raw: bytes) -> None:
        codes.add(target.read(Path(), raw))

    store()
    assert {"", "V200"} <= codes, "some are stored, and some are refused"


def test_batches_that_are_made_up_are_stored_or_refused_alone():
    store_made_up(15)


@pytest.mark.slow
@pytest.mark.timeout(LONG_SECONDS)
def test_many_batches_that_are_made_up_are_stored_or_refused_alone():
    store_made_up(1_000)


FOUND = [
    ("receivers", b"public_url = " + b"[" * 30_000),
    ("settings", b"[ladder]\nmargin = " + b"[" * 30_000),
    ("address", b'{"url":"http://[","pid":1,"node":""}'),
    ("agent.json", b'{"pid":1,"url":"\xff"}'),
]
"""What long runs found; each has been mended."""


@pytest.mark.parametrize(("name", "raw"), FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found_once_is_refused_in_our_words(name: str, raw: bytes, tmp_path: Path):
    (target,) = (target for target in TARGETS if target.name == name)
    refused(target, raw, tmp_path / "now")


def claims(size: int, *, magic: bytes = MAGIC) -> bytes:
    """Return a file of beginnings of batches, each of which claims much of what follows."""
    prefix = PREFIX.pack(magic, 0, 0, size // 2, 1, 0, 0, 0)
    return prefix * (size // len(prefix))


@pytest.mark.parametrize("magic", [MAGIC, b"TVS2"])
def test_a_spool_made_up_of_claims_is_given_up_in_time(magic: bytes, tmp_path: Path):
    (target,) = (target for target in TARGETS if target.name == "spool")
    refused(target, claims(4 << 20, magic=magic), tmp_path / "now")


def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path):
    (target,) = (target for target in TARGETS if target.name == "data/rank-0.jsonl")
    refused(target, b'{"step":3,' + b" " * (40 << 20), tmp_path / "now")


@pytest.mark.slow
@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_for_a_long_time_nothing_is_found(target: Target, tmp_path: Path):
    first = random.SystemRandom().randrange(2**40)
    end = time.monotonic() + LONG_SECONDS / len(TARGETS)
    seed = first
    while time.monotonic() < end:
        try_seed(target, seed, tmp_path / "now")
        shutil.rmtree(tmp_path / "now")
        seed += 1
    assert seed > first
