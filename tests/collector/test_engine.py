import math

import msgspec
import pytest

from tests.collector.rows import RUN, Writer
from trainvitals.policy import CheckpointRef, Judge, JudgeConfig, LadderConfig
from trainvitals.records import (
    AttemptStarted,
    CheckpointChanged,
    Decision,
    DecisionMade,
    FindingRaised,
    RunEnded,
    RunInfo,
    RunStarted,
    StepRecord,
)
from trainvitals.testing import ManualClock, judgements, series
from trainvitals.views import AckRequest, AlertView
from vitals_collector.alerts import InboxConfig
from vitals_collector.engine import Acting, EngineConfig, assemble
from vitals_collector.ingest import ingest
from vitals_collector.notifiers import DELIVERED, Result
from vitals_collector.replay import replay
from vitals_collector.schema import sources
from vitals_collector.store import Store


class Heard:
    """A notifier that keeps what it was told, and answers as planned."""

    takes_log = True

    def __init__(self, *results: Result, name: str = "heard", reposts: bool = False) -> None:
        self.name = name
        self.reposts = reposts
        self.results = list(results)
        self.alerts: list[AlertView] = []

    def notify(self, alerts) -> Result:
        result = self.results.pop(0) if self.results else DELIVERED
        if not result.error:
            self.alerts += alerts
        return result

    @property
    def words(self) -> list[str]:
        return [f"{a.name} {a.state}" for a in self.alerts]


class Place:
    """A store, a clock, and the acting parts over them; ``restart`` loses all memory."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.heard = Heard()
        self.acting: Acting
        self.restart()

    def restart(self) -> None:
        self.store.after_ingest.clear()
        self.acting = assemble(
            self.store,
            [self.heard],
            clock=self.clock,
            config=EngineConfig(lost_after_seconds=60.0),
            inbox_config=InboxConfig(healthy_steps=10, lost_hold_seconds=15.0),
            up_since_unix_ns=self.clock.time_ns(),
        )

    def send(self, raw: bytes) -> None:
        ingest(self.store, raw, received_unix_ns=self.clock.time_ns())

    def look(self) -> list[str]:
        self.acting.engine.poll()
        self.acting.dispatcher.pump()
        return self.heard.words


@pytest.fixture
def place(store: Store) -> Place:
    return Place(store)


def decision(seq: int = 1, action: str = "skip_step", step: int = 5, **fields) -> DecisionMade:
    given = {
        "ledger_seq": seq,
        "action": action,
        "step": step,
        "decided_at_step": step + 1,
        "attempt": 1,
        "reason": f"because of step {step}",
        "rule": "nonfinite",
        "cause": "nonfinite_loss",
    }
    return DecisionMade(decision=Decision(**{**given, **fields}))


def started(mode: str = "heal", lag: int = 1) -> RunStarted:
    return RunStarted(info=RunInfo(name="a run", mode=mode, readback_lag=lag))


# ------------------------------------------------------------------------------------ decisions


def test_a_decision_is_told_once_however_often_its_batch_arrives(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    raw = writer.events(started(), decision())
    for _ in range(3):
        place.send(raw)
        assert ["StepSkipped firing"] == place.look()


def test_a_collector_that_died_between_storing_and_alerting_goes_on_where_it_was(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    place.send(writer.events(started(), decision()))
    place.restart()
    assert ["StepSkipped firing"] == place.look()
    place.restart()
    assert ["StepSkipped firing"] == place.look()


def test_an_alert_whose_delivery_was_cut_short_is_delivered_after_the_restart(place: Place):
    place.heard = Heard(Result(recoverable=True, error="503"))
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
    assert 1_200 == place.acting.inbox.listed()[0].step


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


def test_a_silent_run_is_lost_after_the_limit_and_its_hold_and_back_when_it_speaks(place: Place):
    writer = Writer()
    place.send(writer.steps(range(6)))
    heard = []
    for seconds in (0, 60, 1, 14, 1):
        place.clock.advance(seconds)
        heard.append(len(place.look()))
    assert [0, 0, 0, 0, 1] == heard
    place.send(writer.steps([6]))
    assert ["RunLost firing", "RunLost resolved"] == place.look()


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


def test_a_silence_withholds_and_its_end_tells(place: Place):
    writer = Writer()
    place.send(writer.events(started(), decision(step=5, action="rollback", budget_left=2)))
    place.look()
    (view,) = place.acting.inbox.listed()
    request = AckRequest(by="alice", reason="known", silence_seconds=600)
    place.acting.inbox.acknowledge(view.fingerprint, request)
    place.send(writer.steps(range(16)))
    place.look()
    assert ["TrainingRolledBack firing"] == place.heard.words
    place.clock.advance(601)
    assert "TrainingRolledBack resolved" in place.look()


def test_pending_commands_expire_by_themselves(place: Place):
    from trainvitals.views import CommandRequest
    from vitals_collector import commands

    place.send(Writer().events(started()))
    request = CommandRequest(action="halt", reason="x")
    commands.issue(place.store, RUN, request, issued_by="alice", now_unix_ns=place.clock.time_ns())
    place.clock.advance(60)
    place.look()
    assert {"expired": 1} == commands.counts(place.store)


def test_the_threads_tell_without_being_asked_and_end(place: Place):
    import threading

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


# ---------------------------------------------------------------------------------------- replay


def columns(record: StepRecord) -> dict[str, object]:
    """Return the row's columns as rank 0 writes them."""
    loss, norm = record.loss, record.grad_norm
    verdict = (
        1 * (loss is not None and not math.isfinite(loss))
        + 2 * (norm is not None and not math.isfinite(norm))
        + 16 * record.overflow
        + 32 * bool(record.failed_ranks)
    )
    ranks = record.nonfinite_ranks
    return {
        "loss": loss,
        "loss_max": record.loss_max,
        "grad_norm": norm,
        "loss_limit": record.loss_limit,
        "grad_norm_limit": record.grad_norm_limit,
        "learning_rate": record.learning_rate,
        "verdict": verdict,
        "skipped": int(record.skipped),
        "culprit_rank": ranks[0] if len(ranks) == 1 else -1,
        "nonfinite_params": record.nonfinite_params,
        "rank_loss": 1.0,
    }


def write(place: Place, writer: Writer, said) -> None:
    """Store what a run would have written of judged steps."""
    place.send(writer.events(started()))
    rows = [columns(record) for record, _ in said]
    together = {name: [row[name] for row in rows] for name in rows[0]}
    place.send(writer.steps([record.step for record, _ in said], **together))
    for record, judgement in said:
        events = [FindingRaised(finding=f) for f in judgement.findings]
        if judgement.decision is not None:
            events.append(DecisionMade(decision=judgement.decision))
        if events:
            place.send(writer.events(*events, step=record.step, attempt=record.attempt))


COURSE = "loss 3..2x60 nan 2x10 40 2x30; grad_norm 1x60 1 1x10 50 1x30; loss_max 2x102"


def test_a_recorded_run_is_reproduced_decision_by_decision(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    place.send(Writer().events(started("guard")))
    writer = Writer()
    write(place, writer, said)
    done = replay(place.store, RUN)
    assert [] == done.differences()
    assert repr([r for r, _ in said]) == repr(list(done.records))
    assert repr([j.findings for _, j in said]) == repr([j.findings for j in done.judgements])
    assert ["skip_step", "skip_step"] == [d.action for d in done.decisions]


def test_a_rollback_is_reproduced_and_the_new_branch_goes_on_from_its_checkpoint(place: Place):
    ref = CheckpointRef(id="c40", step=40, attempt=1)
    judge = Judge(mode="heal")
    first = series("loss 3..2x60 nanx3; nonfinite_params 0x60 1 1 1", attempt=1)
    said = []
    state = None
    for record in first:
        if record.step == ref.step:
            state = judge.detector_state()
        known = [ref] if record.step > 50 else []
        said += judgements(judge, [record], checkpoints=known, lag=0, now_attempt_id=2)
        if said[-1][1].decision is not None:
            break
    made = said[-1][1].decision
    assert ("rollback", "c40") == (made.action, made.checkpoint_id)
    judge.rolled_back(detector_state=state, attempt=2)
    later = series("loss 2x30 30 2x20; grad_norm 1x51", attempt=2, first_step=40)
    said += judgements(judge, later, lag=0)

    writer = Writer()
    place.send(writer.events(started(lag=0)))
    place.send(writer.events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    for record, judgement in said:
        place.send(writer.steps([record.step], attempt=record.attempt, **columns(record)))
        events = []
        if (record.attempt, record.step) == (1, 50):
            events.append(
                CheckpointChanged(
                    checkpoint_id="c40", checkpoint_step=40, state="healthy", where="memory"
                )
            )
        if judgement.decision is not None:
            events.append(DecisionMade(decision=judgement.decision))
        if events:
            place.send(writer.events(*events, step=record.step, attempt=record.attempt))
        if judgement.decision is made:
            fork = AttemptStarted(id=2, parent=1, fork_step=40, reason="rollback")
            place.send(writer.events(fork, step=40, attempt=2))
    done = replay(place.store, RUN)
    assert [] == done.differences()
    assert repr([j.findings for _, j in said]) == repr([j.findings for j in done.judgements])
    assert ["rollback", "skip_step"] == [d.action for d in done.decisions]


def test_a_ledger_that_was_changed_is_found_out(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    at = next(i for i, (_, j) in enumerate(said) if j.decision)
    record, judgement = said[at]
    forged = msgspec.structs.replace(judgement.decision, rank=3, rule="other")
    said[at] = (record, judgement._replace(decision=forged))
    write(place, Writer(), said)
    differences = replay(place.store, RUN).differences()
    assert 1 == len(differences)
    assert "rule 'nonfinite' instead of 'other', rank -1 instead of 3" in differences[0]


def test_a_row_that_was_changed_shows_in_the_limits_after_it(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    record, judgement = said[40]
    said[40] = (msgspec.structs.replace(record, loss=2.9), judgement)
    write(place, Writer(), said)
    (words,) = replay(place.store, RUN).differences()
    assert words.startswith("other limits than recorded in")
    assert words.endswith("the first 42")


def test_other_settings_show_what_would_have_been_decided(place: Place):
    said = judgements(Judge(mode="guard"), "loss 3..2x60 nanx3 2x10")
    write(place, Writer(), said)
    strict = JudgeConfig(ladder=LadderConfig(max_skips_in_a_row=2))
    done = replay(place.store, RUN, config=strict)
    assert "halt" in [d.action for d in done.decisions]
    assert done.differences()


def test_ranks_that_the_reduced_row_does_not_name_come_from_their_own_rows(place: Place):
    place.send(Writer().events(started()))
    nan = math.nan
    place.send(
        Writer("rank:0").steps([0], verdict=1 + 32, culprit_rank=-1, loss=nan, rank_loss=1.0)
    )
    place.send(Writer("rank:1").steps([0], rank_loss=nan))
    place.send(Writer("rank:2").steps([0], rank_loss=nan))
    place.send(Writer("rank:3").steps([0], rank_loss=None))
    (record,) = replay(place.store, RUN).records
    assert ((1, 2), (3,)) == (record.nonfinite_ranks, record.failed_ranks)


def test_missing_and_nan_stay_apart(place: Place):
    place.send(Writer().steps([0, 1], loss=[None, math.nan]))
    first, second = replay(place.store, RUN).records
    assert first.loss is None
    assert second.loss is not None and math.isnan(second.loss)


def test_lost_rows_are_said(place: Place):
    writer = Writer()
    place.send(writer.steps([0], loss=1.0))
    place.send(writer.steps([5], loss=1.0, lose=4))
    assert 4 == replay(place.store, RUN).num_lost_rows


def test_a_replay_changes_nothing_in_the_store(place: Place):
    write(place, Writer(), judgements(Judge(mode="guard"), COURSE))
    before = place.acting.inbox.listed()
    replay(place.store, RUN)
    assert before == place.acting.inbox.listed()
    with place.store.read() as connection:
        assert 1 == len(connection.execute(sources.select()).all())
