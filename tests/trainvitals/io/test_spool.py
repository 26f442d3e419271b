import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest

from tests.trainvitals.io.builders import GB, a_batch, an_identity, fill, firsts, tvs_files
from trainvitals.errors import FormatError, StorageError, UsageError
from trainvitals.identity import Identity
from trainvitals.io import spool as spool_module
from trainvitals.io.spool import Spool, read_batches
from trainvitals.wire import decode_batch


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


def test_what_is_refused_while_its_count_cannot_be_saved_is_counted_once(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, max_bytes=3 * len(a_batch(identity, 0, 5)), keep=True)
    fill(spool, identity, 3)

    def refuse(*args: object, **how: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        for _ in range(4):  # as a tailer does, which reads the rows again
            assert not spool.append(a_batch(identity, 15, 5))
            with pytest.raises(StorageError, match=r"state\.json"):
                spool.sync()
    assert not spool.append(a_batch(identity, 15, 5))
    spool.sync()
    assert 5 == spool.dropped_rows
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
    with pytest.raises(StorageError, match="cannot be created"):
        Spool(tmp_path / "file" / "spool", max_bytes=5, keep=False)


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


def test_streams_that_wrote_longest_ago_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainvitals.io.spool.MAX_WRITERS", 3)
    spool = Spool(tmp_path, max_bytes=GB, keep=False)
    writers = [an_identity() for _ in range(5)]
    for number, writer in enumerate(2 * writers[1:]):
        spool.append(a_batch(writer, number, 1))
        spool.append(a_batch(writers[0], number, 1))
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
        patch.setattr(os, "open", refuse)
        with pytest.raises(StorageError, match="cannot be read"):
            spool.pending(9)
    assert [0, 5] == firsts(spool.pending(9))
    spool.close()


def test_one_thread_appends_while_another_ships(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=False, file_bytes=3_000)
    num, done, shipped = 120, threading.Event(), []

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


class RetainingClock:
    now = 1_000_000.0


def retaining(folder: Path, clock: RetainingClock, **settings: object) -> Spool:
    sizes: dict[str, object] = {"max_bytes": GB, "file_bytes": 4_000, "retain_bytes": GB}
    given = sizes | {"retain_seconds": 100.0} | settings
    return Spool(folder, keep=False, now=lambda: clock.now, **given)  # type: ignore[arg-type]


def ack_all(spool: Spool) -> None:
    spool.ack(spool.pending(1_000)[-1][0])


def test_what_is_acknowledged_stays_for_as_long_as_it_is_to_be_retained(
    tmp_path: Path, identity: Identity
) -> None:
    clock = RetainingClock()
    spool = retaining(tmp_path, clock)
    fill(spool, identity, 40)
    ack_all(spool)
    assert [] == spool.pending(9)
    assert 40 == len(list(spool.read(spool.kept_from)))
    assert 0 < spool.retained_bytes < spool.num_bytes
    spool.close()
    clock.now += 99.0
    again = retaining(tmp_path, clock)  # an agent that is restarted counts on
    assert 40 == len(list(again.read(again.kept_from)))
    clock.now += 2.0
    fill(again, identity, 1, first=200)
    ack_all(again)
    left = firsts(list(again.read(again.kept_from)))
    assert 0 < left[0]
    assert 200 == left[-1]
    again.close()


def test_the_bound_takes_the_oldest_acknowledged_first_and_nothing_else(
    tmp_path: Path, identity: Identity
) -> None:
    spool = retaining(tmp_path, RetainingClock(), file_bytes=1_000, retain_bytes=1_500)
    fill(spool, identity, 40)
    middle = spool.pending(1_000)[19][0]
    spool.ack(middle)
    assert 0 < spool.retained_bytes <= 1_500
    left = firsts(list(spool.read(spool.kept_from)))
    assert list(range(left[0], 200, 5)) == left
    assert 0 < left[0] <= 95
    assert 20 == len(spool.pending(1_000))
    spool.close()


def test_a_full_spool_drops_what_is_acknowledged_before_what_is_not(
    tmp_path: Path, identity: Identity
) -> None:
    spool = retaining(tmp_path, RetainingClock(), max_bytes=20_000, file_bytes=2_000)
    fill(spool, identity, 40)
    ack_all(spool)
    dropped = spool.dropped_rows
    assert 0 < spool.retained_bytes
    fill(spool, identity, 10, first=200)
    assert (dropped, 10) == (spool.dropped_rows, len(spool.pending(1_000)))
    spool.close()


def test_on_a_full_disk_what_is_acknowledged_makes_room(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = retaining(tmp_path, RetainingClock())
    fill(spool, identity, 40)
    ack_all(spool)
    room = spool.num_bytes
    write = spool_module.write_all

    def write_where_there_is_room(fd: int, raw: bytes, offset: int) -> None:
        if spool.num_bytes + len(raw) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, raw, offset)

    monkeypatch.setattr(spool_module, "write_all", write_where_there_is_room)
    fill(spool, identity, 10, first=200)
    assert (0, 10) == (spool.dropped_rows, len(spool.pending(1_000)))
    spool.close()
