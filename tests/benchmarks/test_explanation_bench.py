"""The benchmark of statements: its scoring rule, its plan, and a slice of it."""

import pytest
from msgspec.structs import replace

from vitals_bench.explanation.jobs import Options, Outcome, jobs_of, run_job, run_jobs
from vitals_bench.explanation.kinds import (
    AFTER_STEPS,
    KINDS,
    OVERLAP_STEPS,
    PLACEMENTS,
    Job,
    Truth,
    plan,
    truth_of,
)
from vitals_bench.explanation.measure import figures
from vitals_bench.explanation.scoring import SILENT, num_invented, score
from vitals_bench.explanation.statements import Statement
from vitals_bench.rows import Grid

pytestmark = pytest.mark.nightly

TRUTH = Truth(kind="nan_grad", step=300, rank=-1, layer="2")
RIGHT = Statement(
    incident_id="1-300-nonfinite_gradient",
    title="Skipped: nonfinite gradient at step 300",
    onset=300,
    last=301,
    cause="nonfinite_gradient",
    sentence="Gradients were NaN at step 300. Moved first: gradient norm of layer `2` turned NaN "
    "or infinite at step 300. Then: loss at step 301.",
    state="Finished after step 399. Resolved: 98 healthy steps since step 301.",
    next="Nothing to do.",
)


def test_a_statement_is_right_only_if_step_rank_cause_and_first_mover_are():
    assert "right" == score(TRUTH, [RIGHT], ranks=2).whole
    sentence = RIGHT.sentence
    for field, wrong in (
        ("step", replace(RIGHT, onset=280)),
        ("cause", replace(RIGHT, cause="loss_divergence")),
        ("rank", replace(RIGHT, sentence=f"Rank 1's {sentence}")),
        ("mover", replace(RIGHT, sentence=sentence.replace("`2`", "`0`"))),
        ("mover", replace(RIGHT, sentence=sentence.replace("infinite at step 300", "at step 261"))),
        ("mover", replace(RIGHT, why="Moved first: data wait on rank 1 at step 300.")),
    ):
        found = score(TRUTH, [wrong], ranks=2)
        assert ("wrong", "wrong") == (getattr(found, field), found.whole), field


def test_what_is_not_stated_is_silent_and_not_wrong():
    unnamed = replace(RIGHT, sentence="Gradients were NaN at step 300. No precursor before it.")
    found = score(TRUTH, [unnamed], ranks=1)
    assert ("right", "silent", "silent") == (found.cause, found.mover, found.whole)
    assert SILENT == score(TRUTH, [], ranks=1)
    before = replace(RIGHT, onset=62, last=62)
    assert SILENT == score(TRUTH, [before], ranks=1)
    assert 1 == num_invented([TRUTH], [before, RIGHT])
    of_rank = Truth(kind="inf_act", step=300, rank=1, layer="2")
    assert "silent" == score(of_rank, [RIGHT], ranks=2).rank


def test_a_lasting_fault_is_not_resolved_and_a_merged_incident_is_wrong_about_the_second():
    lasting = Truth(kind="nan_weight", step=300, rank=-1, layer="2")
    assert "wrong" == score(lasting, [RIGHT], ranks=1).end
    merged = replace(RIGHT, onset=260, last=301, cause="nonfinite_loss")
    found = score(TRUTH, [merged], ranks=1)
    assert ("wrong", "wrong") == (found.step, found.cause)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_kind_has_its_faults_at_known_steps(placement):
    distance = {"alone": 0, "after": AFTER_STEPS, "overlapping": OVERLAP_STEPS}[placement]
    for kind in KINDS:
        job = Job(kind, placement, 3, 2)
        faults = plan(job, ["0", "2"])
        assert faults == plan(job, ["0", "2"])
        assert [kind] == [fault.name for fault in faults if fault.name == kind]
        assert faults[0].step - faults[-1].step == distance
        assert all(truth_of(fault).rank in (-1, 0, 1) for fault in faults)


def test_15_kinds_and_half_of_the_seeds_are_held_out():
    assert 15 == len(KINDS)
    jobs = jobs_of(Options(ranks=(1, 2), has_quiet=False), quick=False)
    assert 15 * 4 * 3 * 2 == len(jobs) == len(set(jobs))
    assert len(jobs) == 2 * sum(job.is_held_out for job in jobs)


def test_healthy_trainings_can_run_alone():
    jobs = jobs_of(Options(kinds=("healthy",), seeds=(5, 7), ranks=(1, 2)), quick=False)
    assert [("", 5, 1), ("", 7, 1), ("", 5, 2), ("", 7, 2)] == [
        (job.kind, job.seed, job.ranks) for job in jobs
    ]


def test_two_trainings_are_read_and_scored_and_do_not_run_again(tmp_path):
    results = tmp_path / "results.jsonl"
    options = Options(
        kinds=("nan_grad", "crash"), seeds=(0,), placements=("alone",), results=results
    )
    jobs = jobs_of(options, quick=True)
    outcomes = list(run_jobs(jobs, options))
    assert [""] * 3 == [outcome.error for outcome in outcomes]
    assert ["right", "right"] == [o.scores[0].whole for o in outcomes if o.job.kind]
    assert outcomes[-1].windows > 0
    again = list(run_jobs(jobs, Options(results=results, is_run=False)))
    assert outcomes == again
    (table,) = [entry for entry in figures(again) if isinstance(entry, Grid)]
    assert ("all", "", "2/0/0") == table.rows[-1][:3]


@pytest.mark.slow
@pytest.mark.dist
def test_a_training_of_two_ranks_leaves_one_run():
    outcome: Outcome = run_job(Job("inf_act", "alone", 0, 2))
    assert "" == outcome.error
    assert ("right", "right") == (outcome.scores[0].step, outcome.scores[0].cause)
