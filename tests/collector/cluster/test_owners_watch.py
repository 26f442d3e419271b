"""Each collector watches the runs that it owns, and reports them to the one that pages."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector.alerting import decision, started
from tests.collector.cluster.acting import Pair, opened_pair
from tests.collector.rows import RUN, Writer
from trainvitals.clock import Clock
from trainvitals.identity import new_run_id
from trainvitals.records import RunEnded
from trainvitals.views import FindingsQuestion
from vitals_collector.live.live_monitor import FollowedRun
from vitals_collector.live.reports import RunReporter
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("lake_store", ["postgresql"], indirect=True),
]


@pytest.fixture
def pair(lake_store: Store, postgres: str, tmp_path: Path) -> Iterator[Pair]:
    """Give a pager, and another collector that owns what it is sent."""
    with opened_pair(lake_store, postgres, tmp_path) as two:
        yield two


class SlowRank:
    """A run of three ranks: rank 1 keeps the others waiting when told to."""

    def __init__(self, run: str = RUN) -> None:
        self._ranks = [Writer(f"rank:{rank}", run=run, world_size=3) for rank in range(3)]

    def steps(self, steps: range, *, slow: bool) -> list[bytes]:
        waits = [0.4 if slow and rank != 1 else 0.0 if slow else 0.01 for rank in range(3)]
        return [
            writer.steps(steps, step_duration_seconds=1.0, communication_seconds=wait, loss=2.0)
            for writer, wait in zip(self._ranks, waits, strict=True)
        ]


def found(store: Store, clock: Clock, run: str = RUN) -> list[tuple[str, int]]:
    asked = Query(store, clock=clock).ask(FindingsQuestion(run_id=run))
    return [(one.finding.kind, one.finding.step) for one in asked]


def test_what_an_owner_finds_in_its_rows_the_pager_tells_once(pair: Pair) -> None:
    job = SlowRank()
    pair.owner.send(*job.steps(range(30), slow=True))
    assert pair.look() == ["StragglerRank firing"]
    pair.owner.send(*job.steps(range(30, 90), slow=True))
    assert pair.pass_time(20) == ["StragglerRank firing"], "it goes on, and is told"
    pair.owner.send(*job.steps(range(90, 200), slow=False))
    assert pair.pass_time(20) == ["StragglerRank firing", "StragglerRank resolved"]
    assert pair.owner.heard.words == []
    assert found(pair.pager.store, pair.clock) == [("straggler", 19)]


@pytest.mark.nightly
def test_what_a_look_asks_does_not_grow_with_the_runs_of_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, runs_read = FollowedRun.read_stored, Counter[str]()

    def noted(followed: FollowedRun, *args: Any, **how: Any) -> int:
        runs_read[followed.run_id] += 1
        return read(followed, *args, **how)

    monkeypatch.setattr(FollowedRun, "read_stored", noted)
    writers = [Writer(run=new_run_id(time.time_ns() + i)) for i in range(4)]

    def asked_with(some: list[Writer], steps: range) -> list[str]:
        pair.owner.send(*[writer.steps(steps, loss=2.0) for writer in some])
        pair.owner.look()
        with pair.pager.asking() as asked:
            pair.pager.look()
        return asked

    asked_with(writers[:1], range(3))
    of_one = asked_with(writers[:1], range(3, 6))
    asked_with(writers, range(6, 9))
    of_four = asked_with(writers, range(9, 12))
    assert len(of_four) == len(of_one)
    assert not [sql for sql in of_four if "lake." in sql]
    with pair.owner.asking() as asked:
        pair.owner.look()
    num = len(asked)
    pair.pager.send(*[Writer(run=new_run_id(time.time_ns() + i)).steps(range(3)) for i in range(4)])
    pair.pager.look()
    with pair.owner.asking() as asked:
        pair.owner.look()
    assert len(asked) <= num, "nor is the owner asked more for those of the pager"
    assert set(runs_read.values()) == {1}, "each by its owner, when it was opened"


def test_what_holds_of_a_run_is_told_by_its_owners_report_and_ends_with_it(pair: Pair) -> None:
    writer = Writer(world_size=1)
    pair.owner.send(writer.steps(range(5), loss=2.0))
    pair.look()
    told = pair.pass_time(100)
    assert told == ["RunLost firing"]
    pair.owner.send(writer.steps(range(5, 10), loss=2.0))
    assert pair.pass_time(5) == ["RunLost firing", "RunLost resolved"]
    pair.owner.send(writer.events(RunEnded(state="failed", reason="OOM")))
    assert pair.pass_time(5)[2:] == ["RunFailed firing"]


def test_an_owner_that_died_before_it_reported_loses_no_page(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlowRank()
    pair.owner.send(*job.steps(range(5), slow=False))
    pair.look()
    monkeypatch.setattr(RunReporter, "report", lambda *_, **__: None)
    pair.owner.send(
        *job.steps(range(5, 30), slow=True), Writer().events(decision(action="rollback"))
    )
    pair.owner.look()  # what it finds is stored
    assert pair.pager.look() == []
    pair.owner.die()
    pages = ["StragglerRank firing", "TrainingRolledBack firing"]
    assert sorted(pair.look()) == pages
    later = pair.pass_time(30)
    assert [told for told in sorted(later) if told.endswith("firing")] == pages, "each once"


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.nightly
def test_an_owner_that_comes_and_ends_between_two_looks_loses_no_page(
    pair: Pair, is_taken: bool
) -> None:
    writer = Writer()
    pair.owner.send(writer.events(decision(action="rollback")))
    pair.owner.die()
    if is_taken:
        pair.pager.send(writer.steps(range(6, 9)))
    pair.look()
    assert pair.look() == ["TrainingRolledBack firing"]


@pytest.mark.nightly
def test_what_an_owner_stored_and_did_not_watch_the_pager_watches(pair: Pair) -> None:
    job, other = SlowRank(), Writer(run=new_run_id(time.time_ns()))
    pair.owner.send(*job.steps(range(30), slow=True))
    pair.owner.die()
    assert pair.look() == []
    pair.pager.send(other.steps(range(3)))
    assert pair.pass_time(10) == ["StragglerRank firing"]
    assert pair.pass_time(30) == ["StragglerRank firing"]
    assert found(pair.pager.store, pair.clock) == [("straggler", 19)]


@pytest.mark.nightly
def test_what_is_over_ends_though_the_owner_died_when_it_went_on(pair: Pair) -> None:
    pair.owner.send(Writer().events(decision(action="halt")))
    assert pair.pass_time(5) == ["TrainingHalted firing"]
    pair.owner.send(Writer().events(started(), step=9))
    pair.owner.die()
    assert pair.pass_time(20) == ["TrainingHalted firing", "TrainingHalted resolved"]


@pytest.mark.nightly
def test_what_is_over_ends_though_no_owner_ever_reported_that_the_run_went_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.pager.send(Writer().events(decision(action="halt")))
    assert pair.pass_time(5) == ["TrainingHalted firing"]
    pair.pager.owners.close()  # it lets the run go: another collector has the next rows
    pair.pass_time(15)
    monkeypatch.setattr(RunReporter, "report", lambda *_, **__: None)
    pair.owner.send(Writer().events(started(), step=9))
    assert pair.pass_time(5) == ["TrainingHalted firing"]
    pair.owner.die()
    assert pair.pass_time(30) == ["TrainingHalted firing", "TrainingHalted resolved"]


def test_a_paused_owner_stores_and_reports_nothing_of_a_run_that_was_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, paused = SlowRank(), pair.owner
    paused.send(*job.steps(range(30), slow=True))
    owned = paused.owners.owned()
    paused.die()
    monkeypatch.setattr(paused.owners, "owned", lambda: owned)  # it is behind this question
    pair.pager.send(*job.steps(range(30, 33), slow=True))
    paused.acting.engine.poll()
    assert found(paused.store, pair.clock) == []
    assert pair.pager.look() == ["StragglerRank firing"]
    paused.acting.engine.poll()
    assert pair.pass_time(20) == ["StragglerRank firing"]
    assert found(pair.pager.store, pair.clock) == [("straggler", 19)]


def test_a_pager_that_dies_is_followed_by_an_owner_and_each_page_comes_once(pair: Pair) -> None:
    first, second = SlowRank(), SlowRank(new_run_id(time.time_ns()))
    pair.pager.heard.reposts = pair.owner.heard.reposts = False
    pair.owner.send(*first.steps(range(30), slow=True))
    pair.pager.send(*second.steps(range(30), slow=True))
    assert pair.look() == ["StragglerRank firing"] * 2
    pair.pager.die()
    pair.owner.look()
    for begin in range(30, 90, 30):
        pair.owner.send(*first.steps(range(begin, begin + 30), slow=True))
        pair.pass_time(5)
    assert pair.owner.heard.words == []
    pair.owner.send(*first.steps(range(90, 200), slow=False))
    pair.owner.send(*second.steps(range(30, 150), slow=False))
    pair.pass_time(10)
    assert pair.owner.heard.words == ["StragglerRank resolved"] * 2
