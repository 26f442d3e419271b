"""Scalars of a post-training run, judged live: a real store, and a collector that may die."""

from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.collector.alerting import Job
from tests.collector.rows import Writer
from trainvitals.catalog import SCALARS_SCHEMA
from trainvitals.records import ChangeExpected, NamesDefined, RunInfo, RunStarted
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


def test_a_kind_of_run_without_detectors_is_not_judged(job: Job):
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
    job.train(range(112))
    change = ChangeExpected(reason="new data", steps=10)
    job.place.send(job.ranks[0].events(change, step=40), logged(job.ranks[0], DEAD))
    job.look()
    assert [] == job.found()
