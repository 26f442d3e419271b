import threading
from dataclasses import replace

import msgspec
import pytest

from tests.collector.alerting import Heard, Job, Place, decision, started
from tests.collector.rows import OTHER_RUN, RUN, START, Writer
from tests.support.orders import keys, signed
from trainvitals.errors import StorageError
from trainvitals.records import Finding, FindingRaised, Note, RunEnded
from trainvitals.views import AckRequest, RunQuestion
from vitals_collector.alerts.notifiers import DELIVERED, DeliveryResult, delivery_id
from vitals_collector.api.ingest_route import CommitQueue
from vitals_collector.live import run_status
from vitals_collector.live.run_status import RunStatusCache
from vitals_collector.queries.query import Query
from vitals_collector.storage.store import Store


@pytest.fixture
def place(store: Store) -> Place:
    return Place(store)


# ------------------------------------------------------------------------------------ decisions


def test_a_decision_is_told_once_however_often_its_batch_arrives(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    raw = writer.events(started(), decision())
    for _ in range(3):
        place.send(raw)
        assert ["StepSkipped firing"] == place.look()


def test_a_decision_that_this_version_cannot_read_keeps_nobody_silent(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def newer(body: bytes) -> None:
        raise msgspec.ValidationError("Invalid enum value 'new_action'")

    place.clock.advance(100)
    writer = Writer(started=place.clock.time_ns(), world_size=1)
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), decision()))
    with monkeypatch.context() as patch:
        patch.setattr("vitals_collector.live.engine._decision", newer)
        assert [] == place.look()
    assert 1 == place.store.counters.failures["engine"]
    assert "RunLost firing" in place.pass_time(140)


def test_a_collector_that_died_between_storing_and_alerting_goes_on_where_it_was(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), decision()))
    place.restart()
    assert ["StepSkipped firing"] == place.look()
    place.restart()
    assert ["StepSkipped firing"] == place.look()


def test_an_alert_whose_delivery_was_cut_short_is_delivered_after_the_restart(place: Place):
    place.heard = Heard(DeliveryResult(recoverable=True, error="503"))
    place.restart()
    writer = Writer()
    place.send(writer.events(started(), decision(action="rollback", budget_left=2)))
    assert [] == place.look()
    place.restart()
    assert ["TrainingRolledBack firing"] == place.look()


def test_a_firing_alert_is_posted_again_after_a_restart_where_that_is_wanted(place: Place):
    place.heard = Heard(reposts=True)
    place.restart()
    place.send(Writer().events(started(), decision(action="rollback", budget_left=2)))
    place.look()
    place.restart()
    assert ["TrainingRolledBack firing"] * 2 == place.look()


def test_a_skip_resolves_after_healthy_steps(place: Place):
    writer = Writer()
    place.send(writer.events(started(), decision(step=5)))
    place.send(writer.steps(range(15)))
    assert ["StepSkipped firing"] == place.look()
    place.send(writer.steps([15]))
    assert ["StepSkipped firing", "StepSkipped resolved"] == place.look()


def test_the_last_rollback_of_the_budget_pages(place: Place):
    place.send(Writer().events(started(), decision(action="rollback", budget_left=0)))
    place.look()
    pages = [a.name for a in place.heard.alerts if a.severity == "page"]
    assert ["RollbackBudgetLow"] == pages


def test_many_decisions_of_one_cause_are_one_alert(place: Place):
    writer = Writer()
    events = [decision(seq, step=seq) for seq in range(1, 1_201)]
    place.send(writer.events(started()))
    for start in range(0, 1_200, 200):
        place.send(writer.events(*events[start : start + 200]))
    assert ["StepSkipped firing"] == place.look()
    assert 1_200 == place.alerts()[0].step


# ----------------------------------------------------------------------------------- run states


def test_a_halt_pages_once_with_its_reason_until_the_run_is_resumed(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    halt = decision(action="halt", reason="out of budget")
    place.send(writer.events(started(), halt, RunEnded(state="halted", reason="out of budget")))
    for _ in range(2):
        assert ["TrainingHalted firing"] == place.look()
        place.clock.advance(300)
    assert ("page", "out of budget", 5) == (
        place.heard.alerts[0].severity,
        place.heard.alerts[0].summary,
        place.heard.alerts[0].step,
    )
    again = Writer(started=place.clock.time_ns())
    place.send(again.steps([6]))
    assert ["TrainingHalted firing", "TrainingHalted resolved"] == place.look()


def test_a_rank_that_died_while_halting_is_halted_and_not_lost(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), decision(action="halt")))
    place.look()
    place.clock.advance(300)
    place.look()
    place.clock.advance(300)
    assert ["TrainingHalted firing"] == place.look()


def test_a_halt_is_over_when_the_run_goes_on_on_a_node_whose_clock_is_behind(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), decision(action="halt")))
    assert ["TrainingHalted firing"] == place.look()
    place.clock.advance(10)
    place.send(Writer(started=START - 120 * 10**9).steps([6]))
    assert ["TrainingHalted firing", "TrainingHalted resolved"] == place.look()


def test_a_silent_run_is_lost_after_the_limit_and_its_hold_and_back_when_it_speaks(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    heard = []
    for seconds in (0, 20, 20, 20, 1, 14, 1):
        place.clock.advance(seconds)
        heard.append(len(place.look()))
    assert [0, 0, 0, 0, 0, 0, 1] == heard
    (alert,) = place.alerts()
    assert "the run stopped reporting; last seen at 2023-11-14 22:13:" in alert.summary
    assert alert.summary.endswith(" UTC, on node node-a")
    place.send(writer.steps([6]))
    assert ["RunLost firing", "RunLost resolved"] == place.look()


def test_a_run_that_is_lost_again_without_a_new_step_is_another_page_to_every_receiver(
    place: Place,
):
    """Its last row is the same both times; an id that came before is dropped by receivers."""
    place.send(Writer().steps(range(6)))
    agent = Writer("node:node-a")
    for minute in range(3):
        place.pass_time(120)
        place.restart()
        place.send(agent.node_rows([minute]))
        place.look()
    firings = [alert for alert in place.heard.alerts if alert.state == "firing"]
    assert ["RunLost"] * 3 == [alert.name for alert in firings]
    assert 6 == len({delivery_id(alert, "heard") for alert in place.heard.alerts})
    assert sorted(a.started_unix_ns for a in firings) == [a.started_unix_ns for a in firings]
    assert firings[0].started_unix_ns < place.heard.alerts[1].ended_unix_ns


def test_a_silent_rank_with_a_living_agent_is_not_lost(place: Place):
    place.send(Writer().steps(range(6)))
    agent = Writer("node:node-a")
    for second in range(0, 300, 30):
        place.clock.advance(30)
        place.send(agent.node_rows([second]))
        assert [] == place.look()


def test_a_collector_that_was_away_does_not_take_its_own_silence_for_theirs(place: Place):
    place.send(Writer().steps(range(6)))
    place.clock.advance(3_600)
    place.restart()
    place.look()
    place.clock.advance(59)
    assert [] == place.look()


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_an_end_that_was_meant_never_pages(place: Place, state: str):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), RunEnded(state=state)))
    place.look()
    place.clock.advance(3_600)
    assert [] == place.look()


def test_a_program_that_failed_is_told_and_pages_nobody(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), RunEnded(state="failed", reason="KeyError")))
    assert ["RunFailed firing"] == place.look()
    assert "notify" == place.heard.alerts[0].severity


def test_the_alert_of_a_failed_run_says_what_the_first_rank_that_failed_said(place: Place):
    ranks = [Writer(f"rank:{rank}") for rank in range(2)]
    for writer in ranks:
        place.send(writer.steps(range(6)))
    place.send(ranks[1].events(RunEnded(state="failed", reason="KeyError: 'x'"), at=START + 1))
    place.send(ranks[0].events(RunEnded(state="failed", reason="timeout"), at=START + 2))
    assert ["RunFailed firing"] == place.look()
    assert "rank 1: KeyError: 'x'" == place.heard.alerts[0].summary


def test_the_alert_of_a_run_whose_rank_was_killed_says_what_its_agent_said(place: Place):
    rank, other, agent = Writer(pid=7), Writer("rank:1", pid=8), Writer("node:node-a")
    for writer in (rank, other):
        place.send(writer.steps(range(6)))
    note = Note(code="rank_gone", text="rank 1 (pid 8 on node-a) is gone without a goodbye")
    place.send(agent.process_rows(6, {1: (8, 0)}))
    place.send(agent.events(note, step=6))
    place.send(rank.events(RunEnded(state="interrupted"), step=9))
    place.send(rank.steps([9]))
    assert ["RunFailed firing"] == place.look()
    assert note.text == place.heard.alerts[0].summary


def test_a_run_whose_processes_are_all_gone_is_lost_at_once_and_told_after_its_hold(place: Place):
    place.send(Writer(pid=7, world_size=1).steps(range(6)))
    agent = Writer("node:node-a")
    assert [] == place.look()
    place.send(agent.process_rows(6, {0: (7, 0)}))
    assert [] == place.look()
    assert {RUN: "lost"} == states(place)
    place.clock.advance(15)
    assert ["RunLost firing"] == place.look()


def test_a_second_death_is_not_told_with_the_first_ones_process(place: Place):
    """Node and agent died together: that of the relaunch tells of the first death, late."""
    place.send(Writer(pid=7, world_size=1, started=START).steps(range(6)))
    again, agent = Writer(pid=8, world_size=1, started=START + 10), Writer("node:node-a")
    place.send(again.steps(range(6, 9)))
    for pid, at in ((7, START + 20), (8, START + 30)):
        text = f"rank 0 (pid {pid} on node-a) ended without a clean exit; its last step is 8"
        place.send(agent.events(Note(code="rank_gone", text=text), step=8, at=at))
        place.send(agent.process_rows(8, {0: (pid, 0)}))
    place.look()
    place.clock.advance(15)
    assert ["RunLost firing"] == place.look()
    summary = place.heard.alerts[0].summary
    assert "pid 8" in summary
    assert "pid 7" not in summary


def test_a_run_above_its_cap_is_told_once_until_it_is_below_also_over_a_restart(place: Place):
    place.send(Writer().steps(range(3), loss=1.0))
    assert [] == place.look()
    place.store.counters.over_cap = {RUN: "this run has 6 GB"}
    place.look()
    assert ["RunOverCap firing"] == place.look()
    (alert,) = place.heard.alerts
    assert ("notify", "this run has 6 GB") == (alert.severity, alert.summary)
    place.store.counters.over_cap = None  # no run was looked at since the start
    place.restart()
    assert ["RunOverCap firing"] == place.look()
    place.store.counters.over_cap = {}
    assert ["RunOverCap firing", "RunOverCap resolved"] == place.look()


def test_a_silence_withholds_and_its_end_tells(place: Place):
    writer = Writer()
    place.send(writer.events(started(), decision(step=5, action="rollback", budget_left=2)))
    place.look()
    (view,) = place.alerts()
    request = AckRequest(by="alice", reason="known", silence_seconds=600)
    place.acting.inbox.acknowledge(view.fingerprint, request)
    place.send(writer.steps(range(16)))
    place.look()
    assert ["TrainingRolledBack firing"] == place.heard.words
    place.clock.advance(601)
    assert "TrainingRolledBack resolved" in place.look()


def test_pending_commands_expire_by_themselves(place: Place):
    from trainvitals.views import CommandRequest
    from vitals_collector.alerts import commands

    place.send(Writer().events(started()))
    request = CommandRequest(action="halt", reason="x")
    now = place.clock.time_ns()
    command = signed(RUN, request, now_unix_ns=now)
    commands.issue(place.store, RUN, command, keys=keys(), now_unix_ns=now)
    place.clock.advance(60)
    place.look()
    assert {"expired": 1} == commands.count_commands(place.store)


# -------------------------------------------------------------------------------- what a look costs


def states(place: Place) -> dict[str, str]:
    return {run.run_id: run.state for run in place.acting.engine._runs.statuses()}


def asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each run that the store is asked after."""
    runs: list[str] = []
    refresh_some = RunStatusCache._refresh_some

    def noted(self: RunStatusCache, connection, some, *rest) -> None:
        runs.extend(some)
        refresh_some(self, connection, some, *rest)

    monkeypatch.setattr(RunStatusCache, "_refresh_some", noted)
    return runs


def test_a_large_run_rests_between_two_looks_but_its_end_is_seen_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_status, "_FEW", 2)
    monkeypatch.setattr(run_status, "_NS_PER_SOURCE", 2_000_000_000)
    ranks = [Writer(f"rank:{rank}", world_size=2) for rank in range(2)]
    for rank in ranks:
        place.send(rank.steps(range(6)))
    place.look()
    runs = asked(place, monkeypatch)
    for second in range(1, 9):
        place.clock.advance(1)
        place.send(ranks[0].steps([5 + second]))
        place.look()
    assert 2 == len(runs), "of eight looks, one each four seconds"
    place.send(ranks[0].events(RunEnded(state="finished")))
    place.look()
    assert {RUN: "finished"} == states(place)


@pytest.mark.parametrize(
    ("num_sources", "lost_after", "seconds"),
    [(999, 60, 0), (4_096, 60, 4.096), (16_384, 60, 10), (4_096, 6, 1)],
)
def test_a_rest_grows_with_the_run_up_to_a_part_of_what_lets_it_be_lost(
    num_sources, lost_after, seconds
):
    when = run_status.Liveness(now_unix_ns=0, lost_after_seconds=lost_after)
    assert seconds == pytest.approx(run_status._rest_ns(num_sources, when) / 1e9)


def test_a_run_that_ended_is_not_asked_after_until_something_of_it_comes(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    ended, going = Writer(world_size=1), Writer(run=OTHER_RUN, world_size=1)
    place.send(ended.steps(range(6)))
    place.send(ended.events(RunEnded(state="finished")))
    place.send(going.steps(range(6)))
    place.look()
    runs = asked(place, monkeypatch)
    for _ in range(3):
        place.clock.advance(1)
        place.look()
    assert [OTHER_RUN] * 3 == runs
    place.send(Writer(started=place.clock.time_ns(), world_size=1).steps([6]))
    place.look()
    assert [RUN, OTHER_RUN] == runs[3:]
    assert {RUN: "running", OTHER_RUN: "running"} == states(place)


def test_rows_alone_are_watched_at_once_and_their_run_is_asked_after_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    job = Job(place.store)
    job.train(range(5))
    job.look()
    runs = asked(job.place, monkeypatch)
    job.train(range(5, 30), slow=True)
    job.place.acting.engine.poll(only_new=True)
    job.place.acting.dispatcher.deliver_due()
    assert ["StragglerRank firing"] == job.place.heard.words
    assert [] == runs


def test_a_decision_and_an_end_are_told_without_waiting_for_the_next_look_at_all_runs(
    place: Place,
):
    writer = Writer(world_size=1)
    place.send(writer.steps(range(6)))
    place.look()
    halt = decision(action="halt", reason="out of budget")
    place.send(writer.events(halt, RunEnded(state="halted", reason="out of budget")))
    place.acting.engine.poll(only_new=True)
    place.acting.dispatcher.deliver_due()
    assert ["TrainingHalted firing"] == place.heard.words


def test_a_run_that_was_removed_from_the_store_is_forgotten(place: Place):
    place.look()
    engine = place.acting.engine
    engine._runs.touch([RUN], at_once=True)
    place.look()
    assert {} == states(place)
    assert [] == place.heard.words


def test_rows_wake_the_engine_as_decisions_do(place: Place):
    engine = place.acting.engine
    for raw in (Writer().steps([0]), Writer("node:node-a").node_rows([0])):
        engine._wake.clear()
        place.send(raw)
        assert engine._wake.is_set()


def test_a_store_that_refuses_a_look_is_asked_again(place: Place, monkeypatch: pytest.MonkeyPatch):
    writer = Writer(world_size=1)
    place.send(writer.steps(range(6)))
    place.send(writer.events(RunEnded(state="failed", reason="x")))

    def refuse(*_: object) -> None:
        raise StorageError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(RunStatusCache, "_refresh_some", refuse)
        with pytest.raises(StorageError):
            place.acting.engine.poll(only_new=True)
    place.acting.engine.poll(only_new=True)
    place.acting.dispatcher.deliver_due()
    assert ["RunFailed firing"] == place.heard.words


def test_the_threads_tell_of_what_only_rows_show_without_being_asked(place: Place):
    told = threading.Event()
    place.heard.notify = lambda alerts: told.set() or DELIVERED
    job = Job(place.store)
    job.place.heard.notify = place.heard.notify
    job.place.acting.start()
    try:
        job.train(range(5))
        job.train(range(5, 30), slow=True)
        assert told.wait(10)
    finally:
        job.place.acting.close()


def test_a_decision_ends_the_pause_between_two_looks(place: Place, monkeypatch: pytest.MonkeyPatch):
    told, looked = threading.Event(), threading.Event()
    place.heard.notify = lambda alerts: told.set() or DELIVERED
    monkeypatch.setattr("vitals_collector.live.engine._PAUSE_SECONDS", 600.0)
    poll = place.acting.engine.poll

    def look(**how: bool) -> None:
        poll(**how)
        looked.set()

    monkeypatch.setattr(place.acting.engine, "poll", look)
    place.acting.start()
    try:
        assert looked.wait(30)
        place.send(Writer().events(started(), decision()))
        assert told.wait(30)
    finally:
        place.acting.close()


def test_the_threads_tell_without_being_asked_and_end(place: Place):
    told = threading.Event()
    place.heard.notify = lambda alerts: told.set() or DELIVERED
    place.acting.start()
    try:
        place.send(Writer().events(started(), decision()))
        assert told.wait(10)
    finally:
        place.acting.close()
    names = {t.name for t in threading.enumerate()}
    assert not names & {"vitals-engine", "vitals-notify"}


def test_a_bug_of_a_look_is_counted_and_said_once_and_the_next_look_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture
):
    engine, went_on = place.acting.engine, threading.Event()
    errors = [KeyError("a"), KeyError("a"), StorageError("disk full"), ZeroDivisionError("b")]

    def look(*, only_new: bool) -> None:
        if errors:
            raise errors.pop(0)
        went_on.set()

    engine.poll = look  # type: ignore[method-assign]
    engine._config = replace(engine._config, interval_seconds=0.01)
    place.acting.start()
    try:
        assert went_on.wait(10)
    finally:
        place.acting.close()
    assert {"engine": 4} == place.store.counters.failures
    ours = [r.exc_info[1] for r in caplog.records if r.name.endswith("engine") and r.exc_info]
    assert ["KeyError('a')", "ZeroDivisionError('b')"] == [repr(error) for error in ours]


# ------------------------------------------------------------------------ a person's own alerts


def own(step: int, name: str = "reward hacked", severity: str = "page", rank: int = -1):
    return FindingRaised(
        finding=Finding(
            kind="user_alert",
            level="advisory",
            step=step,
            detector="rule",
            reason=f"{name}: mean(reward, 50) is 0.95, above 0.9",
            rank=rank,
            cause=name,
            severity=severity,
        )
    )


def test_a_person_s_own_alert_has_the_life_of_ours(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), own(5)))
    for _ in range(2):
        assert ["UserAlert firing"] == place.look()
    (alert,) = place.heard.alerts
    assert ("reward hacked", "page") == (alert.title, alert.severity)
    assert {"run": RUN, "cause": "reward hacked"} == alert.labels
    place.restart()
    place.send(writer.events(own(9)))  # renewed
    place.send(writer.steps(range(6, 19)))
    assert ["UserAlert firing"] == place.look()
    place.send(writer.steps([19]))
    assert ["UserAlert firing", "UserAlert resolved"] == place.look()
    place.restart()
    assert ["UserAlert firing", "UserAlert resolved"] == place.look()


def test_alerts_of_different_names_are_different_alerts(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), own(3, "a"), own(4, "b", "log"), own(5, "a")))
    place.look()
    assert {("a", "page"), ("b", "log")} == {(a.title, a.severity) for a in place.heard.alerts}
    assert 2 == len(place.heard.alerts)


def test_an_alert_of_several_ranks_is_one_and_names_them(place: Place):
    ranks = [Writer(f"rank:{rank}", world_size=12) for rank in range(12)]
    for rank in (0, 2, 1):
        place.send(ranks[rank].steps(range(6)))
        place.send(ranks[rank].events(own(5, rank=rank)))
    assert ["UserAlert firing"] == place.look()
    assert place.heard.alerts[0].summary.endswith("above 0.9 (on ranks 0, 1, 2)")
    for rank in range(3, 12):
        place.send(ranks[rank].steps(range(6)))
        place.send(ranks[rank].events(own(5, rank=rank)))
    assert ["UserAlert firing"] == place.look(), "told once, though others raised it too"
    (alert,) = place.alerts()
    assert alert.summary.endswith("(on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more)")
    place.send(ranks[0].steps(range(6, 16)))
    assert ["UserAlert firing", "UserAlert resolved"] == place.look()
    place.send(ranks[5].events(own(30, rank=5)))
    place.look()
    assert place.alerts()[0].summary.endswith("(on rank 5)"), "a new alert, of this rank alone"


def test_a_silenced_alert_of_one_s_own_is_not_told(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), own(5)))
    place.look()
    (alert,) = place.alerts()
    request = AckRequest(by="me", reason="known", silence_seconds=3600.0)
    place.acting.inbox.acknowledge(alert.fingerprint, request)
    place.send(writer.steps(range(6, 20)))
    place.look()
    place.send(writer.events(own(20)))
    assert ["UserAlert firing"] == place.look()
    assert "firing" == place.alerts()[0].state


# ------------------------------------------------------------------------- who could not be heard


@pytest.mark.parametrize("seconds", [3_600, -3_600])
def test_a_clock_that_is_set_loses_no_living_run_and_hides_no_dead_one(place: Place, seconds: int):
    writer = Writer()
    query = Query(place.store, clock=place.clock, lost_after_seconds=60.0)
    place.send(writer.steps(range(6)))
    place.look()
    place.clock.jump(seconds)
    for step in range(6, 24):
        place.send(writer.steps([step]))
        assert [] == place.pass_time(5)
        assert "running" == query.ask(RunQuestion(run_id=RUN)).summary.state
    place.clock.jump(seconds)
    assert [] == place.pass_time(60)
    assert ["RunLost firing"] == place.pass_time(25)
    assert "lost" == query.ask(RunQuestion(run_id=RUN)).summary.state


@pytest.mark.parametrize("seconds", [3_600, -3_600])
def test_a_clock_that_is_set_while_an_alert_holds_changes_not_when_it_pages(
    place: Place, seconds: int
):
    place.send(Writer().steps(range(6)))
    place.pass_time(65)
    place.clock.jump(seconds)
    assert [] == place.pass_time(5)
    assert ["RunLost firing"] == place.pass_time(15)


def test_a_run_that_died_before_the_clock_was_set_back_and_the_collector_restarted_pages(
    place: Place,
):
    place.send(Writer().steps(range(6)))
    place.look()
    place.clock.jump(-3_600)
    place.restart()
    assert [] == place.pass_time(60)
    assert ["RunLost firing"] == place.pass_time(25)


def test_nobody_is_lost_for_the_collector_stood_still(place: Place):
    place.send(Writer().steps(range(6)))
    place.look()
    place.clock.advance(90)
    assert [] == place.look()
    query = Query(place.store, clock=place.clock)
    assert "running" == query.ask(RunQuestion(run_id=RUN)).summary.state
    place.clock.advance(20)
    assert [] == place.look()
    assert ["RunLost firing"] == place.pass_time(90)


def test_nobody_is_lost_while_the_store_answers_nobody_and_who_stays_silent_is_lost_after(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def away() -> None:
        raise StorageError("the database does not answer")

    place.send(Writer().steps(range(6)))
    place.look()
    with monkeypatch.context() as patch:
        patch.setattr(place.store, "read_transaction", away)
        for _ in range(24):
            place.clock.advance(5)
            with pytest.raises(StorageError):
                place.look()
    assert [] == place.look()
    assert [] == place.pass_time(60)
    assert ["RunLost firing"] == place.pass_time(25)


@pytest.mark.parametrize("error", [StorageError("no room"), RuntimeError("a bug")])
def test_nobody_is_lost_while_what_is_sent_cannot_be_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def refuse(*_: object) -> None:
        raise error

    place.send(Writer().steps(range(6)))
    place.look()
    monkeypatch.setattr("vitals_collector.api.ingest_route.store_bodies", refuse)
    commits = CommitQueue(place.store, clock=place.clock, on_done=lambda _: None)
    for _ in range(24):
        place.clock.advance(5)
        commits._store_group([])
        assert [] == place.look()
    assert [] == place.pass_time(60)
    assert ["RunLost firing"] == place.pass_time(25)


def test_nobody_is_lost_while_one_commit_takes_minutes(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def hang(*_: object) -> tuple[()]:
        assert [] == place.pass_time(120)
        return ()

    place.send(Writer().steps(range(6)))
    place.look()
    monkeypatch.setattr("vitals_collector.api.ingest_route.store_bodies", hang)
    commits = CommitQueue(place.store, clock=place.clock, on_done=lambda _: None)
    commits._store_group([])
    assert [] == place.pass_time(60)
    assert ["RunLost firing"] == place.pass_time(25)
