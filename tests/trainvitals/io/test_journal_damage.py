import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainvitals.io.builders import STEPS, list_segments, note, seqs_of, values_of
from trainvitals.errors import NewerVersionError
from trainvitals.identity import Identity
from trainvitals.io import segments
from trainvitals.io.journal import JournalReader, JournalWriter, StreamWriter
from trainvitals.io.segments import CLOSED
from trainvitals.records import EVENT_SCHEMA, decode_events


def write_steps(folder: Path, identity: Identity, num_rows: int, *, close: bool = True) -> Path:
    """Write the rows into segments of 4 KiB; return the first one's path."""
    journal = JournalWriter(folder, identity, segment_bytes=4096)
    stream = journal.open_stream(STEPS)
    for i in range(num_rows):
        stream.append([i, float(i)])
    journal.close()
    if not close:
        (folder / CLOSED).unlink()
    return list_segments(folder)["steps"][0][1]


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def read_all(folder: Path) -> tuple[list[int], JournalReader]:
    """Read to the end; check that each row's values are those of its number."""
    reader = JournalReader(folder)
    seqs: list[int] = []
    while batches := reader.read():
        seqs += seqs_of(batches)
        assert [float(s) for s in seqs_of(batches)] == values_of(batches)
    return seqs, reader


# --------------------------------------------------------------------------- full memory


def test_a_full_memory_is_counted_and_never_kills(small_tmpfs: Path, identity: Identity) -> None:
    journal = JournalWriter(small_tmpfs / "j", identity, segment_bytes=4096, max_share=1.0)
    stream = journal.open_stream(STEPS)
    stream.append([0, 0.0])
    status = os.statvfs(small_tmpfs)
    (small_tmpfs / "hog").write_bytes(bytes(status.f_bavail * status.f_frsize))
    for i in range(1, 1_000):
        assert i == stream.append([i, float(i)])
    assert 0 < journal.dropped < 1_000
    assert errno.ENOSPC == getattr(journal.last_error, "errno", None)
    (small_tmpfs / "hog").unlink()
    for i in range(1_000, 1_200):
        stream.append([i, float(i)])
    journal.close()
    seqs, reader = read_all(small_tmpfs / "j")
    assert 1_199 == seqs[-1]
    assert 1_200 == len(seqs) + reader.dropped
    assert reader.take_end()


def test_a_journal_takes_only_its_share_of_a_small_memory(
    small_tmpfs: Path, identity: Identity
) -> None:
    journal = JournalWriter(small_tmpfs / "j", identity)  # 5 % of 64 KiB is less than one page
    stream = journal.open_stream(STEPS)
    for i in range(10):
        assert i == stream.append([i, 0.0])
    assert 10 == journal.dropped
    journal.close()
    reader = JournalReader(small_tmpfs / "j")
    assert [] == reader.read()
    assert reader.take_end()
    assert 10 == reader.dropped


def test_the_last_lost_rows_are_known_by_the_writers_word(shm: Path, identity: Identity) -> None:
    journal = JournalWriter(shm / "j", identity, max_bytes=1 << 16)
    events = journal.open_stream(EVENT_SCHEMA)
    note(events, "small")
    note(events, "x" * (1 << 16))  # more than half of the bound: refused
    assert 71 == journal.dropped
    journal.close()
    reader = JournalReader(shm / "j")
    assert 1 == len(seqs_of(reader.read(), "events"))
    assert reader.take_end()
    assert 71 == reader.dropped


# -------------------------------------------------------------------------- a slow disk


def test_a_disk_that_blocks_never_blocks_the_writer(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, go_on = threading.Event(), threading.Event()
    store = StreamWriter._write_rows

    def slow(self: StreamWriter, *args: object) -> None:
        blocked.set()
        go_on.wait(60)
        store(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("trainvitals.io.journal.is_memory_backed", lambda path: False)
    monkeypatch.setattr(StreamWriter, "_write_rows", slow)
    journal = JournalWriter(tmp_path / "j", identity)
    stream = journal.open_stream(STEPS)
    stream.append([0, 0.0])
    assert blocked.wait(60)
    for i in range(1, 5_000):
        stream.append([i, float(i)])
    assert 4_999 - 2_048 == journal.dropped
    go_on.set()
    journal.close()
    seqs, reader = read_all(tmp_path / "j")
    assert 5_000 == len(seqs) + reader.dropped
    assert [0, 4_999] == [seqs[0], seqs[-1]]


def test_a_disk_that_never_answers_does_not_hold_up_the_end(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def stuck(self: StreamWriter, *args: object) -> None:
        blocked.set()
        go_on.wait(60)

    monkeypatch.setattr("trainvitals.io.journal.is_memory_backed", lambda path: False)
    monkeypatch.setattr("trainvitals.io.journal._CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(StreamWriter, "_write_rows", stuck)
    journal = JournalWriter(tmp_path / "j", identity)
    stream = journal.open_stream(STEPS)
    stream.append([0, 0.0])
    assert blocked.wait(60)
    for i in range(10):
        stream.append([i, 0.0])
    journal.close()
    assert 10 == journal.dropped
    assert not (tmp_path / "j" / CLOSED).exists()
    go_on.set()


# ------------------------------------------------------------------------------- damage


def test_a_segment_torn_at_any_byte_gives_the_rows_before_the_tear(
    shm: Path, identity: Identity
) -> None:
    path = write_steps(shm / "j", identity, 5)
    whole = path.read_bytes()
    header, first_row = segments.read_header(path)
    for size in range(first_row + 6 * STEPS.row_size):
        path.write_bytes(whole[:size])
        seqs, reader = read_all(shm / "j")
        expected = max(0, min(5, (size - first_row) // STEPS.row_size))
        assert list(range(expected)) == seqs
        assert reader.take_end()
        assert 5 == len(seqs) + reader.dropped
    assert identity == header.identity


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_flipped_bit_loses_its_row_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from tests.trainvitals.io.builders import an_identity

    folder = tmp_path_factory.mktemp("flip")
    path = write_steps(folder / "j", an_identity(), 20)
    _, first_row = segments.read_header(path)
    row = data.draw(st.integers(0, 19))
    offset = first_row + row * STEPS.row_size + data.draw(st.integers(0, STEPS.row_size - 1))
    flip_bit(path, offset, data.draw(st.integers(0, 7)))
    seqs, reader = read_all(folder / "j")
    assert [i for i in range(20) if i != row] == seqs
    assert reader.take_end()
    assert 1 == reader.dropped


def test_a_damaged_header_sets_the_segment_aside_and_others_go_on(
    shm: Path, identity: Identity
) -> None:
    path = write_steps(shm / "j", identity, 300)
    flip_bit(path, 30)
    seqs, reader = read_all(shm / "j")
    assert {path} == reader.unreadable_segments
    assert 300 == len(seqs) + reader.dropped
    assert 299 == seqs[-1]
    assert reader.take_end()


@pytest.mark.parametrize("content", [b"", b"TVJ1", bytes(4096), b"TVJ1" + bytes(4092)])
def test_an_empty_or_torn_header_waits_until_the_segment_is_sealed(
    shm: Path, identity: Identity, content: bytes
) -> None:
    path = write_steps(shm / "j", identity, 5, close=False)
    whole = path.read_bytes()
    path.write_bytes(content)
    reader = JournalReader(shm / "j")
    assert [] == reader.read()
    assert set() == reader.unreadable_segments
    path.write_bytes(whole)
    assert [0, 1, 2, 3, 4] == seqs_of(reader.read())


def test_a_newer_segment_is_said_once_and_set_aside(shm: Path, identity: Identity) -> None:
    path = write_steps(shm / "j", identity, 300)
    raw = bytearray(path.read_bytes())
    raw[4:8] = (99).to_bytes(4, "little")
    path.write_bytes(raw)
    reader = JournalReader(shm / "j")
    assert identity == reader.identity
    with pytest.raises(NewerVersionError, match="format version 99") as caught:
        reader.read()
    assert "pip install" in caught.value.hint
    assert 299 == seqs_of(reader.read())[-1]
    assert {path} == reader.unreadable_segments
    assert reader.take_end()


def test_a_segment_that_vanishes_is_counted(shm: Path, identity: Identity) -> None:
    write_steps(shm / "j", identity, 300)
    paths = [path for _, path in list_segments(shm / "j")["steps"]]
    reader = JournalReader(shm / "j")
    first = seqs_of(reader.read(max_rows=10))
    paths[0].unlink()
    paths[1].unlink()
    rest = seqs_of(reader.read())
    assert 300 == len(first) + len(rest) + reader.dropped
    assert reader.dropped > 0


def test_a_segment_that_vanishes_between_look_and_read_is_no_error(
    shm: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_steps(shm / "j", identity, 300)
    reader = JournalReader(shm / "j")
    assert identity == reader.identity
    new_rows = JournalReader._new_rows

    def late(self: JournalReader, wanted: Path) -> object:
        path.unlink(missing_ok=True)
        return new_rows(self, wanted)

    monkeypatch.setattr(JournalReader, "_new_rows", late)
    seqs = seqs_of(reader.read())
    assert seqs[0] > 0
    assert 300 == len(seqs) + reader.dropped


def test_a_row_caught_in_the_middle_of_its_copy_is_not_given_up(
    shm: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_steps(shm / "j", identity, 10, close=False)
    _, first_row = segments.read_header(path)
    read_bytes = segments.read_bytes
    looks = []

    def torn_once(path: Path, offset: int, size: int) -> bytes:
        raw = read_bytes(path, offset, size)
        if path.suffix == ".seg" and offset >= first_row:
            looks.append(1)
            if len(looks) == 1:
                raw = bytes(STEPS.row_size) + raw[STEPS.row_size :]
        return raw

    monkeypatch.setattr("trainvitals.io.journal_reader.read_bytes", torn_once)
    reader = JournalReader(shm / "j")
    assert list(range(10)) == seqs_of(reader.read())
    assert 0 == reader.dropped


def test_a_torn_event_is_waited_for_and_given_up_when_its_writer_is_dead(
    shm: Path, identity: Identity
) -> None:
    journal = JournalWriter(shm / "j", identity)
    events = journal.open_stream(EVENT_SCHEMA)
    note(events, "first")
    note(events, "y" * 2500)  # three rows
    journal.close()
    path = list_segments(shm / "j")["events"][0][1]
    _, first_row = segments.read_header(path)
    whole = path.read_bytes()
    (shm / "j" / CLOSED).unlink()
    torn = first_row + 3 * EVENT_SCHEMA.row_size
    path.write_bytes(whole[:torn] + bytes(len(whole) - torn))
    reader = JournalReader(shm / "j")
    assert [0] == seqs_of(reader.read(), "events")
    assert [] == reader.read()
    path.write_bytes(whole)
    batch = reader.read()[0]
    assert 1 == len(list(decode_events(EVENT_SCHEMA, batch.rows)))
    path.write_bytes(whole[:torn] + bytes(len(whole) - torn))
    (shm / "j" / CLOSED).write_bytes(b"")
    (shm / "j" / CLOSED).chmod(0o600)
    dead = JournalReader(shm / "j")
    assert [0] == seqs_of(dead.read(), "events")
    assert dead.take_end()


def test_foreign_files_in_the_folder_are_passed_over(shm: Path, identity: Identity) -> None:
    write_steps(shm / "j", identity, 3)
    for name in ("steps-000009.tmp", "notes.txt", "other-000000.seg", "steps-x.seg", "-.seg"):
        (shm / "j" / name).touch(mode=0o600)
    seqs, reader = read_all(shm / "j")
    assert [0, 1, 2] == seqs
    assert reader.take_end()
    reader.remove()
    assert not (shm / "j").exists()
