"""The bench of judgement: its worlds are what their labels say, and its tables count rightly."""

import dataclasses
import math

import msgspec
import pytest
import torch
from msgspec.structs import replace

from trainvitals.jsonable import to_json
from trainvitals.records import Finding
from vitals_bench import page
from vitals_bench.judgement import jobs, tables
from vitals_bench.judgement.faults import Fault
from vitals_bench.judgement.jobs import Asked, Job, jobs_of, read_outcomes, run_jobs
from vitals_bench.judgement.ledger import Ledger
from vitals_bench.judgement.run import NumberedBatches, Outcome, run_one
from vitals_bench.judgement.tables import Results
from vitals_bench.judgement.worlds import FAULTS, KINDS, NEW_KINDS, WORLDS
from vitals_bench.rows import Grid

pytestmark = pytest.mark.nightly


def outcome(world="gpt", policy="none", seed=0, clip=1.0, final=1.0, **options):
    base = {"first": 4.0, "digest": "a", "attempted": 700, "seconds": 1.0}
    return Outcome(world=world, policy=policy, seed=seed, clip=clip, final=final, **base | options)


@pytest.mark.parametrize("name", WORLDS)
def test_a_batch_depends_on_its_number_and_the_seed_alone(name):
    world = WORLDS[name]
    first, again = (world.make(seed=3) for _ in range(2))
    first.batch(5)
    for one, other in zip(first.batch(360), again.batch(360), strict=True):
        assert torch.equal(one, other)
    other_seed = world.make(seed=4).batch(360)
    if not first.is_on_policy:
        pairs = zip(first.batch(360), other_seed, strict=True)
        assert not all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", [n for n, w in WORLDS.items() if w.label == "poisoned"])
def test_poison_lies_in_its_window_alone(name):
    world = WORLDS[name]
    task = world.make(seed=0)
    data = NumberedBatches(task, world.fault)
    if world.fault.kind == "nan_loss":
        begin, end = world.fault.begin, world.fault.begin + world.fault.steps
        around = range(begin - 1, end + 1)
        assert [begin - 1, end] == [i for i in around if not world.fault.spoils_loss(i)]
        return
    first, last = world.fault.begin, world.fault.begin + world.fault.steps - 1
    cases = [(first - 1, False), (first, True), (last, True), (last + 1, False)]
    for index, is_poisoned in cases[: 2 if last > task.steps else 4]:
        pairs = zip(data[index][1:], task.batch(index), strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
        assert is_poisoned is not same, index


def test_a_rate_is_wrong_for_as_long_as_the_fault_says():
    fault = Fault(kind="rate", begin=10, steps=5, factor=30.0)
    assert [1.0, 30.0, 30.0, 1.0] == [fault.rate_factor(i) for i in (9, 10, 14, 15)]
    assert [False, True, True, False] == [fault.damages(i) for i in (9, 10, 14, 15)]


def test_an_unwatched_run_is_the_same_each_time_and_another_with_another_seed():
    runs = [
        run_one("regression", clip=1.0, policy="none", seed=seed, steps=40) for seed in (0, 0, 1)
    ]
    assert runs[0].digest == runs[1].digest != runs[2].digest


def test_a_healthy_world_is_compared_with_itself_and_a_faulty_one_with_its_base():
    asked = Asked(worlds=("regression-poison-const30", "gan-tail"), seeds=(4,))
    made = jobs_of(asked, quick=False)
    assert len(made) == len(set(made))
    mine = [job for job in made if job.clip is None and "regression" in job.world]
    assert [
        Job("regression", None, "none", 4),
        Job("regression-poison-const30", None, "none", 4),
        Job("regression-poison-const30", None, "oracle", 4),
        Job("regression-poison-const30", None, "guard", 4),
        Job("regression-poison-const30", None, "heal+probe", 4),
    ] == mine
    assert {"none", "guard", "heal+probe", "heal+kind"} == {
        job.policy for job in made if job.world == "gan-tail"
    }


def test_kinds_run_without_a_clip_with_one_and_with_an_automatic_one():
    asked = Asked(kinds=("diffusion", "gan"), part="healthy", seeds=(1,))
    made = jobs_of(asked, quick=False)
    assert {"diffusion", "gan"} == {job.world for job in made}
    assert {1.0, None, "auto"} == {job.clip for job in made}
    assert {"none", "guard", "heal+probe", "guard+declared", "heal+declared"} == {
        job.policy for job in made
    }
    faults = jobs_of(Asked(kinds=("diffusion",), part="faults", seeds=(1,)), quick=False)
    assert {"diffusion"} | {f"diffusion!{name}" for name in FAULTS} == {job.world for job in faults}
    everything = jobs_of(Asked(kinds=("all",), part="healthy", seeds=(1,)), quick=False)
    assert set(KINDS) == {job.world for job in everything}
    assert 30 <= len(KINDS) and 20 == len(FAULTS)


def test_worlds_chosen_by_name_are_what_they_were_before_there_were_kinds():
    made = jobs_of(Asked(seeds=(0,)), quick=False)
    assert not {job.world for job in made} & set(NEW_KINDS)
    assert {1.0, None} == {job.clip for job in made}


@pytest.mark.parametrize("kind", ["sam", "accumulation", "byol", "dqn", "edge-of-stability"])
def test_an_automatic_clip_is_the_same_bare_and_watched(kind):
    bare, ours = (
        run_one(kind, clip="auto", policy=policy, seed=1, steps=40)
        for policy in ("none", "observe")
    )
    assert bare.digest == ours.digest
    assert {} == ours.errors


@pytest.mark.parametrize("name", [name for name in WORLDS if name.startswith("moe!")])
def test_a_fault_changes_a_training_from_its_step_on(name):
    fault = WORLDS[name].fault
    assert 250 == fault.begin
    faulty = run_one(name, clip=None, policy="none", seed=0, steps=24)
    clean = run_one("moe", clip=None, policy="none", seed=0, steps=24)
    assert faulty.digest != clean.digest


def test_a_loop_that_pages_is_counted_once_while_its_alert_lasts():
    finding = Finding(
        kind="lost_progress", level="advisory", step=40, detector="loss_progress", reason="",
        onset_step=40, cause="lost_progress",
    )  # fmt: skip
    ledger = Ledger("run")
    later = [replace(finding, step=step) for step in (90, 150, 400)]
    ledger.findings += [finding, *later]
    assert {"ProgressLost": 2} == ledger.messages()
    assert 2 == ledger.num_pages()
    assert 10 == ledger.reported_after(30)


def test_a_ledger_counts_what_fleet_detectors_find_in_the_rows_of_a_run():
    name = "diffusion!decay"
    faulty = run_one(name, clip=1.0, policy="guard", seed=1, steps=60)
    assert (0, {"WeightDecayJumped": 1}) == (faulty.reported, faulty.messages)
    clean = run_one("diffusion", clip=1.0, policy="guard", seed=1, steps=60)
    assert {} == clean.messages


def test_what_was_run_before_is_read_and_not_run_again(tmp_path, monkeypatch):
    path = tmp_path / "outcomes.jsonl"
    path.write_bytes(msgspec.json.encode(outcome()) + b"\n")
    new = Job("gpt", None, "none", 0)
    monkeypatch.setattr(jobs, "_run", lambda left, *_: (outcome(clip=None) for _ in left))
    ran = list(run_jobs([Job("gpt", 1.0, "none", 0), new], Asked(results=path), steps=None))
    assert [1.0, None] == [one.clip for one in ran]
    assert [1.0, None] == [one.clip for one in read_outcomes(path)]


def test_a_training_that_ended_in_nan_is_read_as_one_that_did(tmp_path, monkeypatch):
    path = tmp_path / "outcomes.jsonl"
    ruined = outcome(final=float("nan"))
    monkeypatch.setattr(jobs, "_run", lambda *_: iter([ruined]))
    list(run_jobs([Job("gpt", 1.0, "none", 0)], Asked(results=path), steps=None))
    (read,) = read_outcomes(path)
    assert math.isnan(read.final)


def test_without_jobs_what_was_run_before_is_shown(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    path.write_bytes(to_json(outcome()) + b"\n")
    jobs = [Job("gpt", 1.0, "none", 0), Job("gpt", 1.0, "guard", 0)]
    assert ["none"] == [o.policy for o in run_jobs(jobs, Asked(jobs=0, results=path), steps=None)]


def test_ratios_are_to_the_base_and_to_the_oracle():
    name = "gpt-poison-shuffle10"
    poisoned = outcome(name, "guard", final=3.0)
    results = Results.of(
        [outcome(final=2.0), poisoned, outcome(name, "oracle", final=2.5), outcome(name, final=9.0)]
    )
    assert 1.5 == results.ratio(poisoned)
    assert 1.2 == results.to_oracle(poisoned)
    assert results.is_harmful(poisoned)
    assert tables.WORST == results.ratio(outcome(name, "heal", final=math.inf))


def test_a_trainings_first_answer_is_right_where_it_says_what_the_world_is():
    right = (5, "row", "state", 3.0, True)
    wrong = (6, "row", "sound", 1.0, True)
    sound = (7, "nonfinite", "sound", 1.0, False)
    jump = (8, "lr_jump", "sound", 1.0, True)
    silent = (9, "row", "abstained", None, False)
    of_trainings = [[right, wrong], [wrong], [jump, silent, sound], [silent], [jump], []]
    assert (2, 1, 1) == tables.verdicts([outcome(readings=asked) for asked in of_trainings])


def test_the_goals_name_the_worlds_that_miss_them():
    outcomes = [
        outcome(),
        outcome(policy="guard", digest="b", withheld=9, final=2.0),
        outcome(policy="heal+probe", rollbacks=[(5, 1, "state_damaged")], digest="a"),
        outcome(policy="heal+declared", longest=3, pages=1, messages={"LossDiverged": 1}),
        outcome(seed=1),
        outcome(policy="guard", seed=1),
    ]
    rows = {row.name: row for row in tables.goals(Results.of(outcomes))}
    assert 200 / 3 == pytest.approx(rows["healthy, set: bit for bit untouched"].ours)
    assert 100.0 == rows["healthy, held out: bit for bit untouched"].ours
    assert 2 == rows["healthy, set: more than 8 withheld, or 2 in a row"].ours
    missed = [name for name, row in rows.items() if row.met is False]
    assert 5 == len(missed), missed  # one seed is no spread that a run could end beyond
    assert {"gpt"} == {rows[name].note for name in missed}
    assert "healthy, set: halted" not in missed
    made = list(tables.grids(Results.of(outcomes)))
    assert ["healthy trainings, seeds set", "healthy trainings, seeds held out"] == [
        grid.title for grid in made
    ]
    assert all(len(row) == len(grid.columns) for grid in made for row in grid.rows)


def test_the_goals_of_faults_are_by_their_course_and_clip():
    outcomes = [
        outcome("regression", final=1.0),
        outcome("regression!flip", final=3.0),
        outcome("regression!flip", "guard", final=3.0),
        outcome("regression!flip", "guard+probe", final=3.0, pages=1),
        outcome("regression!flip", "heal+probe", final=1.0, rollbacks=[(9, 1, "state_damaged")]),
        outcome("regression!rate", final=2.0),
        outcome("regression!rate", "guard+probe", final=2.0),
        outcome("regression!gradient-x1000", final=2.0),
        outcome("regression!gradient-x1000", "guard+probe", withheld=1),
        outcome("regression!shuffle12", "guard", final=1.2),
        outcome("regression!nan1", "guard", final=1.0),
        outcome("regression!decay", final=2.0),
        outcome("regression!decay", "guard", final=2.0, reported=5),
        outcome("regression!labels", final=2.0),
        outcome("regression!labels", "guard", final=2.0),
    ]
    rows = {row.name: row for row in tables.goals(Results.of(outcomes))}
    mean = "final loss to the clean run's, mean"
    assert 1.0 == rows[f"damage with a clip, heal+probe, set: {mean}"].ours
    poison = rows[f"poison with a clip, guard, set: {mean}"]
    assert (pytest.approx(1.2), False) == (poison.ours, poison.met)
    assert 1.0 == rows[f"NaN with a clip, guard, set: {mean}"].ours
    paged = rows["damage above +10 %, set: paged in guard with a probe"]
    assert (50.0, "regression!rate") == (paged.ours, paged.note)
    reported = rows["slow ruin above +10 %, set: reported"]
    assert (50.0, "regression!labels") == (reported.ours, reported.note)


def test_faults_of_numbers_do_not_happen_to_tokens_and_kinds_on_ranks_have_a_run_of_their_own():
    assert {"gpt-fast!shuffle12"} == {w for w in WORLDS if w.startswith("gpt-fast!")} & {
        f"gpt-fast!{name}" for name in ("shuffle12", "const12", "x50-3", "nan1", "nan40")
    }
    asked = Asked(kinds=("all",), part="faults", seeds=(1,))
    one, two = (
        jobs_of(asked, quick=False),
        jobs_of(dataclasses.replace(asked, ranks=2), quick=False),
    )
    assert not any(job.world.startswith("ranks-") for job in one)
    assert two and all(job.world.startswith("ranks-") for job in two)


def test_a_healthy_training_that_diverges_unwatched_is_left_out_with_its_seed_and_clip():
    diverged = outcome(final=math.nan)
    watched = outcome(policy="guard", digest="b", halted="no progress", pages=1)
    others = [outcome(clip=None), outcome(policy="guard", clip=None), outcome(seed=2)]
    poisoned = outcome("gpt-poison-shuffle10", final=math.inf)
    results = Results.of([diverged, watched, *others, poisoned])
    assert [*others, poisoned] == list(results.by_job.values())


def test_the_page_keeps_the_part_of_a_bench_that_runs_apart():
    text = page.markdown(page.facts(), {"guard": [], "judgement": [], "parts": []})
    part = page.section_of(text, "judgement")
    assert part.startswith("## judgement\n")
    assert "parts" not in part
    assert "" == page.section_of(text, "detect")


@pytest.mark.slow
def test_the_quick_bench_trains_a_world_of_each_family(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    asked = Asked(results=path, worlds=("regression-moments", "ppo", "patterns-nan40"))
    from vitals_bench.judgement.measure import measure_trainings

    rows = list(measure_trainings(quick=True, asked=asked))
    assert [] == [row.note for row in rows if not isinstance(row, Grid) and row.ours is None]
    assert [] == [one.error for one in read_outcomes(path) if one.error]
    assert {"healthy", "poisoned", "damaged"} == {
        WORLDS[one.world].label for one in read_outcomes(path)
    }
