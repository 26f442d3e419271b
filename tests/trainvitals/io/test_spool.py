import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainvitals.io.builders import a_batch, an_identity
from trainvitals.errors import FormatError, StorageError, UsageError
from trainvitals.identity import Identity
from trainvitals.io.spool import Position, Spool, read_batches
from trainvitals.wire import decode_batch, frame

GB = 1 << 30


def fill(spool: Spool, identity: Identity, num: int, *, rows: int = 5, first: int = 0) -> None:
    for i in range(num):
        assert spool.append(a_batch(identity, first + i * rows, rows))
    spool.sync()


def firsts(found: list[tuple[Position, bytes]]) -> list[int]:
    return [decode_batch(raw).header.first_seq for _, raw in found]


def tvs_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tvs"))


def test_batches_come_back_as_they_went_in_until_acknowledged(
    tmp_path: Path, identity: Identity
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    fill(spool, identity, 4)
    pending = spool.pending(3)
    assert [a_batch(identity, i * 5, 5) for i in range(3)] == [raw for _, raw in pending]
    assert [0, 5, 10] == firsts(spool.pending(3))
    spool.ack(pending[1][0])
    assert [10, 15] == firsts(spool.pending(9))
    spool.ack(pending[0][0])  # an older one takes nothing back
    assert [10, 15] == firsts(spool.pending(9))
    spool.close()


def test_acknowledgements_and_last_numbers_survive_a_restart(
    tmp_path: Path, identity: Identity
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    fill(spool, identity, 3)
    spool.append(a_batch(identity, 0, 2, stream="scalars"))
    spool.ack(spool.pending(2)[1][0])
    spool.close()
    again = Spool(tmp_path, max_bytes=GB, keep=False)
    assert [10, 0] == firsts(again.pending(9))
    key = (identity.run_id, identity.incarnation)
    assert {(*key, "steps"): 14, (*key, "scalars"): 1} == again.last_seqs()
    fill(again, identity, 1, first=15)
    assert [10, 0, 15] == firsts(again.pending(9))
    again.close()


@pytest.mark.parametrize("state", [None, b"", b"{torn", b"[]"])
def test_without_its_state_everything_is_sent_again(
    tmp_path: Path, identity: Identity, state: bytes | None
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    fill(spool, identity, 3)
    spool.ack(spool.pending(3)[-1][0])
    spool.close()
    (tmp_path / "state.json").unlink()
    if state is not None:
        (tmp_path / "state.json").write_bytes(state)
    again = Spool(tmp_path, max_bytes=GB, keep=False)
    assert [0, 5, 10] == firsts(again.pending(9))
    assert 14 == again.last_seqs()[(identity.run_id, identity.incarnation, "steps")]
    again.close()


def test_acknowledged_files_are_freed_and_history_is_not(
    tmp_path: Path, identity: Identity
) -> None:
    for keep in (False, True):
        folder = tmp_path / str(keep)
        spool = Spool(folder, max_bytes=GB, keep=keep, file_bytes=2_000)
        fill(spool, identity, 12)
        before = len(tvs_files(folder))
        spool.ack(spool.pending(99)[-1][0])
        assert [] == spool.pending(9)
        assert (before if keep else 1) == len(tvs_files(folder))
        assert spool.num_bytes == sum(p.stat().st_size for p in tvs_files(folder))
        fill(spool, identity, 1, first=60)
        assert [60] == firsts(spool.pending(9))
        spool.close()
        assert (13 if keep else 1) <= len(list(read_batches(folder)))


def test_at_the_bound_the_oldest_go_and_are_counted(tmp_path: Path, identity: Identity) -> None:
    size = len(a_batch(identity, 0, 5))
    spool = Spool(tmp_path, max_bytes=8 * size, keep=False)
    fill(spool, identity, 20)
    assert spool.num_bytes <= 8 * size
    kept = firsts(spool.pending(99))
    assert list(range(kept[0], 100, 5)) == kept
    assert 100 == 5 * len(kept) + spool.dropped_rows
    spool.close()
    again = Spool(tmp_path, max_bytes=8 * size, keep=False)
    assert 100 - 5 * len(kept) == again.dropped_rows
    again.close()


def test_what_was_acknowledged_is_not_counted_as_dropped(
    tmp_path: Path, identity: Identity
) -> None:
    size = len(a_batch(identity, 0, 5))
    spool = Spool(tmp_path, max_bytes=8 * size, keep=False)
    fill(spool, identity, 8)
    spool.ack(spool.pending(99)[-1][0])
    fill(spool, identity, 7, first=40)
    assert 0 == spool.dropped_rows
    spool.close()


def test_history_that_is_full_refuses_and_counts(tmp_path: Path, identity: Identity) -> None:
    size = len(a_batch(identity, 0, 5))
    spool = Spool(tmp_path, max_bytes=3 * size, keep=True)
    fill(spool, identity, 3)
    assert not spool.append(a_batch(identity, 15, 5))
    assert 5 == spool.dropped_rows
    assert [0, 5, 10] == firsts(spool.pending(9))
    spool.close()


def test_a_batch_larger_than_the_spool_is_refused(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=100, keep=False)
    assert not spool.append(a_batch(identity, 0, 5))
    assert 5 == spool.dropped_rows
    spool.close()


def test_bytes_that_are_no_batch_are_not_taken(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    for raw in (b"", b"TVB1", a_batch(identity, 0, 5)[:-1], a_batch(identity, 0, 5) + b"x"):
        with pytest.raises(FormatError):
            spool.append(raw)
    assert 0 == spool.num_bytes
    spool.close()


def test_a_spool_needs_room(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_bytes is 0"):
        Spool(tmp_path, max_bytes=0, keep=False)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        Spool(tmp_path / "file" / "spool", max_bytes=5, keep=False)


def test_a_file_torn_at_any_byte_keeps_the_batches_before(
    tmp_path: Path, identity: Identity
) -> None:
    one = a_batch(identity, 0, 1)
    whole = b"".join(a_batch(identity, i, 1) for i in range(3))
    for size in range(0, len(whole), 7):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "000000.tvs").write_bytes(whole[:size])
        expected = size // len(one)
        assert list(range(expected)) == firsts(list(read_batches(folder)))
        spool = Spool(folder, max_bytes=GB, keep=True)
        assert expected * len(one) == spool.num_bytes == (folder / "000000.tvs").stat().st_size
        fill(spool, identity, 1, first=7)
        assert [*range(expected), 7] == firsts(spool.pending(9))
        assert 0 == spool.corrupt
        spool.close()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_loses_its_batch_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    identity = an_identity()
    batches = [a_batch(identity, 3 * i, 3) for i in range(5)]
    offset = data.draw(st.integers(0, sum(map(len, batches[:4])) - 1))
    raw = bytearray(b"".join(batches))
    raw[offset] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "000000.tvs").write_bytes(raw)
    hit = offset // len(batches[0])
    expected = [3 * i for i in range(5) if i != hit]
    assert expected == firsts(list(read_batches(folder)))
    spool = Spool(folder, max_bytes=GB, keep=False)
    assert expected == firsts(spool.pending(9))
    assert 1 == spool.corrupt
    spool.close()


def test_damage_at_the_end_of_an_older_file_is_counted(tmp_path: Path, identity: Identity) -> None:
    (tmp_path / "000000.tvs").write_bytes(a_batch(identity, 0, 1) + b"TVB2 torn")
    (tmp_path / "000001.tvs").write_bytes(a_batch(identity, 1, 1))
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    assert [0, 1] == firsts(spool.pending(9))
    assert 1 == spool.corrupt
    spool.close()


def test_a_batch_of_a_newer_version_is_passed_on(tmp_path: Path, identity: Identity) -> None:
    head = msgspec.msgpack.encode({"version": 99, "unheard": "of"})
    newer = frame(decode_batch(a_batch(identity, 0, 1)).header, head, b"")
    (tmp_path / "000000.tvs").write_bytes(newer + a_batch(identity, 0, 1))
    assert [newer, a_batch(identity, 0, 1)] == [raw for _, raw in read_batches(tmp_path)]
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    assert 0 == spool.corrupt
    spool.close()


def test_state_that_knows_more_than_the_disk_is_cut_back(
    tmp_path: Path, identity: Identity
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    fill(spool, identity, 3)
    spool.ack(spool.pending(3)[-1][0])
    spool.close()
    os.truncate(tmp_path / "000000.tvs", 2 * len(a_batch(identity, 0, 5)))  # the disk lied
    again = Spool(tmp_path, max_bytes=GB, keep=True)
    fill(again, identity, 1, first=50)
    assert [50] == firsts(again.pending(9))
    again.close()


def test_a_full_disk_leaves_the_spool_as_it_was(small_tmpfs: Path, identity: Identity) -> None:
    spool = Spool(small_tmpfs / "spool", max_bytes=GB, keep=True)
    appended = 0
    with pytest.raises(StorageError, match="nothing was added"):
        for i in range(100):
            spool.append(a_batch(identity, 100 * i, 100))
            appended += 1
    assert appended > 5
    with pytest.raises(StorageError, match="nothing was added"):
        spool.append(a_batch(identity, 0, 2000))
    assert [100 * i for i in range(appended)] == firsts(spool.pending(999))
    size = sum(path.stat().st_size for path in tvs_files(small_tmpfs / "spool"))
    assert spool.num_bytes == size
    with pytest.raises(StorageError, match=r"state\.json"):
        spool.close()
    again = Spool(small_tmpfs / "spool", max_bytes=GB, keep=True)
    assert [100 * i for i in range(appended)] == firsts(again.pending(999))
    again.close()


def test_a_flipped_bit_in_the_state_is_seen_and_nothing_is_passed_over(
    tmp_path: Path, identity: Identity
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    fill(spool, identity, 3)
    spool.ack(spool.pending(1)[0][0])
    spool.close()
    whole = (tmp_path / "state.json").read_bytes()
    for offset in range(len(whole)):
        raw = bytearray(whole)
        raw[offset] ^= 1
        (tmp_path / "state.json").write_bytes(raw)
        again = Spool(tmp_path, max_bytes=GB, keep=False)
        assert firsts(again.pending(9)) in ([0, 5, 10], [5, 10])
        assert {14} == set(again.last_seqs().values())


def test_what_lay_in_a_hole_of_the_last_file_is_asked_of_its_writer_again(
    tmp_path: Path, identity: Identity
) -> None:
    first, second, third = (a_batch(identity, 5 * i, 5) for i in range(3))
    torn = first + bytes(len(second)) + third  # the power was lost before it was synced
    (tmp_path / "000000.tvs").write_bytes(torn)
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    assert {4} == set(spool.last_seqs().values())
    assert [0, 10] == firsts(spool.pending(9))
    spool.close()
    (tmp_path / "state.json").unlink(missing_ok=True)
    (tmp_path / "000001.tvs").write_bytes(a_batch(identity, 15, 5))
    again = Spool(tmp_path, max_bytes=GB, keep=True)  # what is behind a later file was synced
    assert {19} == set(again.last_seqs().values())
    again.close()


def test_streams_that_wrote_longest_ago_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainvitals.io.spool.MAX_WRITERS", 3)
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    writers = [an_identity() for _ in range(5)]
    for first in (0, 1):
        spool.append(a_batch(writers[0], first, 1))
        for writer in writers[1:]:
            spool.append(a_batch(writer, first, 1))
            spool.append(a_batch(writers[0], 2 + first, 1))
            spool.sync()
    kept = {writer.incarnation for writer in (writers[0], *writers[3:])}
    assert kept == {key[1] for key in spool.last_seqs()}
    spool.close()
    again = Spool(tmp_path, max_bytes=GB, keep=False)
    assert kept == {key[1] for key in again.last_seqs()}
    again.close()


def test_a_large_spool_is_taken_up_by_reading_only_what_is_new(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=True, file_bytes=2_000)
    fill(spool, identity, 40)
    spool.close()
    looked: list[tuple[str, int]] = []

    def counted(file: BinaryIO, offset: int, *, complete: bool) -> Iterator[tuple[int, bytes]]:
        looked.append((Path(file.name).name, offset))
        return iter(())

    monkeypatch.setattr("trainvitals.io.spool.scan_file", counted)
    newest = tvs_files(tmp_path)[-1]
    again = Spool(tmp_path, max_bytes=GB, keep=True)
    assert [(newest.name, newest.stat().st_size)] == looked
    assert {199} == set(again.last_seqs().values())
    again.close()


def test_damage_of_any_length_is_searched_in_pieces(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainvitals.io.spool_files._CHUNK_BYTES", 64)
    batch = a_batch(identity, 5, 5)
    for size in range(120, 200):  # the next one begins at each place of a piece
        damage = (b"TVB2" * size)[:size]
        (tmp_path / "000000.tvs").write_bytes(damage + batch)
        assert [5] == firsts(list(read_batches(tmp_path)))


def test_damage_of_gigabytes_takes_no_memory(tmp_path: Path, identity: Identity) -> None:
    path = tmp_path / "000000.tvs"
    with path.open("wb") as file:
        file.truncate(1 << 27)
        file.seek(1 << 27)
        file.write(a_batch(identity, 5, 5))
    tracemalloc.start()
    try:
        assert [5] == firsts(list(read_batches(tmp_path)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "rename", "ftruncate"])
def test_a_call_that_always_fails_is_our_own_error_and_costs_nothing_synced(
    tmp_path: Path, identity: Identity, call: str
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False, file_bytes=2_000)
    fill(spool, identity, 8)

    def refuse(*args: object, **how: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        for i in range(8, 12):
            with contextlib.suppress(StorageError):
                spool.append(a_batch(identity, 5 * i, 5))
            with contextlib.suppress(StorageError):
                spool.sync()
        with contextlib.suppress(StorageError):
            spool.close()
    again = Spool(tmp_path, max_bytes=GB, keep=False)
    assert list(range(0, 40, 5)) == firsts(again.pending(8))
    assert len(tvs_files(tmp_path)) < 12
    again.close()


def test_what_cannot_be_read_now_is_our_own_error(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    fill(spool, identity, 2)

    def refuse(*args: object, **how: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(StorageError, match="cannot be read"):
            spool.pending(9)
    assert [0, 5] == firsts(spool.pending(9))
    spool.close()


def test_one_thread_appends_while_another_ships(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False, file_bytes=3_000)
    num, done, shipped = 300, threading.Event(), []

    def ship() -> None:
        while True:
            is_last = done.is_set()
            for position, raw in spool.pending(7):
                shipped.append(raw)
                spool.ack(position)
            if is_last and not spool.pending(1):
                return

    thread = threading.Thread(target=ship)
    thread.start()
    for i in range(num):
        spool.append(a_batch(identity, 5 * i, 5))
        spool.sync()
    done.set()
    thread.join(60)
    assert [5 * i for i in range(num)] == [decode_batch(raw).header.first_seq for raw in shipped]
    spool.close()
    assert 0 == spool.dropped_rows


# ------------------------------------------------------------------------ another reader


def test_a_third_process_reads_on_from_where_it_was(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=True, file_bytes=2_000)
    position: Position | None = None
    seen: list[int] = []
    for i in range(20):
        fill(spool, identity, 1, first=5 * i)
        found = list(read_batches(tmp_path, position))
        seen += firsts(found)
        position = found[-1][0]
    assert list(range(0, 100, 5)) == seen
    assert [] == list(read_batches(tmp_path, position))
    assert len(tvs_files(tmp_path)) > 1
    spool.close()


def test_a_batch_that_is_still_arriving_is_waited_for(tmp_path: Path, identity: Identity) -> None:
    whole = a_batch(identity, 0, 5) + a_batch(identity, 5, 5)
    path = tmp_path / "000000.tvs"
    path.write_bytes(whole[:-1])
    found = list(read_batches(tmp_path))
    assert [0] == firsts(found)
    path.write_bytes(whole)
    assert [5] == firsts(list(read_batches(tmp_path, found[-1][0])))


def test_a_hole_in_a_growing_file_is_waited_for_and_later_passed_over(
    tmp_path: Path, identity: Identity
) -> None:
    first, second = a_batch(identity, 0, 5), a_batch(identity, 5, 5)
    path = tmp_path / "000000.tvs"
    path.write_bytes(bytes(len(first)) + second)  # over NFS: the later page came first
    changed = path.stat().st_mtime
    assert [] == list(read_batches(tmp_path, now=changed + 1))
    path.write_bytes(first + second)
    assert [0, 5] == firsts(list(read_batches(tmp_path, now=changed + 1)))
    path.write_bytes(bytes(len(first)) + second)
    assert [5] == firsts(list(read_batches(tmp_path, now=path.stat().st_mtime + 60)))


@pytest.mark.parametrize(("age", "is_waited_for"), [(-86_400, False), (-60, True), (29, True)])
def test_a_clock_that_was_set_back_holds_up_no_reader(
    tmp_path: Path, identity: Identity, age: int, is_waited_for: bool
) -> None:
    first, second = a_batch(identity, 0, 5), a_batch(identity, 5, 5)
    path = tmp_path / "000000.tvs"
    path.write_bytes(bytes(len(first)) + second)
    found = list(read_batches(tmp_path, now=path.stat().st_mtime + age))
    assert ([] if is_waited_for else [5]) == firsts(found)


def test_a_folder_without_a_spool_is_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.tvs").write_text("not ours")
    assert [] == list(read_batches(tmp_path))
    assert [] == list(read_batches(tmp_path / "missing"))


CHILD = """
import os, sys
from pathlib import Path
from tests.trainvitals.io.builders import a_batch
from trainvitals.identity import Identity
from trainvitals.io.spool import Spool
identity = Identity(sys.argv[2], "0" * 16, "rank:0", "node-a")
spool = Spool(Path(sys.argv[1]), max_bytes=1 << 30, keep=True, file_bytes=20_000)
for i in range(10**9):
    spool.append(a_batch(identity, 5 * i, 5))
    spool.sync()
    os.write(1, i.to_bytes(4, "little"))
"""


def test_what_a_killed_owner_synced_is_there(tmp_path: Path, run_id: str) -> None:
    arguments = [sys.executable, "-c", CHILD, str(tmp_path), run_id]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read(4 * 100)
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    child.wait()
    child.stdout.close()
    promised = 100 + len(rest) // 4
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    found = firsts(spool.pending(10**9))
    assert list(range(0, 5 * len(found), 5)) == found
    assert len(found) >= promised
    assert 0 == spool.corrupt
    assert found[-1] + 4 == spool.last_seqs()[(run_id, "0" * 16, "steps")]
    spool.close()
