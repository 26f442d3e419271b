"""Scalars of a post-training run, judged live: a real store, and a collector that may die."""

from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.collector.alerting import Job
from tests.collector.rows import RUN, Writer
from trainvitals.catalog import SCALARS_SCHEMA
from trainvitals.records import ChangeExpected, NamesDefined, RunEnded, RunInfo, RunStarted
from vitals_collector.live.live_monitor import (
    open_run,
    unread_runs,
)
from vitals_collector.live.scalar_watch import ScalarState
from vitals_collector.storage.store import Store

NAMES = ("entropy", "reward", "frac_reward_zero_std")
IDS = {name: number for number, name in enumerate(NAMES)}
DEAD = [{"entropy": 1.0, "reward": 0.0, "frac_reward_zero_std": 1.0} for _ in range(112)]
FOUND = [("dead_reward", 99)]


@pytest.fixture
def job(store: Store) -> Job:
    return Job(store, world=2)


def start(job: Job, *, task: str = "grpo", rank: int = 0) -> None:
    named = NamesDefined(stream="scalars", names={n: name for name, n in IDS.items()})
    info = RunInfo(name="run", world_size=2, task=task)
    job.place.send(job.ranks[rank].events(RunStarted(info=info), named))


def end(job: Job) -> None:
    job.place.send(*(rank.events(RunEnded(state="finished"), step=112) for rank in job.ranks))


def unread(job: Job) -> list[str]:
    with job.place.store.read_transaction() as connection:
        return unread_runs(connection)


def saved_scalars(job: Job) -> ScalarState:
    with job.place.store.read_transaction() as connection:
        return open_run(connection, RUN).saved.scalars


def logged(
    writer: Writer, rows: Iterable[Mapping[str, float]], *, first: int = 0, attempt: int = 1
) -> bytes:
    """Return the scalars of steps, those of a step together as ``observe`` writes them."""
    packed = [
        [step, attempt, writer.time_of(step), 0, IDS[name], value]
        for step, row in enumerate(rows, start=first)
        for name, value in row.items()
    ]
    return writer.batch(SCALARS_SCHEMA, packed)


def in_parts(rows: Sequence[Mapping[str, float]], size: int) -> Iterable[tuple[int, Sequence]]:
    return ((first, rows[first : first + size]) for first in range(0, len(rows), size))


def test_a_problem_of_the_scalars_is_found_and_told_once(job: Job):
    start(job)
    for first, part in in_parts(DEAD, 14):
        job.train(range(first, first + 14))
        job.place.send(logged(job.ranks[0], part, first=first))
        job.look()
    assert FOUND == job.found()
    assert ["RewardDead firing"] == job.look()
    (alert,) = job.place.heard.alerts
    assert ("notify", 99) == (alert.severity, alert.step)


def test_a_collector_that_dies_after_every_batch_finds_the_same(job: Job):
    start(job)
    job.train(range(112))
    for first, part in in_parts(DEAD, 9):
        job.place.send(logged(job.ranks[0], part, first=first))
        job.look()
        job.place.restart()
    job.look()
    assert FOUND == job.found()


def test_the_rows_of_one_step_may_come_apart(job: Job):
    start(job)
    job.train(range(112))
    raw = [(step, {name: value}) for step, row in enumerate(DEAD) for name, value in row.items()]
    for first in range(0, len(raw), 20):
        packed = [
            [step, 1, job.ranks[0].time_of(step), 0, IDS[name], value]
            for step, values in raw[first : first + 20]
            for name, value in values.items()
        ]
        job.place.send(job.ranks[0].batch(SCALARS_SCHEMA, packed))
        job.look()
    assert FOUND == job.found()


def test_scalars_that_arrive_before_their_names_wait(job: Job):
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD))
    job.look()
    start(job)
    job.look()
    assert FOUND == job.found()


def test_an_undeclared_run_and_other_ranks_are_not_judged(job: Job):
    start(job, task="")
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD))
    job.look()
    assert [] == job.found()


def test_the_scalars_of_another_kind_of_run_are_not_judged(job: Job):
    start(job, task="sft")
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD))
    job.look()
    assert [] == job.found()


def test_only_the_scalars_of_rank_0_are_judged(job: Job):
    start(job)
    named = NamesDefined(stream="scalars", names={n: name for name, n in IDS.items()})
    job.train(range(112))
    job.place.send(job.ranks[1].events(named), logged(job.ranks[1], DEAD))
    job.look()
    assert [] == job.found()


def test_a_restart_of_the_training_continues_where_it_was(job: Job):
    start(job)
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD[:30]))
    job.look()
    again = Writer("rank:0", world_size=2, started=job.ranks[0].started + 100)
    named = NamesDefined(stream="scalars", names={n: name for name, n in IDS.items()})
    job.place.send(again.events(named, attempt=2), logged(again, DEAD[30:], first=30, attempt=2))
    job.look()
    late = logged(job.ranks[0], DEAD[30:40], first=30)
    job.place.send(late)
    job.look()
    assert FOUND == job.found()


def test_an_announced_change_starts_the_levels_again(job: Job):
    start(job)
    job.train(range(160))
    change = ChangeExpected(reason="new data", steps=10)
    rows = [*DEAD, *DEAD[:48]]
    job.place.send(job.ranks[0].events(change, step=40), logged(job.ranks[0], rows))
    job.look()
    assert [("dead_reward", 140)] == job.found()


def test_the_last_logged_step_is_judged_when_the_run_ends(job: Job):
    start(job)
    job.train(range(100))
    job.place.send(logged(job.ranks[0], DEAD[:100]))
    job.look()
    assert [] == job.found()
    end(job)
    job.look()
    assert FOUND == job.found()
    assert [] == unread(job)


def test_a_batch_that_arrives_after_the_end_is_judged(job: Job):
    start(job)
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD[:90]))
    end(job)
    job.look()
    assert [] == unread(job)
    job.place.send(logged(job.ranks[0], DEAD[90:], first=90))
    job.look()
    assert FOUND == job.found()


def test_a_batch_that_a_stopped_collector_stored_is_judged_by_the_next(job: Job):
    start(job)
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD[:90]))
    end(job)
    job.look()
    job.place.store.after_ingest.clear()
    job.place.send(logged(job.ranks[0], DEAD[90:], first=90))
    assert [RUN] == unread(job)
    job.place.restart()
    job.look()
    assert FOUND == job.found()
    assert [] == unread(job)


def test_the_progress_of_scalars_without_other_rows_is_stored(job: Job):
    start(job)
    job.train(range(112))
    job.look()
    for first, part in in_parts(DEAD[:90], 30):
        job.place.send(logged(job.ranks[0], part, first=first))
        job.place.pass_time(10)
    assert saved_scalars(job).judged == (1, 88)


def test_scalars_that_no_detector_reads_leave_no_unread_rows(job: Job):
    start(job)
    other = NamesDefined(stream="scalars", names={7: "learning_rate"})
    job.train(range(20))
    job.place.send(
        job.ranks[0].events(other), job.ranks[0].scalars(7, dict.fromkeys(range(20), 0.1))
    )
    end(job)
    job.look()
    assert [] == unread(job)


def test_a_name_that_is_never_stored_delays_and_does_not_block(job: Job):
    start(job)
    job.train(range(112))
    job.place.send(job.ranks[0].scalars(9, {0: 1.0}), logged(job.ranks[0], DEAD))
    found = []
    for step in range(112, 126):
        job.train([step])
        job.place.clock.advance(50)
        job.look()
        found.append(job.found())
    assert [[]] * 11 == found[:11], "the name may still come"
    assert FOUND == found[-1]


def test_scalars_count_as_rows_that_a_poll_may_read(store: Store):
    job = Job(store, world=2)
    start(job)
    job.train(range(112))
    job.place.send(logged(job.ranks[0], DEAD))
    nums, findings = [], []
    with store.read_transaction() as connection:
        followed, moment = open_run(connection, RUN), store.snapshot_on(connection)
        while not nums or not followed.is_read:
            nums.append(followed.read_stored(moment, 50, 0))
            findings += followed.advance(0, is_running=True)
    assert 2 * 112 + 3 * 112 == sum(nums)
    assert FOUND == [(timed.finding.kind, timed.finding.step) for timed in findings]
