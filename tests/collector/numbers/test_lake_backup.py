"""A copy of a lake that is written to opens, answers, and holds what was stored before it."""

import threading
from pathlib import Path

import pytest

from tests.collector.numbers.written import RUN, batch, identity
from tests.support.numbers import losses, new_lake
from trainvitals.errors import StorageError, UsageError
from vitals_collector.numbers import lake_maintenance
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_sql import LakeReader
from vitals_collector.retention import backup
from vitals_collector.retention.backup import copy_lake

KEY = RUN, identity().incarnation, "steps"


def append(lake: Lake, step: int) -> None:
    """Store one row whose loss is its step."""
    lake.append([batch(identity(), [{"loss": float(step)}], first_seq=step)])


def test_a_copy_made_while_rows_are_stored_and_merged_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_maintenance, "_KEPT_SECONDS", 0)  # files go as soon as they are merged
    lake, over = new_lake(tmp_path / "lake"), threading.Event()
    stored = -1

    def write() -> None:
        nonlocal stored
        while not over.is_set():
            append(lake, stored + 1)
            stored += 1
            if stored % 7 == 0:
                lake.merge()

    append(lake, 0)
    stored = 0
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for i in range(2):
            before = stored
            copied = copy_lake(tmp_path / "lake", tmp_path / f"copy-{i}")
            assert copied.num_files > 0
            restored = Lake(tmp_path / f"copy-{i}")
            last = restored.mark(KEY)
            assert last >= before
            assert losses(restored) == [float(step) for step in range(last + 1)]
            assert restored.check() == []
            restored.close()
    finally:
        over.set()
        writer.join()
        lake.close()


def test_a_copy_goes_on_by_itself_wherever_it_is_put(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    append(lake, 0)
    copy_lake(tmp_path / "lake", tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "moved")
    moved = Lake(tmp_path / "moved")
    append(moved, 1)
    moved.merge()
    append(lake, 1)
    append(lake, 2)
    lake.merge()
    assert losses(moved) == [0.0, 1.0]
    assert losses(lake) == [0.0, 1.0, 2.0]
    moved.close()
    lake.close()


def test_a_copy_answers_sql(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    append(lake, 0)
    lake.close()
    copy_lake(tmp_path / "lake", tmp_path / "copy")
    with LakeReader(tmp_path / "copy") as reader:
        assert reader.ask("SELECT loss FROM steps").rows == [(0.0,)]


def test_a_file_that_is_merged_away_meanwhile_makes_it_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_maintenance, "_KEPT_SECONDS", 0)
    lake = new_lake(tmp_path / "lake")
    for step in range(3):
        append(lake, step)
    copy_catalogue, times = backup._copy_catalogue, []

    def copy_and_merge(source: Path, target: Path) -> None:
        copy_catalogue(source, target)
        times.append(source)
        if len(times) == 1:
            lake.merge()
            lake.merge()

    monkeypatch.setattr(backup, "_copy_catalogue", copy_and_merge)
    copy_lake(tmp_path / "lake", tmp_path / "copy")
    assert len(times) == 2
    restored = Lake(tmp_path / "copy")
    assert losses(restored) == [0.0, 1.0, 2.0]
    restored.close()
    lake.close()


@pytest.mark.nightly
def test_a_checksum_that_is_put_away_meanwhile_makes_it_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path / "lake")
    for step in range(3):
        append(lake, step)
    copy_catalogue, keep, times = backup._copy_catalogue, lake.engine.keep_checksums, []

    def copy_amid_merges(source: Path, target: Path) -> None:
        def copy_and_keep() -> None:
            if len(times) == 1:
                copy_catalogue(source, target)  # it names what was merged, without its checksum
            keep()

        times.append(source)
        if len(times) > 1:
            copy_catalogue(source, target)
            return
        monkeypatch.setattr(lake.engine, "keep_checksums", copy_and_keep)
        lake.merge()
        monkeypatch.undo()
        monkeypatch.setattr(backup, "_copy_catalogue", copy_amid_merges)
        lake.merge()  # the checksum's own file goes

    monkeypatch.setattr(backup, "_copy_catalogue", copy_amid_merges)
    copy_lake(tmp_path / "lake", tmp_path / "copy")
    assert len(times) == 2
    restored = Lake(tmp_path / "copy")
    assert losses(restored) == [0.0, 1.0, 2.0]
    assert restored.check() == []
    restored.close()
    lake.close()


def test_a_file_whose_checksum_is_lost_is_told(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    append(lake, 0)
    lake.engine.execute("DELETE FROM checksums WHERE path LIKE 'steps/%'")
    lake.close()
    with pytest.raises(StorageError, match="replaced each of") as told:
        copy_lake(tmp_path / "lake", tmp_path / "copy")
    assert "checksum" in told.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_a_lost_file_is_told_and_nothing_is_left_half_copied(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    append(lake, 0)
    lake.close()
    (file,) = (tmp_path / "lake" / "data" / "main" / "steps").iterdir()
    file.unlink()
    with pytest.raises(StorageError, match="replaced each of"):
        copy_lake(tmp_path / "lake", tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_what_is_there_is_not_overwritten_and_what_is_no_lake_is_refused(tmp_path: Path) -> None:
    lake = new_lake(tmp_path / "lake")
    lake.close()
    (tmp_path / "copy").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        copy_lake(tmp_path / "lake", tmp_path / "copy")
    with pytest.raises(UsageError, match="does not exist"):
        copy_lake(tmp_path / "copy", tmp_path / "other")
