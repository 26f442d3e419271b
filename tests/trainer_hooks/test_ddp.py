"""Real torchrun ranks: every fault on one rank alone, the same decision on all."""

import math

import pytest

from tests.trainer_hooks.short_demo import SMALL
from tests.trainer_hooks.torchrun import reader_of, run_id_of, train
from trainvitals.testing.faults import FaultPlan
from trainvitals.views import DecisionsQuestion, EventsQuestion, RunQuestion, SeriesQuestion

pytestmark = pytest.mark.dist

STEPS = 40


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Four ranks, because two prove nothing: a + b = b + a."""
    faults = FaultPlan().nan_gradient_at(rank=1, step=20).nan_loss_at(rank=2, step=24)
    folder, small = tmp_path_factory.mktemp("four"), {SMALL: "1"}
    trained = train(folder, ranks=4, steps=STEPS, faults=faults, environ=small)
    assert trained.exit_code == 0, trained.output[-3000:]
    return trained


def test_each_fault_is_skipped_at_its_step_and_laid_at_its_rank(four_ranks):
    with reader_of(four_ranks) as reader:
        decisions = [
            v.decision for v in reader.ask(DecisionsQuestion(run_id=run_id_of(four_ranks)))
        ]
    assert [(d.action, d.step, d.rank, d.cause) for d in decisions] == [
        ("skip_step", 20, 1, "nonfinite_gradient"),
        ("skip_step", 24, 2, "nonfinite_loss"),
    ]


def test_training_goes_on_and_ends_finite(four_ranks):
    assert math.isfinite(four_ranks.result["validation_loss"])
    assert four_ranks.result["updates_tried"] == STEPS


def test_every_rank_wrote_every_step_once(four_ranks):
    with reader_of(four_ranks) as reader:
        for rank in range(4):
            reply = reader.ask(
                SeriesQuestion(
                    run_id=run_id_of(four_ranks),
                    metric="steps.rank_loss",
                    source=f"rank:{rank}",
                    points=1000,
                )
            )
            assert list(reply.step) == list(range(STEPS))
            assert [m.step for m in reply.nonfinite] == ([24] if rank == 2 else [])


def test_ranks_agreed_on_every_verdict(four_ranks):
    with reader_of(four_ranks) as reader:
        events = reader.ask(EventsQuestion(run_id=run_id_of(four_ranks)))
        detail = reader.ask(RunQuestion(run_id=run_id_of(four_ranks)))
    assert not [e for e in events if "disagree" in e.text]
    assert detail.summary.state == "finished"
    assert detail.summary.world_size == 4
    assert sum(s.num_lost_rows for s in detail.sources) == 0


def test_of_all_ranks_the_first_alone_speaks(four_ranks):
    run_id = run_id_of(four_ranks)
    path = four_ranks.runs / run_id
    lines = [line for line in four_ranks.output.splitlines() if "vitals: " in line]
    started, skipped, *_, ended, details = lines
    assert (
        f"vitals: run demo ({run_id}) started in guard mode; to follow it: vitals tail {path} "
        "--follow"
    ) == started
    assert skipped.startswith("vitals: step 20: update skipped: ")
    assert (
        f"vitals: run demo ({run_id}) finished after {STEPS} steps: 2 updates skipped, no rollbacks"
    ) == ended
    assert f"vitals: details: vitals show {path}" == details
    assert sorted(set(lines)) == sorted(lines), "nobody else says it too"


@pytest.mark.slow
def test_observe_decides_the_same_and_touches_nothing(tmp_path):
    faults = FaultPlan().spike_gradient_at(rank=1, step=30)
    trained = train(tmp_path, steps=40, mode="observe", faults=faults)
    assert trained.exit_code == 0, trained.output[-3000:]
    with reader_of(trained) as reader:
        decisions = [v.decision for v in reader.ask(DecisionsQuestion(run_id=run_id_of(trained)))]
        skipped = reader.ask(
            SeriesQuestion(run_id=run_id_of(trained), metric="steps.skipped", source="rank:0")
        )
    assert (decisions[0].action, decisions[0].step, decisions[0].acted) == ("skip_step", 30, False)
    assert set(skipped.value) == {0}


@pytest.fixture(scope="module")
def healed(tmp_path_factory):
    """Four ranks, a poisoned window, then parameters overwritten with NaN on rank 2 alone."""
    faults = FaultPlan().poison_batches(first=150, last=164).nan_parameters_at(rank=2, step=200)
    trained = train(
        tmp_path_factory.mktemp("healed"), ranks=4, steps=220, mode="heal", faults=faults
    )
    assert trained.exit_code == 0, trained.output[-3000:]
    return trained


@pytest.mark.slow
def test_broken_parameters_are_rolled_back_on_every_rank_and_poisoned_data_is_trained_on(healed):
    with reader_of(healed) as reader:
        decisions = [v.decision for v in reader.ask(DecisionsQuestion(run_id=run_id_of(healed)))]
        reads = [
            e for e in reader.ask(EventsQuestion(run_id=run_id_of(healed))) if e.kind == "StateRead"
        ]
    *skips, last = [(d.action, d.step, d.rule, d.rank) for d in decisions]
    assert {("skip_step", "nonfinite", 2)} >= {(a, rule, r) for a, _, rule, r in skips}
    # Its replicas are not equal any more, which may be seen before its parameters are looked at.
    assert last[2] in ("replica_corrupted", "nonfinite_params")
    assert ("rollback", 2) == (last[0], last[3])
    assert 200 <= last[1] <= 202
    assert 150 == reads[0].step, "the probe runs at the first reported step"
    assert "the state is healthy" in reads[0].text
    assert math.isfinite(healed.result["validation_loss"])


@pytest.mark.slow
def test_the_curve_is_stitched_and_the_discarded_branch_stays(healed):
    run_id = run_id_of(healed)
    with reader_of(healed) as reader:
        attempts = reader.ask(RunQuestion(run_id=run_id)).attempts
        kept = reader.ask(
            SeriesQuestion(run_id=run_id, metric="steps.loss", source="rank:0", points=1000)
        )
        left = reader.ask(
            SeriesQuestion(
                run_id=run_id, metric="steps.loss", source="rank:0", points=1000, branch="discarded"
            )
        )
    assert [a.ordinal for a in attempts] == [1, 2]
    assert list(kept.step) == list(range(220))
    first, second = attempts
    assert second.parent == first.id
    assert list(left.step) == list(range(second.fork_step, left.step[-1] + 1))
    assert 200 <= left.step[-1] <= 202


@pytest.mark.slow
def test_every_batch_is_trained_again_where_the_data_is_not_to_blame(healed):
    run_id = run_id_of(healed)
    with reader_of(healed) as reader:
        fork = reader.ask(RunQuestion(run_id=run_id)).attempts[1].fork_step
        fed = reader.ask(
            SeriesQuestion(
                run_id=run_id,
                metric="steps.batch_index",
                source="rank:3",
                points=1000,
                branch="all",
            )
        )
    pairs = zip(fed.attempt, fed.value, strict=True)
    again = [int(batch) for attempt, batch in pairs if attempt == max(fed.attempt)]
    assert again == list(range(fork, 220))
