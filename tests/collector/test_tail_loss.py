"""Whatever happens to a spool: what is stored is what was written, and the rest is counted."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from tests.collector.rows import RUN, STEPS, Writer, num_stored
from trainvitals.catalog import NODE_SCHEMA, SCALARS_SCHEMA
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.io.spool_files import STATE_FILE, spool_files
from trainvitals.rows import column_of, rows_of
from trainvitals.views import RunQuestion
from trainvitals.wire import decode_batch
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.ingest.ingest import ingest
from vitals_collector.ingest.tail_loss import num_lost_rows
from vitals_collector.numbers.interface import RowSpan, StreamKey
from vitals_collector.queries.open import open_folder
from vitals_collector.storage.schema import streams
from vitals_collector.storage.store import Store, open_store

Written = dict[StreamKey, list[bytes]]
"""Each stream's rows, as they were written."""
NUM_SEEDS = 5
SCHEMAS = {schema.stream: schema for schema in (STEPS, SCALARS_SCHEMA, NODE_SCHEMA)}


def new_spool(folder: Path, *, keep: bool = True, max_bytes: int = 1 << 24) -> Spool:
    where = RunDir.create(folder, RUN).agent_dir("node-a") / "spool"
    return Spool(where, max_bytes=max_bytes, keep=keep, file_bytes=6_000)


def write(spool: Spool, raw: bytes, written: Written) -> None:
    batch = decode_batch(raw)
    header, rows = batch.header, batch.rows
    size = header.stream_schema.row_size
    key = (RUN, header.identity.incarnation, header.stream)
    some = [rows[i : i + size] for i in range(0, len(rows), size)]
    written.setdefault(key, []).extend(some)
    spool.append(raw)


def write_run(folder: Path) -> Written:
    """Write seven streams of four sources, of which one ends early, and close the spool."""
    written: Written = {}
    ranks = [Writer(f"rank:{rank}") for rank in range(3)]
    node = Writer("node:node-a")
    spool = new_spool(folder)
    for i in range(12):
        for rank in ranks[: 3 - i // 8]:
            write(spool, rank.steps(range(i * 4, i * 4 + 4), loss=1.5), written)
        for rank in ranks:
            write(spool, rank.scalars(1, {i: float(i)}), written)
        write(spool, node.node_rows([i]), written)
        spool.sync()
    spool.close()
    return written


def age(folder: Path) -> None:
    """Have everything be written long ago: nothing of it is growing."""
    for path in folder.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))


def spool_in(folder: Path) -> Path:
    (found,) = folder.rglob("spool")
    return found


def files_of(folder: Path) -> list[Path]:
    return [path for _, path in spool_files(spool_in(folder))]


def check_rows(store: Store, written: Written) -> dict[StreamKey, int]:
    """Return how many rows of each stream are stored, each as it was written."""
    num_rows = {key: check_stream(store, key, rows) for key, rows in written.items()}
    assert sum(num_rows.values()) == num_stored(store)
    return num_rows


def check_stream(store: Store, key: StreamKey, written: list[bytes]) -> int:
    run, incarnation, stream = key
    schema = SCHEMAS[stream]
    span = RowSpan(run, stream, seqs={incarnation: (0, len(written))})
    names = [column.name for column in schema.columns]
    stored = store.numbers.scan(span, ["seq", *names])
    seqs = stored["seq"].values.astype(int)
    assert len(set(seqs)) == len(seqs)
    whole = rows_of(schema, b"".join(written))
    for name in names:
        values, is_valid = column_of(schema, whole, name)
        is_there = ~stored[name].is_missing
        np.testing.assert_array_equal(is_there, is_valid[seqs])
        np.testing.assert_array_equal(stored[name].values[is_there], values[seqs][is_there])
    return len(seqs)


def told(store: Store) -> dict[StreamKey, int]:
    """Return how many rows of each stream are told lost."""
    key = (streams.c.run_id, streams.c.incarnation, streams.c.stream)
    with store.read_transaction() as connection:
        found = connection.execute(select(*key, num_lost_rows()))
        return {(run, start, stream): lost for run, start, stream, lost in found}


def flip(files: list[Path], chance: random.Random) -> None:
    for _ in range(chance.randint(1, 6)):
        path = chance.choice(files)
        raw = bytearray(path.read_bytes())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)


def cut(files: list[Path], chance: random.Random) -> None:
    path = chance.choice([files[-1], chance.choice(files)])
    raw = path.read_bytes()
    start = chance.randrange(len(raw))
    path.write_bytes(raw[:start] + raw[start + chance.choice((1, 50, 1 << 20)) :])


def blank(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    raw = bytearray(path.read_bytes())
    start = chance.randrange(len(raw))
    end = min(len(raw), start + 2_000)
    raw[start:end] = bytes(end - start)
    path.write_bytes(raw)


def remove(files: list[Path], chance: random.Random) -> None:
    chance.choice([files[-1], chance.choice(files)]).unlink()


Damage = Callable[[list[Path], random.Random], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    folder = tmp_path_factory.mktemp("written")
    written = write_run(folder)
    age(folder)
    assert len(files_of(folder)) > 3
    return folder, written


@pytest.mark.parametrize("damage", [flip, cut, blank, remove], ids=lambda d: d.__name__)
def test_what_is_stored_was_written_and_the_rest_is_told(
    run: tuple[Path, Written], damage: Damage, tmp_path: Path
):
    folder, written = run
    num_lost = 0
    for seed in range(NUM_SEEDS):
        copy = tmp_path / str(seed)
        shutil.copytree(folder, copy)
        damage(files_of(copy), random.Random(f"{damage.__name__} {seed}"))
        age(copy)
        store = open_store("sqlite://")
        reader = FolderIngest(store, [copy])
        reader.poll()
        reader.poll()
        stored, lost = check_rows(store, written), told(store)
        for key, rows in written.items():
            assert len(rows) == stored[key] + lost[key], (seed, key)
        assert sum(lost.values()) == store.counters.num_lost
        num_lost += sum(lost.values())
        store.close()
    assert num_lost > 0


def test_a_lost_end_is_told_to_whoever_reads_the_folder_alone(
    run: tuple[Path, Written], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, written = run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    raw = bytearray(files_of(tmp_path)[1].read_bytes())
    raw[len(raw) // 2] ^= 1
    files_of(tmp_path)[1].write_bytes(raw)
    files_of(tmp_path)[-1].unlink()
    age(tmp_path)
    with open_folder(tmp_path) as opened:
        detail = opened.reader.ask(RunQuestion(run_id=RUN))
    stored = sum(one.num_rows for one in detail.sources)
    lost = sum(one.num_lost_rows for one in detail.sources)
    assert sum(len(rows) for rows in written.values()) == stored + lost
    assert lost > 0
    assert "are damaged and skipped" in caplog.text
    assert "8 rows at the end" in caplog.text


def test_a_stream_of_which_nothing_can_be_read_is_told_beside_the_others(
    store: Store, tmp_path: Path
):
    written: Written = {}
    known, unknown = Writer("rank:0"), Writer("rank:1")
    spool = new_spool(tmp_path)
    write(spool, known.steps(range(4)), written)
    size = spool.num_bytes
    write(spool, unknown.steps(range(6)), written)
    spool.close()
    os.truncate(files_of(tmp_path)[-1], size + 100)
    age(tmp_path)
    reader = FolderIngest(store, [tmp_path])
    assert 4 == reader.poll()
    assert [0, 6] == sorted(told(store).values())
    late = Writer("rank:1")
    late.identity = unknown.identity
    assert 6 == ingest(store, late.steps(range(6))).num_new
    assert [0, 0] == sorted(told(store).values())


def test_rows_that_come_after_all_are_lost_no_more(store: Store, tmp_path: Path):
    writer, written = Writer(), dict[StreamKey, list[bytes]]()
    raws = [writer.steps(range(first, first + 10)) for first in (0, 10, 20, 30)]
    spool = new_spool(tmp_path)
    for raw in raws[:3]:
        write(spool, raw, written)
    spool.close()
    for path in files_of(tmp_path)[1:]:
        path.unlink()
    age(tmp_path)
    reader = FolderIngest(store, [tmp_path])
    assert 10 == reader.poll()
    assert ([20], 20) == ([*told(store).values()], store.counters.num_lost)
    ingest(store, raws[1])
    assert [10] == [*told(store).values()]
    ingest(store, raws[3])
    assert ([10], 20) == ([*told(store).values()], store.counters.num_lost), "each is told once"
    assert 0 == FolderIngest(store, [tmp_path]).poll()
    assert ([10], 20) == ([*told(store).values()], store.counters.num_lost), "a restart tells none"


def test_a_lost_end_is_counted_once_where_the_stream_goes_on_over_http(tmp_path: Path):
    store, writer, written = open_store("sqlite://"), Writer(), dict[StreamKey, list[bytes]]()
    raws = [writer.steps(range(first, first + 10)) for first in (0, 10, 20, 30)]
    spool = new_spool(tmp_path)
    ingest(store, raws[0])
    for raw in raws[:3]:
        write(spool, raw, written)
    spool.close()
    for path in files_of(tmp_path)[1:]:
        path.unlink()
    age(tmp_path)
    assert 0 == FolderIngest(store, [tmp_path]).poll()
    assert 20 == store.counters.num_lost
    ingest(store, raws[3])
    assert ([20], 20) == ([*told(store).values()], store.counters.num_lost)
    store.close()


def test_nothing_is_told_lost_that_may_yet_arrive(tmp_path: Path):
    writer, written = Writer(), dict[StreamKey, list[bytes]]()
    spool = new_spool(tmp_path)
    for first in (0, 3):
        write(spool, writer.steps(range(first, first + 3)), written)
    spool.close()
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-500])
    store = open_store("sqlite://")
    reader = FolderIngest(store, [tmp_path])
    assert 3 == reader.poll()
    assert [0] == [*told(store).values()]
    file.write_bytes(whole)
    assert 3 == reader.poll()
    assert ([0], 0) == ([*told(store).values()], store.counters.num_damaged)
    store.close()


def test_what_a_full_spool_refused_at_the_end_is_told(tmp_path: Path):
    writer, written = Writer(), dict[StreamKey, list[bytes]]()
    spool = new_spool(tmp_path, max_bytes=20_000)
    for first in range(0, 400, 10):
        write(spool, writer.steps(range(first, first + 10)), written)
    spool.sync()
    spool.close()
    assert spool.dropped_rows > 0
    store = open_store("sqlite://")
    FolderIngest(store, [tmp_path]).poll()
    assert [spool.dropped_rows] == [*told(store).values()]
    store.close()


def test_what_was_sent_and_removed_is_not_lost(tmp_path: Path):
    writer, other, written = Writer(), Writer("rank:1"), dict[StreamKey, list[bytes]]()
    spool = new_spool(tmp_path, keep=False)
    write(spool, other.steps([0]), written)
    for first in range(0, 100, 10):
        write(spool, writer.steps(range(first, first + 10)), written)
    spool.sync()
    spool.ack(spool.pending(1_000)[-1][0])
    spool.close()
    age(tmp_path)
    store = open_store("sqlite://")
    FolderIngest(store, [tmp_path]).poll()
    assert 1 == len(told(store)), "of the other source nothing is left, for it was sent"
    store.close()


@pytest.mark.parametrize("is_missing", [False, True])
def test_without_the_state_what_can_be_read_is_stored(
    run: tuple[Path, Written],
    tmp_path: Path,
    is_missing: bool,
    caplog: pytest.LogCaptureFixture,
):
    folder, written = run
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = spool_in(tmp_path) / STATE_FILE
    state.write_bytes(state.read_bytes().replace(b'"acked"', b'"ackee"'))
    if is_missing:
        state.unlink()
    files_of(tmp_path)[-1].unlink()
    age(tmp_path)
    store = open_store("sqlite://")
    reader = FolderIngest(store, [tmp_path])
    reader.poll()
    reader.poll()
    assert sum(check_rows(store, written).values()) > 0
    assert (0 if is_missing else 1) == store.counters.num_damaged
    assert is_missing != ("rows lost at the end of a stream are not counted" in caplog.text)
    store.close()


def test_a_state_of_strangers_adds_nothing(tmp_path: Path):
    """A folder may be another user's: what its state says is believed of its own run alone."""
    spool = new_spool(tmp_path)
    writer = Writer()
    spool.append(writer.steps([0]))
    spool.sync()
    own = writer.identity.incarnation
    spool._last |= {
        ("01JD0000000000000000000009", own, "steps"): 10**6,
        (RUN, "no incarnation", "steps"): 10**6,
        (RUN, own, "a stream of a much too long name"): 10**6,
        (RUN, own, "layers"): 10**30,
    }
    spool.close()
    store = open_store("sqlite://")
    assert 1 == FolderIngest(store, [tmp_path]).poll()
    assert {(RUN, own, "steps"): 0} == told(store)
    store.close()
