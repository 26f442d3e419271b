import json
import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainvitals.policy_run import FIRST, REFS
from trainvitals.policy import DurablePolicyState, Judge, Judgement, Mode, StepInputs
from trainvitals.records import StepRecord
from trainvitals.testing import decisions, judgements, series


def test_the_judge_skips_rolls_back_and_goes_on_with_the_restored_detectors() -> None:
    judge = Judge(mode="heal")
    decisions(judge, "loss 2.1x60", checkpoints=[FIRST])
    snapshot = json.loads(json.dumps(judge.detector_state()))
    ledger = decisions(
        judge, series("loss nanx40", first_step=60), checkpoints=[FIRST], now_attempt_id=2
    )
    assert ["skip_step"] * 31 + ["rollback"] == [d.action for d in ledger]
    judge.rolled_back(detector_state=snapshot, attempt=2, step=0)
    assert snapshot == judge.detector_state()
    assert (2, 32, 1, -1) == (
        judge.attempt, judge.facts.ledger_seq, judge.facts.num_rollbacks, judge.last_unhealthy_step,
    )  # fmt: skip
    (entry,) = decisions(judge, series("loss 2.1 nan", attempt=2))
    assert 33 == entry.ledger_seq


def test_records_of_another_attempt_are_ignored() -> None:
    judge = Judge(mode="heal")
    judge.rolled_back(detector_state=None, attempt=2)
    late = StepRecord(step=60, attempt=1, loss=math.nan, skipped=True)
    assert Judgement() == judge.judge(late, StepInputs(61, checkpoints=REFS))
    assert -1 == judge.last_unhealthy_step


def test_an_announced_change_is_not_judged() -> None:
    judge = Judge()
    decisions(judge, "loss 2.1x60")
    judge.rebaseline(30)
    assert [] == decisions(judge, series("loss 9.5x40", first_step=60))


def test_a_skipped_step_leaves_the_references_of_the_detectors_as_they_are() -> None:
    pairs = judgements(Judge(mode="guard"), "loss 2.1x60 nan 2.1x4 9.5 2.1x4")
    found = [(record.step, f.kind) for record, judged in pairs for f in judged.findings]
    assert [(60, "nonfinite"), (65, "spike")] == found


def test_facts_go_through_the_plan_journal_and_keep_the_budget_spent() -> None:
    judge = Judge(mode="heal")
    judge.rolled_back(detector_state=None, attempt=1)
    for step in (200, 150, 150):
        bad = StepRecord(step=step, attempt=1, nonfinite_params=1, skipped=True)
        judge.judge(bad, StepInputs(step, checkpoints=[FIRST], next_attempt=1))
        judge.rolled_back(detector_state=None, attempt=1)
    facts = msgspec.json.decode(msgspec.json.encode(judge.facts), type=DurablePolicyState)
    relaunched = Judge(mode="heal", facts=facts)
    bad = StepRecord(step=150, attempt=1, nonfinite_params=1, skipped=True)
    decision = relaunched.judge(bad, StepInputs(151, checkpoints=[FIRST])).decision
    assert decision is not None
    assert ("halt", 4) == (decision.action, decision.ledger_seq)


def test_ranks_that_judged_alike_have_the_same_digest_and_others_not() -> None:
    same, other, third = Judge(), Judge(), Judge()
    for judge, text in ((same, "loss 2.1x40"), (other, "loss 2.1x40"), (third, "loss 2.2x40")):
        decisions(judge, text)
    assert same.digest() == other.digest() != third.digest()


modes: st.SearchStrategy[Mode] = st.sampled_from(["observe", "guard", "heal"])
numbers = st.none() | st.floats() | st.floats(1.0, 2.5)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(numbers, numbers, st.integers(0, 12)), max_size=80), modes)
def test_a_restored_judge_goes_on_as_the_kept_one(
    given_numbers: list[tuple[float | None, float | None, int]], mode: Mode
) -> None:
    kept, restored = Judge(mode=mode), Judge(mode=mode)
    for step, (loss, norm, odd) in enumerate(given_numbers):
        record = StepRecord(
            step=step,
            attempt=1,
            loss=loss,
            grad_norm=norm,
            loss_limit=kept.limits().loss,
            nonfinite_params=int(odd == 12),
            skipped=odd == 11,
        )
        said = kept.judge(record, StepInputs(step, checkpoints=[FIRST], next_attempt=1))
        again = restored.judge(record, StepInputs(step, checkpoints=[FIRST], next_attempt=1))
        assert repr(said) == repr(again)
        if kept.facts.num_rollbacks and said.decision and said.decision.action == "rollback":
            kept.rolled_back(detector_state=None, attempt=1)
            restored.rolled_back(detector_state=None, attempt=1)
        state = msgspec.to_builtins(kept.state_dict())
        restored = Judge(mode=mode)
        restored.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
        assert kept.digest() == restored.digest()
