"""One flipped bit in any file of the lake is told, and what was in it can be sent again, once."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from tests.support.damage import answers, sent
from tests.support.examples import one_in
from tests.support.numbers import new_lake, plain
from trainvitals.errors import StorageError
from vitals_collector.numbers import lake_maintenance
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_damage import DamagedFile
from vitals_collector.numbers.lake_engine import LocalFileStore
from vitals_collector.numbers.memory import MemoryNumberStore


@pytest.fixture(scope="module", params=one_in(3, ["partly merged", "merged", "never merged"]))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a lake with what was sent."""
    folder = tmp_path_factory.mktemp("whole")
    lake, batches = new_lake(folder), sent()
    lake.append(batches[:4])
    if request.param == "partly merged":
        lake.merge()
    lake.append(batches[4:])
    if request.param == "merged":
        lake.merge()
    lake.close()
    return folder


@pytest.mark.parametrize(
    "files",
    [
        "rows",
        pytest.param("one of each table", marks=pytest.mark.nightly),
        pytest.param("all", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_any_file_is_told_and_its_rows_are_taken_again_once(
    whole: Path, tmp_path: Path, files: str
) -> None:
    expected = MemoryNumberStore()
    expected.append(sent())
    lake = Lake(whole)
    assert lake.check() == []
    live = {path for path, is_live, _ in _listed(lake) if is_live}
    lake.close()
    rng = random.Random(5)
    assert {path.split("/")[0] for path in live} >= {"steps"}
    by_table = {path.split("/")[0]: path for path in rng.sample(sorted(live), len(live))}
    chosen = {"all": live, "rows": [by_table["steps"]]}.get(files, by_table.values())
    for path in sorted(chosen):
        folder = tmp_path / path.replace("/", "-")
        shutil.copytree(whole, folder)
        file = folder / "data" / "main" / path
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        _check_repair(folder, path, expected)
        shutil.rmtree(folder)


def _listed(lake: Lake) -> list[tuple[str, bool, object]]:
    tables = ("steps", "outlines", "marks", "new_marks")
    return [row for table in tables for row in lake.engine.files.list_table_files(table)]


def _check_repair(folder: Path, path: str, expected: MemoryNumberStore) -> None:
    lake = Lake(folder)
    refused = 0
    for run in (RUN, OTHER_RUN):
        try:
            assert answers(lake, run) == answers(expected, run)
        except StorageError as error:
            refused += 1
            assert path in str(error)
    assert refused > 0
    (damaged,) = lake.check()
    assert damaged.path == path
    assert damaged.run_ids
    try:
        lake.merge()  # if all files are merged, nothing is read
    except StorageError as error:
        assert "damaged" in str(error)
    assert [file.path for file in lake.check()] == [path]
    assert [file.path for file in lake.drop_damaged_files()] == [path]
    assert lake.check() == []
    lost = sum(
        end - first
        for run in (RUN, OTHER_RUN)
        for rank in (0, 1)
        for first, end in lake.missing((run, identity(run, rank=rank).incarnation, "steps"))
    )
    assert lost == (damaged.num_rows if damaged.table == "steps" else 0)
    lake.merge()
    assert sum(lake.append(sent())) == lost
    assert sum(lake.append(sent())) == 0
    for _ in range(2):
        for run in (RUN, OTHER_RUN):
            assert answers(lake, run) == answers(expected, run)
        lake.merge()
    lake.close()
    lake = Lake(folder)
    assert sum(lake.append(sent())) == 0
    lake.close()


def _cut(catalogue: Path) -> None:
    catalogue.write_bytes(catalogue.read_bytes()[: catalogue.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "has no tables, but .* has rows"),
        (lambda catalogue: catalogue.write_bytes(b""), "has no tables, but .* has rows"),
        (lambda catalogue: catalogue.write_bytes(bytes(1 << 16)), "catalogue.sqlite is damaged"),
        (_cut, "catalogue.sqlite is damaged"),
    ],
    ids=["gone", "empty", "zeros", "half"],
)
def test_a_lake_without_its_catalogue_is_refused_with_the_way_out_and_keeps_its_files(
    whole: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "lake"
    shutil.copytree(whole, folder)
    damage(folder / "catalogue.sqlite")
    files = set(folder.rglob("*.parquet"))
    for _ in range(2):  # the first try makes another catalogue in the place of a missing one
        with pytest.raises(StorageError, match=said) as refused:
            Lake(folder)
        assert "vitals store backup" in refused.value.hint
    assert files == set(folder.rglob("*.parquet"))


def test_a_file_that_another_collector_has_merged_away_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_maintenance, "_KEPT_SECONDS", 0)
    with contextlib.closing(new_lake(tmp_path)) as lake:
        for run in (RUN, OTHER_RUN):
            lake.append([batch(identity(run), [{"loss": 1.0}])])
    with contextlib.closing(Lake(tmp_path)) as lake, contextlib.closing(Lake(tmp_path)) as other:
        assert plain(lake.scan(RowSpan(RUN, "steps"), ["loss"])["loss"]) == [1.0]  # sees both files
        other.merge()
        other.merge()
        assert len(list((tmp_path / "data" / "main" / "steps").iterdir())) == 1
        assert plain(lake.scan(RowSpan(OTHER_RUN, "steps"), ["loss"])["loss"]) == [1.0]
        assert lake.check() == []


@pytest.mark.parametrize("looked_by", [Lake.check, Lake.drop_damaged_files])
def test_rows_are_stored_and_read_while_files_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_by: Callable[[Lake], list[DamagedFile]]
) -> None:
    lake = new_lake(tmp_path)
    lake.append([batch(identity(), [{"loss": 1.0}])])
    (file,) = (tmp_path / "data" / "main" / "steps").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    is_read, may_go_on, crc = threading.Event(), threading.Event(), LocalFileStore.crc

    def slow_crc(place: LocalFileStore, path: str) -> int | None:
        if path.endswith(file.name):
            is_read.set()
            assert may_go_on.wait(60.0)
        return crc(place, path)

    monkeypatch.setattr(LocalFileStore, "crc", slow_crc)
    file.write_bytes(content)
    with ThreadPoolExecutor(2) as pool:
        looking = pool.submit(looked_by, lake)
        try:
            assert is_read.wait(60.0)
            other = identity(OTHER_RUN)
            assert pool.submit(lake.append, [batch(other, [{"loss": 2.0}])]).result(60.0) == [1]
            losses = pool.submit(lake.scan, RowSpan(OTHER_RUN, "steps"), ["loss"]).result(60.0)
            assert plain(losses["loss"]) == [2.0]
        finally:
            may_go_on.set()
        assert [damaged.path for damaged in looking.result()] == [f"steps/{file.name}"]
    lake.close()
