"""Rows from memory where they were just committed, else from the store: no more and no less."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from tests.collector.alerting import Job
from tests.collector.rows import RUN, SECOND, START
from tests.collector.watched_again import watch_again
from trainvitals.detect.fleet import FleetConfig
from trainvitals.detect.fleet.straggler import StragglerConfig
from trainvitals.records import Finding
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.live.live_monitor import LiveMonitor, LiveMonitorConfig
from vitals_collector.storage.schema import findings
from vitals_collector.storage.store import Store


@pytest.fixture
def job(store: Store) -> Job:
    return Job(store)


def tell_of_commits(store: Store, watching: LiveMonitor) -> None:
    store.after_ingest[:] = [lambda new: watching.add([batch for batch, _ in new])]


def refuse_to_read(*_: object, **__: object) -> None:
    raise AssertionError("the store is read for rows that are in memory")


def test_rows_that_were_just_committed_are_not_read_from_the_store(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    job.look()
    job.train(range(1))
    job.look()
    monkeypatch.setattr(job.place.store.numbers, "scan", refuse_to_read)
    for first in range(1, 31, 10):
        job.train(range(first, first + 10), slow=True)
        job.look()
    assert [("straggler", 20)] == job.found()


@pytest.mark.parametrize("live_bytes", [0, 3_000, 5_000])
def test_what_memory_has_no_room_for_is_read_from_the_store(job: Job, live_bytes: int):
    watching = LiveMonitor(job.place.store, LiveMonitorConfig(live_bytes=live_bytes))
    tell_of_commits(job.place.store, watching)
    for first in range(0, 60, 6):
        job.train(range(first, first + 3), slow=first >= 30)
        job.train(range(first + 3, first + 6), slow=first >= 30)
        watching.poll(now_ns=0, running={RUN})
    assert [("straggler", 49)] == job.found()
    followed = watching._open[RUN]
    assert (0, 0) == (followed.steps.num_missing, followed.steps.num_late)
    assert watching.num_left_to_store > 0


def test_rows_that_were_lost_on_the_way_do_not_hold_the_watchers_up(job: Job):
    job.train(range(10))
    job.look()
    job.train(range(10, 20), lose=5)
    job.train(range(20, 50), slow=True)
    job.look()
    assert [("straggler", 39)] == job.found()


def test_commits_that_are_told_of_in_another_order_are_taken_once_and_in_order(job: Job):
    watching = LiveMonitor(job.place.store)
    held: list[Any] = []
    job.place.store.after_ingest[:] = [lambda new: held.extend(batch for batch, _ in new)]
    watching.poll(now_ns=0, running={RUN})
    for first in range(0, 40, 4):
        job.train(range(first, first + 4), slow=True)
    watching.add(reversed(held))
    watching.poll(now_ns=0, running={RUN})
    watching.add(held)
    watching.poll(now_ns=0, running={RUN})
    assert [("straggler", 19)] == job.found()
    followed = watching._open[RUN]
    assert (0, 0) == (followed.steps.num_missing, followed.steps.num_late)


def test_a_large_memory_is_stored_less_often(job: Job):
    watching = LiveMonitor(job.place.store, LiveMonitorConfig(save_bytes_a_second=1))
    tell_of_commits(job.place.store, watching)
    saved = []
    for second in range(30):
        job.train([second])
        watching.poll(now_ns=second * SECOND, running={RUN})
        saved.append(watching._open[RUN].has_changed)
    assert 1 == saved.count(False)


QUICK = FleetConfig(straggler=StragglerConfig(steps=4, window=4))


@pytest.mark.parametrize("num_ranks", [64, pytest.param(4_096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_many_ranks_watched_again_tell_what_they_told_live(store: Store, num_ranks: int):
    watching = LiveMonitor(store, LiveMonitorConfig(watch=QUICK))
    tell_of_commits(store, watching)
    job = Job(store, world=num_ranks)
    tell_of_commits(store, watching)
    for first in range(0, 16, 2):
        steps = range(first, first + 2)
        raws = [job.rows(rank, steps, slow=first >= 6) for rank in range(num_ranks)]
        for begin in range(0, num_ranks, 100):  # agents come one after the other
            ingest_all(store, raws[begin : begin + 100], START)
            if begin % 700 == 0:
                watching.poll(now_ns=0, running={RUN})
    watching.poll(now_ns=0, running={RUN})
    followed = watching._open[RUN]
    assert (0, 0, True) == (
        followed.steps.num_missing,
        followed.steps.num_late,
        followed.is_drained,
    )
    with store.read_transaction() as connection:
        moment = store.snapshot_on(connection)
        again = [told.finding for told in watch_again(moment, RUN, watch=QUICK).told]
        bodies = connection.execute(select(findings.c.body).order_by(findings.c.seq)).scalars()
        live = [msgspec.msgpack.decode(body, type=Finding) for body in bodies]
    assert [("straggler", 9, 1)] == [(one.kind, one.step, one.rank) for one in live]
    assert live == again
