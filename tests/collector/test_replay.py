"""A recorded run is judged again from what is stored, and must come out the same (I8)."""

import math

import msgspec

from tests.collector.alerting import Place, started
from tests.collector.rows import RUN, Writer
from tests.support.replays import COURSE, columns, replayed
from trainvitals.policy import CheckpointRef, Judge, JudgeConfig, PolicyConfig, StepInputs
from trainvitals.records import (
    AttemptStarted,
    CheckpointChanged,
    DecisionMade,
    Finding,
    FindingRaised,
    RunInfo,
    RunStarted,
)
from trainvitals.testing import judgements, series
from vitals_collector.report.replay import replay
from vitals_collector.storage.schema import sources

# ---------------------------------------------------------------------------------------- replay


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


def test_a_recorded_run_is_reproduced_decision_by_decision(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    place.send(Writer().events(started("guard")))
    writer = Writer()
    write(place, writer, said)
    done = replayed(place)
    assert [] == done.differences()
    assert repr([r for r, _ in said]) == repr(list(done.records))
    assert repr([j.findings for _, j in said]) == repr([j.findings for j in done.judgements])
    assert ["skip_step"] * 3 == [d.action for d in done.decisions]


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
    later = series("loss 2x30 30 30 2x20; grad_norm 1x52", attempt=2, first_step=40)
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
    done = replayed(place)
    assert [] == done.differences()
    assert repr([j.findings for _, j in said]) == repr([j.findings for j in done.judgements])
    assert ["rollback", "skip_step", "skip_step"] == [d.action for d in done.decisions]


def test_other_settings_leave_the_kind_of_the_loss_as_the_run_declared_it(place: Place):
    declared = JudgeConfig(loss_kind="rl")
    said = judgements(Judge(declared), "loss 2x60 90x6 2x10; grad_norm 1x76")
    info = RunInfo(mode="guard", readback_lag=1, judge=msgspec.to_builtins(declared))
    writer = Writer()
    place.send(writer.events(RunStarted(info=info)))
    rows = [columns(record) for record, _ in said]
    steps = [record.step for record, _ in said]
    place.send(writer.steps(steps, **{name: [row[name] for row in rows] for name in rows[0]}))
    others = JudgeConfig(ladder=PolicyConfig(max_withheld=5))
    assert [] == replayed(place, config=others).differences()


def test_a_ledger_that_was_changed_is_found_out(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    at = next(i for i, (_, j) in enumerate(said) if j.decision)
    record, judgement = said[at]
    forged = msgspec.structs.replace(judgement.decision, rank=3, rule="other")
    said[at] = (record, judgement._replace(decision=forged))
    write(place, Writer(), said)
    differences = replayed(place).differences()
    assert 1 == len(differences)
    assert "rule 'nonfinite' instead of 'other', rank -1 instead of 3" in differences[0]


def test_a_row_that_was_changed_shows_in_the_limits_after_it(place: Place):
    said = judgements(Judge(mode="guard"), COURSE)
    record, judgement = said[40]
    said[40] = (msgspec.structs.replace(record, loss=2.9), judgement)
    write(place, Writer(), said)
    (words,) = replayed(place).differences()
    assert words.startswith("limits differ from the recorded ones in")
    assert "first at " in words


def test_other_settings_show_what_would_have_been_decided(place: Place):
    said = judgements(Judge(mode="guard"), "loss 3..2x60 nanx3 2x10")
    write(place, Writer(), said)
    strict = JudgeConfig(ladder=PolicyConfig(max_skips_in_a_row=2))
    done = replayed(place, config=strict)
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
    (record,) = replayed(place).records
    assert ((1, 2), (3,)) == (record.nonfinite_ranks, record.failed_ranks)


def test_missing_and_nan_stay_apart(place: Place):
    place.send(Writer().steps([0, 1], loss=[None, math.nan]))
    first, second = replayed(place).records
    assert first.loss is None
    assert second.loss is not None and math.isnan(second.loss)


def test_lost_rows_are_said(place: Place):
    writer = Writer()
    place.send(writer.steps([0], loss=1.0))
    place.send(writer.steps([5], loss=1.0, lose=4))
    assert 4 == replayed(place).num_lost_rows


def test_a_replay_changes_nothing_in_the_store(place: Place):
    write(place, Writer(), judgements(Judge(mode="guard"), COURSE))
    before = place.alerts()
    replay(place.store, RUN)
    assert before == place.alerts()
    with place.store.read_transaction() as connection:
        assert 1 == len(connection.execute(sources.select()).all())


def test_a_halt_because_of_a_lost_policy_is_reproduced(place: Place):
    lost = Finding(
        kind="policy_collapse",
        level="advisory",
        step=49,
        detector="policy_collapse",
        reason="the policy collapsed",
        value=0.01,
        limit=0.1,
        onset_step=40,
        cause="policy_collapse",
    )
    records = [record for record, _ in judgements(Judge(mode="guard"), "loss 2x51")]
    judge = Judge(mode="guard")
    said = [
        (r, judge.judge(r, StepInputs(r.step + 1, collapse=lost if r.step == 50 else None)))
        for r in records
    ]
    made = said[-1][1].decision
    assert ("halt", "post_training") == (made.action, made.rule)
    write(place, Writer(), said)
    done = replayed(place)
    assert [] == done.differences()
    assert ["halt"] == [decision.action for decision in done.decisions]
