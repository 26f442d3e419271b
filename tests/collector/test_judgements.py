"""A long run in a directory: judged once, continued by the next reader, or judged apart."""

import os
import time
from pathlib import Path

import pytest

from tests.collector.rows import RUN, Writer
from trainvitals.io.rundir import RunDir
from trainvitals.io.setting_paths import default_cache_dir
from trainvitals.io.spool import Spool
from trainvitals.records import AttemptStarted, RunEnded, RunInfo, RunStarted
from trainvitals.views import AlertsQuestion, FindingsQuestion, FindingView, VerdictQuestion
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.live.live_monitor import count_unwatched_rows
from vitals_collector.queries.judgements import BackgroundJudge, JudgementCache
from vitals_collector.queries.open import OpenedReader, open_folder
from vitals_collector.storage.store import Store, open_store

NUM = 5_000
"""Steps of the run: enough for the cache."""


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def writer() -> Writer:
    return Writer(world_size=1)


def write_run(folder: Path, writer: Writer, num: int = NUM) -> Path:
    """Write a run whose learning rate jumps; return the directory of runs."""
    spool = Spool(RunDir.create(folder, RUN).agent_dir("a") / "spool", max_bytes=1 << 26, keep=True)
    started = RunStarted(info=RunInfo(name="long", world_size=1))
    attempt = AttemptStarted(id=1, parent=None, fork_step=0, reason="start")
    spool.append(writer.events(started, attempt))
    for first in range(0, num, 500):
        steps = range(first, first + 500)
        rates = [1e-3 if step < 700 else 0.05 for step in steps]
        losses = [2.0 + 0.01 * (step % 7) for step in steps]
        spool.append(writer.steps(steps, loss=losses, learning_rate=rates))
    spool.append(writer.events(RunEnded(state="finished"), step=num - 1))
    spool.close()
    return folder


def findings_of(opened: OpenedReader) -> list[FindingView]:
    return list(opened.reader.ask(FindingsQuestion(run_id=RUN)))


def read_store(folder: Path) -> Store:
    store = open_store("sqlite://")
    FolderIngest(store, [folder]).poll()
    return store


def cached(home: Path) -> JudgementCache:
    return JudgementCache(home / "trainvitals" / "judgements")


def file_of(home: Path) -> Path:
    return home / "trainvitals" / "judgements" / f"{RUN}.judged"


def num_unwatched(store: Store) -> int:
    with store.read_transaction() as connection:
        return count_unwatched_rows(connection, RUN).num_rows


def test_the_next_reader_continues_from_what_the_first_one_judged(
    tmp_path: Path, cache_home: Path, writer: Writer
):
    folder = write_run(tmp_path / "runs", writer)
    with open_folder(folder) as opened:
        first = findings_of(opened)
    assert [("learning_rate", 700)] == [(v.finding.kind, v.finding.step) for v in first]
    assert 0o600 == file_of(cache_home).stat().st_mode & 0o777
    store = read_store(folder)
    assert NUM == num_unwatched(store)
    assert cached(cache_home).load(store, RUN)
    assert 0 == num_unwatched(store)
    store.close()
    with open_folder(folder) as opened:
        assert first == findings_of(opened)


def test_rows_that_came_later_are_judged_after_the_cached_ones(
    tmp_path: Path, cache_home: Path, writer: Writer
):
    folder = write_run(tmp_path / "runs", writer)
    with open_folder(folder) as opened:
        first = findings_of(opened)
    assert file_of(cache_home).exists()
    spool = Spool(RunDir(folder / RUN).agent_dir("b") / "spool", max_bytes=1 << 26, keep=True)
    rates = [0.05 if step < NUM + 300 else 1.0 for step in range(NUM, NUM + 600)]
    spool.append(writer.steps(range(NUM, NUM + 600), loss=2.0, learning_rate=rates))
    spool.close()
    with open_folder(folder) as opened:
        later = findings_of(opened)
    file_of(cache_home).unlink()
    with open_folder(folder) as opened:
        assert later == findings_of(opened)
    assert first == later[: len(first)]
    assert NUM + 300 in {view.finding.step for view in later}


@pytest.mark.parametrize("damage", ["text", "other detectors", "readable for others", "link"])
def test_a_file_that_cannot_be_used_costs_only_time(
    damage: str, tmp_path: Path, cache_home: Path, writer: Writer
):
    folder = write_run(tmp_path / "runs", writer)
    with open_folder(folder) as opened:
        first = findings_of(opened)
    path = file_of(cache_home)
    raw = path.read_bytes()
    if damage == "text":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "other detectors":
        path.write_bytes(raw.replace(b"program\xd9@", b"program\xd9@" + b"0", 1)[: len(raw)])
    elif damage == "readable for others":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    store = read_store(folder)
    assert not cached(cache_home).load(store, RUN)
    assert NUM == num_unwatched(store)
    store.close()
    with open_folder(folder) as opened:
        assert first == findings_of(opened)


def test_a_judgement_of_other_rows_is_not_used(tmp_path: Path, cache_home: Path, writer: Writer):
    with open_folder(write_run(tmp_path / "runs", writer)) as opened:
        findings_of(opened)
    for name, other in (("shorter", None), ("others", Writer(world_size=1))):
        other = other or writer
        other.next_seq.clear()
        store = read_store(write_run(tmp_path / name, other, NUM - 500))
        assert not cached(cache_home).load(store, RUN), name
        store.close()


def test_without_a_cache_directory_the_run_is_judged(
    tmp_path: Path, cache_home: Path, writer: Writer
):
    cache_home.write_text("a file")
    with open_folder(write_run(tmp_path / "runs", writer)) as opened:
        assert 1 == len(findings_of(opened))


def test_a_reader_that_may_not_wait_has_the_findings_later(tmp_path: Path, writer: Writer):
    folder = write_run(tmp_path / "runs", writer)
    with open_folder(folder, waits=False) as opened:
        assert [] == findings_of(opened)
        (progress,) = opened.unjudged.values()
        assert progress.startswith("the fleet detectors have processed the steps to 0 of 4,999")
        assert () == opened.reader.ask(AlertsQuestion())
        deadline = time.monotonic() + 60.0
        while opened.unjudged and time.monotonic() < deadline:
            opened.reader.ask(VerdictQuestion(run_id=RUN))
            time.sleep(0.05)
        assert {} == opened.unjudged
        later = findings_of(opened)
        alerts = opened.reader.ask(AlertsQuestion())
    with open_folder(folder) as opened:
        assert later == findings_of(opened) != []
        assert [each.title for each in alerts] == [
            each.title for each in opened.reader.ask(AlertsQuestion())
        ]


def test_a_run_that_cannot_be_judged_apart_is_named_with_the_reason(tmp_path: Path):
    judge = BackgroundJudge()
    judge.start(tmp_path / "missing", RUN)
    deadline = time.monotonic() + 60.0
    while not judge.errors and time.monotonic() < deadline:
        assert judge.is_needed(RUN, NUM)
        time.sleep(0.05)
    assert "missing" in judge.errors[RUN]
    judge.close()


def test_the_cache_is_in_the_home_of_the_user(cache_home: Path):
    assert cache_home / "trainvitals" == default_cache_dir(os.environ)
    assert Path("/h/.cache/trainvitals") == default_cache_dir({"HOME": "/h"})
