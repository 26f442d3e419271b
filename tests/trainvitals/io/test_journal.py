import copy
import os
import pickle
import signal
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from tests.trainvitals.io.builders import (
    STEPS,
    an_identity,
    list_segments,
    note,
    seqs_of,
    values_of,
)
from trainvitals.errors import StorageError, UsageError
from trainvitals.identity import Identity, new_run_id
from trainvitals.io.journal import (
    JournalReader,
    JournalWriter,
    announce_run,
    find_journals,
    journal_directory,
    mark_journal_closed,
)
from trainvitals.io.private import is_memory_backed
from trainvitals.records import EVENT_SCHEMA, Note, decode_events
from trainvitals.rows import Column, Schema


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    """Where a journal goes: one suite over both kinds of segment."""
    if request.param == "memory":
        return shm / "journal"
    if is_memory_backed(tmp_path):
        pytest.skip("the folder for temporary files is in memory")
    return tmp_path / "journal"


def test_rows_come_back_in_order_with_identity_and_missing_values(
    folder: Path, identity: Identity
) -> None:
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(STEPS)
    assert [0, 1, 2] == [stream.append([i, None if i == 1 else 0.5]) for i in range(3)]
    journal.close()
    reader = JournalReader(folder)
    batches = reader.read()
    assert [0.5, None, 0.5] == values_of(batches)
    assert identity == batches[0].header.identity == reader.identity
    assert 0 == reader.dropped == journal.dropped


def test_a_reader_finishes_only_after_the_writers_goodbye(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity)
    journal.open_stream(STEPS).append([1, 1.0])
    reader = JournalReader(folder)
    assert not reader.take_end()
    journal.close()
    assert not reader.take_end()
    assert [0] == seqs_of(reader.read())
    assert reader.take_end()


def test_events_of_any_length_come_back_whole(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(EVENT_SCHEMA)
    texts = ["", "a" * 935, "b" * 100_000, "c" * 936]
    for text in texts:
        note(stream, text)
    journal.close()
    reader = JournalReader(folder)
    batches = []
    while found := reader.read(max_rows=3):
        batches += found
    events = [e.event for b in batches for e in decode_events(EVENT_SCHEMA, b.rows)]
    assert [Note(code="test", text=text) for text in texts] == events


def test_a_batch_of_events_ends_at_an_events_end(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(EVENT_SCHEMA)
    for _ in range(4):
        note(stream, "x" * 2000)  # three rows each
    journal.close()
    reader = JournalReader(folder)
    batches = []
    while found := reader.read(max_rows=4):
        batches += found
    assert [3, 3, 3, 3] == [b.header.num_rows for b in batches]
    assert 4 == sum(1 for b in batches for _ in decode_events(EVENT_SCHEMA, b.rows))
    assert reader.take_end()


def test_new_columns_begin_a_segment_and_numbers_go_on(folder: Path, identity: Identity) -> None:
    wider = Schema("steps", (*STEPS.columns, Column("extra", "f8")))
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(STEPS)
    stream.append([0, 0.0])
    assert stream is journal.open_stream(wider)
    stream.append([1, 1.0, 2.0])
    journal.open_stream(Schema("steps", tuple(wider.columns)))  # equal: nothing new
    stream.append([2, 2.0, 3.0])
    journal.close()
    batches = JournalReader(folder).read()
    assert [0, 1, 2] == seqs_of(batches)
    assert [None, 2.0, 3.0] == values_of(batches, "extra")
    assert 2 == len(list_segments(folder)["steps"])


def test_at_the_bound_the_oldest_rows_go_and_are_counted(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity, max_bytes=1 << 16, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    for i in range(10_000):
        stream.append([i, 1.0])
        if i % 1000 == 0 and journal.in_memory:
            on_disk = sum(p.stat().st_size for p in folder.iterdir() if p.suffix == ".seg")
            assert on_disk <= 1 << 16
    journal.close()
    reader = JournalReader(folder)
    seqs = seqs_of(reader.read(max_rows=100_000))
    assert 9_999 == seqs[-1]
    assert list(range(seqs[0], 10_000)) == seqs or journal.dropped  # a slow disk may drop some
    assert 10_000 == len(seqs) + reader.dropped


def test_events_outlive_samples_at_the_bound(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity, max_bytes=1 << 16, segment_bytes=4096)
    events, steps = journal.open_stream(EVENT_SCHEMA), journal.open_stream(STEPS)
    for i in range(6):
        note(events, f"event {i}")
    for i in range(10_000):
        steps.append([i, 1.0])
    journal.close()
    batches = JournalReader(shm / "j").read(max_rows=100_000)
    assert [0, 1, 2, 3, 4, 5] == seqs_of(batches, "events")


def test_events_take_at_most_half_and_the_last_steps_stay(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity, max_bytes=1 << 16, segment_bytes=4096)
    events, steps = journal.open_stream(EVENT_SCHEMA), journal.open_stream(STEPS)
    for i in range(500):
        note(events, f"event {i}")
        steps.append([i, 1.0])
    journal.close()
    reader = JournalReader(shm / "j")
    batches = reader.read(max_rows=100_000)
    held = sum(p.stat().st_size for _, p in list_segments(shm / "j")["events"])
    assert held <= (1 << 16) * 3 // 4
    assert 499 == seqs_of(batches)[-1] == seqs_of(batches, "events")[-1]
    assert 499 - 60 > seqs_of(batches)[0]


def test_a_reader_keeps_up_while_the_writer_goes_on(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity, max_bytes=1 << 16, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    reader = JournalReader(folder)
    seen: list[int] = []
    for i in range(3_000):
        stream.append([i, 1.0])
        if i % 7 == 0:
            seen += seqs_of(reader.read())
            if seen:
                reader.release("steps", seen[-1])
    journal.close()
    seen += seqs_of(reader.read(max_rows=10_000))
    assert sorted(set(seen)) == seen
    assert 3_000 == len(seen) + reader.dropped
    assert reader.take_end()


def test_released_segments_are_gone_and_the_rest_is_not(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    for i in range(400):
        stream.append([i, 1.0])
    before = len(list_segments(shm / "j")["steps"])
    reader = JournalReader(shm / "j")
    reader.release("steps", 250)
    left = list_segments(shm / "j")["steps"]
    assert 1 < len(left) < before
    assert 250 < seqs_of(reader.read())[-1]
    reader.release("steps", 399)
    assert 1 == len(list_segments(shm / "j")["steps"])  # the one being written stays
    journal.close()
    reader.release("steps", 399)
    assert {} == list_segments(shm / "j")
    assert reader.take_end()
    reader.remove()
    assert not (shm / "j").exists()


def test_a_new_reader_goes_on_where_the_spool_ends(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    for i in range(300):
        stream.append([i, 1.0])
    journal.close()
    reader = JournalReader(folder)
    reader.resume_after({"steps": 123})
    assert list(range(124, 300)) == seqs_of(reader.read())
    assert 0 == reader.dropped


def test_reading_again_does_not_count_lost_rows_twice(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    for i in range(300):
        stream.append([i, 1.0])
    first = list_segments(shm / "j")["steps"][0][1]
    first.unlink()
    journal.close()
    reader = JournalReader(shm / "j")
    once = [(b.header.first_seq, b.header.dropped) for b in reader.read()]
    dropped = reader.dropped
    reader.resume_after({"steps": -1})
    assert once == [(b.header.first_seq, b.header.dropped) for b in reader.read()]
    assert dropped == reader.dropped == once[0][1] > 0


CHILD = """
import os, sys
from pathlib import Path
from tests.trainvitals.io.builders import STEPS, an_identity, note
from trainvitals.io.journal import JournalWriter
from trainvitals.records import EVENT_SCHEMA
journal = JournalWriter(Path(sys.argv[1]), an_identity())
steps, events = journal.open_stream(STEPS), journal.open_stream(EVENT_SCHEMA)
note(events, "hello")
for i in range(10**9):
    steps.append([i, float(i)])
    if i == 500:
        os.write(1, b"x")
"""


def test_what_a_killed_process_wrote_is_there(shm: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(shm / "j")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert b"x" == child.stdout.read(1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    reader = JournalReader(shm / "j")
    seqs, events = [], 0
    while batches := reader.read():
        seqs += seqs_of(batches)
        events += len(seqs_of(batches, "events"))
        assert all(float(s) == v for s, v in zip(seqs_of(batches), values_of(batches), strict=True))
    assert 1 == events
    assert 500 <= seqs[-1]
    assert list(range(seqs[0], seqs[-1] + 1)) == seqs
    assert not reader.take_end()
    mark_journal_closed(shm / "j")
    assert reader.take_end()


def test_a_forked_childs_writer_is_closed_and_harmless(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(STEPS)
    stream.append([0, 0.0])
    child = os.fork()
    if child == 0:
        ok = journal.closed and stream.append([1, 1.0]) == -1 and note(stream, "x") == -1
        journal.close()
        os._exit(0 if ok else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not journal.closed
    assert 1 == stream.append([1, 2.0])
    journal.close()
    assert [0.0, 2.0] == values_of(JournalReader(folder).read())


def test_a_closed_journal_takes_nothing_and_counts_it(folder: Path, identity: Identity) -> None:
    journal = JournalWriter(folder, identity)
    stream = journal.open_stream(STEPS)
    journal.close()
    journal.close()
    assert -1 == stream.append([0, 0.0])
    assert 1 == journal.dropped
    assert journal.closed


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_journal_refuses_to_be_pickled_or_copied(
    shm: Path, identity: Identity, way: object
) -> None:
    journal = JournalWriter(shm / "j", identity)
    stream = journal.open_stream(STEPS)
    for thing in (journal, stream):
        with pytest.raises(UsageError, match="belongs to one process"):
            way(thing)  # type: ignore[operator]
    journal.close()


def test_a_folder_that_holds_a_journal_is_not_written_again(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity)
    journal.open_stream(STEPS).append([0, 0.0])
    journal.close()
    with pytest.raises(StorageError, match="already holds a journal"):
        JournalWriter(shm / "j", identity)


def test_journals_of_all_runs_are_found_with_their_run_directory(
    shm: Path, run_id: str, tmp_path: Path
) -> None:
    identity = an_identity(run_id=run_id, source="rank:7")
    run_folder = announce_run(shm, run_id, tmp_path / "runs" / run_id)
    directory = journal_directory(run_folder, identity)
    JournalWriter(directory, identity).close()
    (shm / "not-a-run").mkdir()
    (shm / "not-a-run" / "x").mkdir()
    (run_folder / "link").symlink_to(tmp_path)
    found = find_journals(shm)
    assert [(run_id, directory, tmp_path / "runs" / run_id)] == [
        (ref.run_id, ref.directory, ref.run_dir) for ref in found
    ]
    assert f"rank-7-{identity.incarnation}" == directory.name
    (run_folder / "run.json").write_bytes(b"{torn")
    assert [None] == [ref.run_dir for ref in find_journals(shm)]
    assert [] == find_journals(shm / "missing")


def test_the_journals_of_one_run_are_found_without_a_look_at_the_others(
    shm: Path, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = an_identity(run_id=run_id)
    own = announce_run(shm, run_id, tmp_path / "runs" / run_id)
    JournalWriter(journal_directory(own, identity), identity).close()
    other = announce_run(shm, new_run_id(1), tmp_path / "runs" / "other")
    JournalWriter(journal_directory(other, identity), identity).close()
    assert 2 == len(find_journals(shm))
    scanned: list[Path] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scanned.append(Path(path)) or scan(path))
    assert [run_id] == [ref.run_id for ref in find_journals(shm, run_id)]
    assert [own] == scanned


def test_a_journal_that_is_gone_or_empty_is_read_as_nothing(shm: Path) -> None:
    assert [] == JournalReader(shm / "missing").read()
    assert JournalReader(shm / "missing").identity is None
    assert not JournalReader(shm / "missing").take_end()
    JournalReader(shm / "missing").release("steps", 5)
    JournalReader(shm / "missing").remove()


def test_appending_a_row_takes_microseconds(shm: Path, identity: Identity) -> None:
    schema = Schema("steps", tuple(Column(f"c{i}", "f8") for i in range(20)))
    journal = JournalWriter(shm / "j", identity)
    stream = journal.open_stream(schema)
    values = [1.0] * 20
    best = min(timeit.repeat(lambda: stream.append(values), number=500, repeat=10)) / 500
    journal.close()
    assert best < 50e-6, f"{best * 1e6:.1f} us; about 5 where nothing else runs"


def test_a_value_of_the_wrong_type_uses_up_no_number(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity)
    stream = journal.open_stream(STEPS)
    with pytest.raises(Exception, match="integer"):
        stream.append(["x", 1.0])  # type: ignore[list-item]
    assert 0 == stream.append([0, 1.0])
    journal.close()


def test_the_event_of_a_note_is_decoded(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity)
    note(journal.open_stream(EVENT_SCHEMA), "hello")
    journal.close()
    batch = JournalReader(shm / "j").read()[0]
    row = next(decode_events(batch.header.stream_schema, batch.rows))
    assert Note(code="test", text="hello") == row.event
    assert (1, 2, 3) == (row.step, row.attempt, row.time_unix_ns)
