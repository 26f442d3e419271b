"""Runs watched live: a real store, time by hand, and a collector that may die at any moment."""

from collections.abc import Collection, Sequence

import msgspec
import pytest
from sqlalchemy import select

from tests.collector.alerting import Heard, Job, decision, started
from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.collector.watched_again import watch_again
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.errors import StorageError
from trainvitals.records import (
    CheckpointChanged,
    Finding,
    FindingRaised,
    NamesDefined,
    RunEnded,
    TrainingPaused,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.live_monitor import LiveMonitor, LiveMonitorConfig, _StateToStore
from vitals_collector.storage.schema import engine_state, findings
from vitals_collector.storage.store import Store


@pytest.fixture
def job(store: Store) -> Job:
    return Job(store)


# ------------------------------------------------------------------------------------- telling


def test_what_only_all_ranks_together_show_is_found_and_told_once(job: Job):
    job.train(range(50))
    assert [] == job.look()
    job.train(range(50, 75), slow=True)
    for _ in range(3):
        assert ["StragglerRank firing"] == job.look()
    assert [("straggler", 69)] == job.found()
    (alert,) = job.place.heard.alerts
    assert ("notify", 69, "straggler") == (alert.severity, alert.step, alert.labels["cause"])


def test_an_alert_is_told_as_firing_even_where_the_steps_that_resolve_it_are_stored(job: Job):
    job.train(range(30), slow=True)
    job.train(range(30, 60))
    assert ["StragglerRank firing"] == job.look()
    assert ["StragglerRank firing", "StragglerRank resolved"] == job.look()


def test_its_alert_resolves_after_healthy_steps(job: Job):
    job.train(range(30), slow=True)
    job.look()
    job.train(range(30, 60))
    assert ["StragglerRank firing", "StragglerRank resolved"] == job.look()


def test_an_alert_of_what_goes_on_is_not_over_however_many_steps_pass(job: Job):
    for first in range(0, 200, 20):
        job.train(range(first, first + 20), slow=True)
        assert ["StragglerRank firing"] == job.look()
    job.place.restart()
    assert ["StragglerRank firing"] == job.look()
    job.train(range(200, 240))
    assert ["StragglerRank firing", "StragglerRank resolved"] == job.look()


def test_a_collector_that_dies_after_every_batch_tells_neither_more_nor_less(job: Job):
    blocks = [range(first, first + 7) for first in range(0, 140, 7)]
    for block in blocks:
        for rank in range(3):
            job.place.send(job.rows(rank, block, slow=21 <= block[0] < 105))
            job.look()
            job.place.restart()
    job.look()
    assert [("straggler", 40)] == job.found()
    assert 1 == job.place.heard.words.count("StragglerRank firing")


def test_a_collector_that_died_between_storing_a_finding_and_telling_it_tells_it(job: Job):
    job.train(range(25), slow=True)
    watching = LiveMonitor(job.place.store)
    look = watching.poll(now_ns=0, running={RUN})
    assert {RUN} == look.runs_with_findings
    assert [] == job.place.heard.words
    job.place.restart()
    assert ["StragglerRank firing"] == job.look()
    job.place.restart()
    assert ["StragglerRank firing"] == job.look()
    assert 1 == len(job.found())


def test_a_store_that_refuses_loses_nothing_and_tells_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    job.train(range(10))
    job.look()
    job.train(range(10, 40), slow=True)

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr("vitals_collector.live.live_monitor.save_states", refuse)
        with pytest.raises(StorageError):
            job.look()
    assert [] == job.found()
    assert ["StragglerRank firing"] == job.look()
    assert [("straggler", 29)] == job.found()


def test_ranks_whose_rows_are_stored_are_never_late_however_they_lie_in_the_store(job: Job):
    for rank in range(3):  # a folder is read node by node
        for first in range(0, 600, 100):
            job.place.send(job.rows(rank, range(first, first + 100), slow=first >= 300))
    watching = LiveMonitor(job.place.store, LiveMonitorConfig(rows_at_once=50))
    while watching.poll(now_ns=0, running={RUN}).has_more:
        pass
    assert [("straggler", 319)] == job.found()
    followed = watching._open[RUN]
    assert (0, 0) == (followed.steps.num_missing, followed.steps.num_late)
    assert (1, 599) == followed.steps.merged


def test_a_rank_that_died_is_waited_for_and_then_the_others_are_judged(job: Job):
    job.train(range(5))
    job.look()
    for rank in (0, 1):
        job.place.send(job.rows(rank, range(5, 40), rank_loss=1.0))
    job.look()
    engine = job.place.acting.engine
    assert (1, 4) == engine._watching._open[RUN].steps.merged
    job.place.clock.advance(20)
    job.look()
    followed = engine._watching._open[RUN]
    assert 35 == engine.watching.num_unmerged
    assert ((1, 39), {2}, 35) == (
        followed.steps.merged,
        followed.steps.absent,
        followed.steps.num_missing,
    )


def test_a_rollback_goes_back_and_the_watchers_with_it(job: Job):
    job.train(range(40), learning_rate=0.1)
    job.look()
    job.train(range(20, 60), attempt=2, learning_rate=0.1)
    job.look()
    assert (2, 59) == job.place.acting.engine._watching._open[RUN].steps.merged
    assert [] == job.found()


def test_a_run_that_finished_is_looked_at_to_its_end_and_alerts_nobody(job: Job):
    job.train(range(30), slow=True)
    for rank in job.ranks:
        job.place.send(rank.events(RunEnded(state="finished"), step=30))
    assert [] == job.look()
    assert [("straggler", 19)] == job.found()
    assert {} == job.place.acting.engine._watching._open


def test_the_stored_run_watched_again_tells_what_was_told_live(job: Job):
    for first in range(0, 240, 10):
        job.train(range(first, first + 10), slow=first % 80 >= 40)
        job.look()
    with job.place.store.read_transaction() as connection:
        told, num_missing = watch_again(job.place.store.snapshot_on(connection), RUN)
    assert 0 == num_missing
    again = [(one.finding.kind, one.finding.step) for one in told]
    assert [("straggler", 59), ("straggler", 139), ("straggler", 219)] == job.found() == again


def test_another_runs_rows_are_another_runs(job: Job):
    job.train(range(30), slow=True)
    other = Writer(run=OTHER_RUN, world_size=1)
    job.place.send(other.steps(range(50), learning_rate=0.0))
    assert {"StragglerRank firing", "LearningRateAnomaly firing"} == set(job.look())
    assert ([("straggler", 19)], [("learning_rate", 29)]) == (job.found(), job.found(OTHER_RUN))


def test_one_runs_broken_watching_silences_nobody_else(job: Job, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FleetDetectors, "update", broken)
    job.train(range(5))
    job.place.send(job.ranks[0].events(started(), decision()))
    assert ["StepSkipped firing"] == job.look()
    assert {"watching": 1} == job.place.store.counters.failures


def test_what_is_kept_of_several_runs_is_one_commit(job: Job, monkeypatch: pytest.MonkeyPatch):
    job.train(range(30), slow=True)
    job.place.send(Writer(run=OTHER_RUN, world_size=1).steps(range(50), learning_rate=0.0))
    store, num_commits = job.place.store, 0
    write = store.write

    def counted():
        nonlocal num_commits
        num_commits += 1
        return write()

    monkeypatch.setattr(store, "write", counted)
    LiveMonitor(store).poll(now_ns=0, running={RUN, OTHER_RUN})
    assert 1 == num_commits
    assert ([("straggler", 19)], [("learning_rate", 29)]) == (job.found(), job.found(OTHER_RUN))


def test_a_run_whose_memory_no_database_takes_keeps_no_other_back(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    store_all = LiveMonitor._store_all

    def refused(self: LiveMonitor, kept: Sequence[_StateToStore]) -> Collection[str]:
        if any(of_run.followed.run_id == OTHER_RUN for of_run in kept):
            raise OverflowError
        return store_all(self, kept)

    monkeypatch.setattr(LiveMonitor, "_store_all", refused)
    job.train(range(30), slow=True)
    job.place.send(Writer(run=OTHER_RUN, world_size=1).steps(range(50), learning_rate=0.0))
    assert ["StragglerRank firing"] == job.look()
    assert ([("straggler", 19)], []) == (job.found(), job.found(OTHER_RUN))
    assert {"watching": 1} == job.place.store.counters.failures


def test_a_run_whose_watching_met_an_error_is_watched_again_after_a_growing_pause(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    job.train(range(30), slow=True)
    with monkeypatch.context() as patch:
        patch.setattr(FleetDetectors, "update", broken)
        errors = []
        for seconds in (0, 9, 1, 19, 1, 39):
            job.place.clock.advance(seconds)
            job.look()
            errors.append(job.place.store.counters.failures["watching"])
    assert [1, 1, 2, 2, 3, 3] == errors
    assert [] == job.found()
    job.place.clock.advance(1)
    job.look()
    assert [("straggler", 19)] == job.found()


def test_a_memory_of_another_version_makes_the_watchers_learn_anew(job: Job):
    job.train(range(30), slow=True)
    job.look()
    with job.place.store.write() as connection:
        name = f"watching/{RUN}"
        body = connection.execute(
            select(engine_state.c.body).where(engine_state.c.name == name)
        ).scalar_one()
        kept = msgspec.msgpack.decode(body)
        kept["watchers"] = {"watchers": {"straggler": {"other": 1}}}
        connection.execute(
            engine_state.update()
            .where(engine_state.c.name == name)
            .values(body=msgspec.msgpack.encode(kept))
        )
    job.place.restart()
    job.train(range(30, 60), slow=True)
    job.look()
    assert [("straggler", 19), ("straggler", 49)] == job.found()


# ------------------------------------------------------------------------------------ the clock


def test_a_step_that_does_not_come_is_told_and_over_when_it_does(job: Job):
    job.train(range(40))
    assert [] == job.look()
    agent = Writer("node:node-a")
    for second in range(0, 1_800, 30):
        job.place.clock.advance(30)
        job.place.send(agent.node_rows([second]))  # the run is alive
        assert [] == job.look(), "it may be the first evaluation"
    job.place.clock.advance(30)
    assert ["TrainingStalled firing"] == job.look()
    job.train([40])
    assert ["TrainingStalled firing", "TrainingStalled resolved"] == job.look()
    assert [("stalled", 39)] == job.found()


def test_a_stall_is_told_once_over_restarts(job: Job):
    job.train(range(40))
    job.look()
    agent = Writer("node:node-a")
    for second in range(0, 2_400, 30):
        job.place.clock.advance(30)
        job.place.send(agent.node_rows([second]))
        job.look()
        if second > 2_100:
            job.place.restart()
    assert ["TrainingStalled firing"] == job.look()
    assert [("stalled", 39)] == job.found()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_that_a_person_paused_does_not_stall_nor_once_it_goes_on(job: Job, restarts: bool):
    job.train(range(40))
    job.look()
    job.place.send(job.ranks[0].events(TrainingPaused(is_paused=True), step=39))
    agent = Writer("node:node-a")

    def wait(seconds: int) -> None:
        for second in range(0, seconds, 30):
            job.place.clock.advance(30)
            job.place.send(agent.node_rows([second]))
            job.look()

    wait(1_500)
    if restarts:
        job.place.restart()
    wait(1_500)
    assert [] == job.found()
    job.place.send(job.ranks[0].events(TrainingPaused(is_paused=False), step=39))
    wait(90)
    assert [] == job.found()
    wait(3_000)  # it does not go on, though it was let
    assert [("stalled", 39)] == job.found()


def test_a_run_that_ended_does_not_stall(job: Job):
    job.train(range(40))
    for rank in job.ranks:
        job.place.send(rank.events(RunEnded(state="interrupted"), step=40))
    for _ in range(20):
        job.look()
        job.place.clock.advance(60)
    assert [] == job.found()


def test_a_checkpoint_that_does_not_come_is_told_and_over_when_it_does(job: Job):
    def saved(step: int) -> bytes:
        event = CheckpointChanged(
            checkpoint_id=f"c{step}", checkpoint_step=step, state="healthy", where="disk"
        )
        return job.ranks[0].events(event, step=step)

    for first in (0, 10, 20):
        job.train(range(first, first + 10))
        job.place.send(saved(first + 9))
        assert [] == job.look()
    job.train(range(30, 60))
    assert ["CheckpointOverdue firing"] == job.look()
    assert [("checkpoint_overdue", 50)] == job.found()
    job.place.restart()
    job.look()
    job.place.send(saved(59))
    assert ["CheckpointOverdue firing", "CheckpointOverdue resolved"] == job.look()


# ------------------------------------------------------------------------------ layers and nodes


def layers(writer: Writer, step: int, norms: Sequence[float]) -> bytes:
    rest = [None] * (len(LAYERS_SCHEMA.columns) - 6)
    head = [step, 1, writer.time_of(step), 0]
    return writer.batch(LAYERS_SCHEMA, [[*head, i, n, *rest] for i, n in enumerate(norms)])


@pytest.mark.parametrize("names_first", [True, False])
def test_a_layer_that_leaves_its_course_is_named(store: Store, names_first: bool):
    job = Job(store, world=1)
    names = NamesDefined(stream="layers", names={i: f"block.{i}" for i in range(6)})
    said = job.ranks[0].events(names)
    if names_first:
        job.place.send(said)
    for first in range(0, 400, 10):
        norms = [1.0 + 0.01 * (first // 10 % 3)] * 6
        if first == 390:
            norms[3] = 500.0
        job.place.send(layers(job.ranks[0], first, norms))
        if not names_first and first < 50:
            job.look()
        if not names_first and first == 50:
            job.place.send(said)
    job.train(range(400))
    job.look()
    job.place.clock.advance(20)
    job.look()
    assert [("layer_gradient", 390)] == job.found()
    with store.read_transaction() as connection:
        body = connection.execute(select(findings.c.body)).scalar_one()
    assert b"block.3" in body


# --------------------------------------------------------------------------- from inside the job


def raised(kind: str, step: int = 5, level: str = "advisory") -> FindingRaised:
    finding = Finding(
        kind=kind,
        level=level,  # type: ignore[arg-type]
        step=step,
        detector="loss_level",
        reason=f"{kind} at {step}",
        cause=f"loss_{kind}",
    )
    return FindingRaised(finding=finding)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("divergence", ["LossDiverged firing"]),
        ("plateau", ["LossPlateau firing"]),
        ("grad_explosion", ["GradientExplosion firing"]),
        ("level_shift", []),
        ("spike", ["SpikeSeen firing"]),
        ("nonfinite", []),
    ],
)
def test_what_the_job_only_tells_is_told_once(job: Job, kind: str, words: list[str]):
    raw = job.ranks[0].events(started(), raised(kind), raised(kind, 7))
    job.place.send(raw)
    assert words == job.look()
    job.place.send(raw)
    job.place.restart()
    assert words == job.look()


def test_a_finding_that_was_acted_on_is_told_by_its_decision(job: Job):
    rollback = decision(action="rollback", step=5, budget_left=2, cause="loss_divergence")
    job.place.send(
        job.ranks[0].events(started(), raised("divergence", level="actionable"), rollback)
    )
    assert ["TrainingRolledBack firing"] == job.look()


def test_a_finding_to_act_on_that_nobody_acted_on_is_told(job: Job):
    job.place.send(job.ranks[0].events(started(), raised("divergence", level="actionable")))
    assert ["LossDiverged firing"] == job.look()


def test_findings_of_a_rank_stored_before_a_restart_are_told_after_it(job: Job):
    heard, place = Heard(), job.place
    place.heard = heard
    ingest(place.store, job.ranks[0].events(started(), raised("plateau")))
    place.restart()
    assert ["LossPlateau firing"] == job.look()
