import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainvitals.io.builders import GB, a_batch, an_identity, fill, firsts, tvs_files
from trainvitals.identity import Identity
from trainvitals.io.spool import Spool, SpoolPosition, read_batches
from trainvitals.wire import decode_batch, frame_batch


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


@settings(max_examples=examples(50), deadline=None)
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


def test_a_header_lies_once_in_a_stretch_and_damage_to_it_costs_that_stretch_of_its_writer(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = an_identity(source="rank:1")
    size = len(a_batch(identity, 0, 1))
    monkeypatch.setattr("trainvitals.io.spool_files.HEADER_EVERY_BYTES", 3 * size)
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    written = [a_batch(who, i, 1) for i in range(60) for who in (identity, other)]
    for raw in written:
        spool.append(raw)
    spool.close()
    (path,) = tvs_files(tmp_path)
    assert written == [raw for _, raw in read_batches(tmp_path)]
    raw = bytearray(path.read_bytes())
    whole = raw.count(b"TVB2")
    assert 4 <= whole <= 60
    assert len(raw) < len(written) * size / 2
    raw[60] ^= 4  # within the first header
    path.write_bytes(raw)
    found = [decode_batch(raw).header for _, raw in read_batches(tmp_path)]
    assert list(range(60)) == [h.first_seq for h in found if h.identity == other]
    kept = [h.first_seq for h in found if h.identity == identity]
    assert list(range(kept[0], 60)) == kept
    assert 0 < kept[0] <= 60 * 2 // whole + 1
    again = Spool(tmp_path, max_bytes=GB, keep=True)
    assert len(kept) + 60 == len(again.pending(999))
    assert again.corrupt
    again.close()


def test_batches_of_one_writer_share_one_header_in_a_short_file(
    tmp_path: Path, identity: Identity
) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    fill(spool, identity, 20)
    spool.close()
    (path,) = tvs_files(tmp_path)
    assert (1, 19) == (path.read_bytes().count(b"TVB2"), path.read_bytes().count(b"TVS2"))


def test_damage_at_the_end_of_an_older_file_is_counted(tmp_path: Path, identity: Identity) -> None:
    (tmp_path / "000000.tvs").write_bytes(a_batch(identity, 0, 1) + b"TVB2 torn")
    (tmp_path / "000001.tvs").write_bytes(a_batch(identity, 1, 1))
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    assert [0, 1] == firsts(spool.pending(9))
    assert 1 == spool.corrupt
    spool.close()


def test_a_batch_of_a_newer_version_is_passed_on(tmp_path: Path, identity: Identity) -> None:
    head = msgspec.msgpack.encode({"version": 99, "unheard": "of"})
    newer = frame_batch(decode_batch(a_batch(identity, 0, 1)).header, head, b"")
    (tmp_path / "000000.tvs").write_bytes(newer + a_batch(identity, 0, 1))
    assert [newer, a_batch(identity, 0, 1)] == [raw for _, raw in read_batches(tmp_path)]
    spool = Spool(tmp_path, max_bytes=GB, keep=True)
    assert 0 == spool.corrupt
    spool.close()


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


def test_damage_of_any_length_is_searched_in_pieces(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainvitals.io.spool_files._CHUNK_BYTES", 64)
    batch = a_batch(identity, 5, 5)
    for size in range(120, 200):  # the next one begins at each place of a piece
        damage = (b"TVB2" * size)[:size]
        (tmp_path / "000000.tvs").write_bytes(damage + batch)
        assert [5] == firsts(list(read_batches(tmp_path)))


def test_a_sparse_file_of_a_terabyte_is_read_up_to_what_one_may_hold(
    tmp_path: Path, identity: Identity
) -> None:
    path = tmp_path / "000000.tvs"
    path.write_bytes(a_batch(identity, 0, 5))
    os.truncate(path, 1 << 40)
    (tmp_path / "000001.tvs").write_bytes(a_batch(identity, 5, 5))
    assert [0, 5] == firsts(list(read_batches(tmp_path)))


def test_damage_of_megabytes_takes_no_memory(tmp_path: Path, identity: Identity) -> None:
    path = tmp_path / "000000.tvs"
    with path.open("wb") as file:
        file.truncate(1 << 25)
        file.seek(1 << 25)
        file.write(a_batch(identity, 5, 5))
    tracemalloc.start()
    try:
        assert [5] == firsts(list(read_batches(tmp_path)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_a_third_process_reads_on_from_where_it_was(tmp_path: Path, identity: Identity) -> None:
    spool = Spool(tmp_path, max_bytes=GB, keep=True, file_bytes=2_000)
    position: SpoolPosition | None = None
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
