"""Which runs the watchers need to open, and which they gave up for now."""

import pytest

from tests.collector.alerting import Agent, Job
from tests.collector.rows import OTHER_RUN, RUN, Writer
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.records import RunEnded
from vitals_collector.live.live_monitor import load_suspended_runs, open_run
from vitals_collector.storage.store import Store


@pytest.fixture
def job(store: Store) -> Job:
    return Job(store)


def test_a_run_whose_watching_always_fails_is_set_aside_until_it_works_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    def aside() -> set[str]:
        with job.place.store.read_transaction() as connection:
            return load_suspended_runs(connection)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    job.train(range(30), slow=True)
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(FleetDetectors, "update", broken)
        for seconds in (0, 10, 20, 40, 80, 160, 320):
            job.place.clock.advance(seconds)
            job.look()
            found.append(aside())
        job.place.restart()
        job.look()
    assert [set()] * 6 + [{RUN}] == found, "at its longest pause"
    job.place.clock.advance(10)
    job.look()
    assert [("straggler", 19)] == job.found()
    assert set() == aside()


def test_after_a_start_only_runs_with_unread_rows_are_opened(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    opened = []

    def noted(connection, run_id, **how):
        opened.append(run_id)
        return open_run(connection, run_id, **how)

    agent, other = Agent(), Writer(run=OTHER_RUN, world_size=1)
    job.train(range(30))
    for _ in range(3):
        for raw in agent.round():
            job.place.send(raw)
    for writer in job.ranks:
        job.place.send(writer.events(RunEnded(state="finished"), step=29))
    job.place.send(other.steps(range(5), learning_rate=0.1))
    job.place.send(other.events(RunEnded(state="finished"), step=4))
    job.look()
    monkeypatch.setattr("vitals_collector.live.live_monitor.open_run", noted)
    job.place.restart()
    job.look()
    assert [] == opened
    job.place.store.after_ingest.clear()  # the collector is away
    job.place.send(other.steps(range(5, 50), learning_rate=0.0))
    job.place.restart()
    job.look()
    assert [OTHER_RUN] == opened
    assert [("learning_rate", 34)] == job.found(OTHER_RUN)
