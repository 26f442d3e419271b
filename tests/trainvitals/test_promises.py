"""Promises about finite evidence, over long random courses.

At most 8 updates are withheld in 1,000 steps, and at most 2 in a row; nothing finite stops a run;
only evidence about the state itself leads back, once in a cooldown.
"""

import itertools
import math
import random

import pytest

from tests.support.examples import one_in
from tests.trainvitals.played import Played, reads
from trainvitals.policy import PolicyConfig
from trainvitals.records import StepRecord

CONFIG = PolicyConfig()
SAVED = tuple(range(0, 20_000, 100))


def course(seed: int, steps: int, *, nonfinite: bool = True) -> list[StepRecord]:
    """Return a course in stretches: quiet ones, rows of outliers, outliers in turns, faults."""
    rng = random.Random(seed)
    kinds = ["quiet", "quiet", "alone", "row", "long row", "turns", "level", "overflow"]
    kinds += ["nan", "in a row with nan"] if nonfinite else []
    records: list[StepRecord] = []
    level = 2.0
    records += [StepRecord(step=0, attempt=1, loss=6.0, grad_norm=2.0)] * 20
    while len(records) < steps:
        kind = rng.choice(kinds) if len(records) > 70 else "quiet"
        if kind == "level":
            level = rng.choice((0.5, 2.0, 30.0))
        records += _stretch(rng, kind, level)
    return records[:steps]


def _stretch(rng: random.Random, kind: str, level: float) -> list[StepRecord]:
    def step(times: float = 1.0, **fields) -> StepRecord:
        noisy = level * math.exp(rng.gauss(0.0, 0.02))
        return StepRecord(
            step=0, attempt=1, loss=times * noisy, grad_norm=math.sqrt(times) * noisy, **fields
        )

    far = rng.choice((10.0, 300.0, 300.0))
    nan = StepRecord(step=0, attempt=1, loss=math.nan, grad_norm=math.nan)
    overflow = step(overflow=True)
    return {
        "quiet": lambda: [step() for _ in range(rng.randrange(5, 200))],
        "alone": lambda: [step(far), *(step() for _ in range(rng.randrange(1, 20)))],
        "row": lambda: [step(far) for _ in range(rng.randrange(2, 12))],
        "long row": lambda: [step(far) for _ in range(rng.randrange(20, 120))],
        "turns": lambda: [
            step(far if i % rng.choice((2, 2, 3)) == 0 else 1.0) for i in range(rng.randrange(120))
        ],
        "level": lambda: [step() for _ in range(80)],
        "overflow": lambda: [overflow] * rng.randrange(1, 4),
        "nan": lambda: [nan] * rng.randrange(1, 3) + [step()],
        "in a row with nan": lambda: [step(far), nan, step(far), step(far), nan, step(far)] * 3,
    }[kind]()


def most_in(flags: list[bool], window: int) -> int:
    """Return the most flags that are up in any so many steps that follow each other."""
    times = [at for at, flag in enumerate(flags) if flag]
    most, first = 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - window:
            first += 1
        most = max(most, last - first + 1)
    return most


def longest(flags: list[bool]) -> int:
    run = most = 0
    for flag in flags:
        run = run + 1 if flag else 0
        most = max(most, run)
    return most


def applied_between(records: list[StepRecord]) -> list[bool]:
    """Return which updates were withheld, without the steps that count in no row."""
    return [
        record.withheld
        for record in records
        if not record.overflow and not math.isnan(record.loss or 0.0)
    ]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("clips", [True, False], ids=["clips", "does not clip"])
@pytest.mark.parametrize("seed", one_in(6, [1025, *range(8), 1013, 1024]))
def test_at_most_8_updates_are_withheld_in_a_thousand_steps_and_2_in_a_row(seed, clips, lag):
    records = course(seed, 3000)
    played = Played(lambda step: records[step], clips=clips, lag=lag, checkpoints=SAVED).run(3000)
    withheld = [record.withheld for record in played.records]
    assert any(withheld)
    assert most_in(withheld, CONFIG.withheld_window) <= CONFIG.max_withheld
    assert longest(applied_between(played.records)) <= CONFIG.max_row
    assert {"skip_step"} == {made.action for made in played.decisions}
    assert not played.judge.halted


FAR, NEAR = StepRecord(step=0, attempt=1, loss=200.0), StepRecord(step=0, attempt=1, loss=2.0)
START = [*[StepRecord(step=0, attempt=1, loss=5.0)] * 20, *[NEAR] * 60]


@pytest.mark.parametrize(("clips", "ratio"), [(False, 1.3), (False, 1.7), (True, 1.15)])
def test_from_weights_that_do_not_read_damaged_nothing_more_is_withheld(clips, ratio):
    records = [*START, *[FAR] * 12, *[NEAR] * 40]
    played = Played(
        lambda step: records[step], clips=clips, probe=reads(ratio), checkpoints=(20, 40)
    ).run(len(records))
    assert 2 == sum(record.withheld for record in played.records)
    assert "spike" == played.readings[0].trigger
    assert {"sound"} == {read.verdict for read in played.readings}
    assert "rollback" not in {made.action for made in played.decisions}


@pytest.mark.parametrize(("ratio", "back"), [
    (6.0, []),
    (100.0, ["rollback"]),  # the latest steps read as badly
    (400.0, []),
    (1e24, ["rollback"]),
])  # fmt: skip
def test_long_after_an_onset_evidence_is_absurd_or_what_the_latest_steps_show_too(ratio, back):
    """A rise that is seen in the level alone: what reads worse by then may be forgotten."""
    answers = iter([1.0] + [ratio] * 9)
    records = [*START, *[NEAR] * 300, *[FAR] * 400]
    played = Played(
        lambda step: records[step],
        probe=lambda ask: reads(next(answers))(ask),
        checkpoints=(20, 40, 100),
    ).run(len(records))
    assert "level" in {read.trigger for read in played.readings}
    assert back == [made.action for made in played.decisions if made.action == "rollback"]


def test_what_reads_damaged_again_after_a_rollback_is_the_data_and_is_told():
    """A run that memorises: the first clipped step of a poisoned window reads as damage."""
    records = [*START, *[FAR] * 20, *[NEAR] * 40]
    played = Played(lambda step: records[step], probe=reads(3.0), checkpoints=(20, 40)).run(
        len(records)
    )
    assert 1 == sum(made.action == "rollback" for made in played.decisions)
    told = [finding.reason for finding in played.told if finding.kind == "state_damaged"]
    assert ["the data is at fault" in reason for reason in told] == [True]


@pytest.mark.parametrize("clips", [True, False], ids=["clips", "does not clip"])
@pytest.mark.parametrize("seed", one_in(3, range(6)))
def test_a_state_that_always_reads_damaged_leads_back_once_a_cooldown_and_never_to_a_halt(
    seed, clips
):
    records = course(100 + seed, 6000, nonfinite=False)
    played = Played(
        lambda step: records[step], clips=clips, probe=reads(9.0), checkpoints=SAVED
    ).run(6000)
    backs = [
        at
        for at, record in enumerate(played.records)
        for made in played.decisions
        if (made.action, made.step, made.attempt) == ("rollback", record.step, record.attempt)
    ]
    assert backs, "the course is too calm"
    assert all(b - a >= CONFIG.finite_cooldown for a, b in itertools.pairwise(backs))
    assert {"skip_step", "rollback"} >= {made.action for made in played.decisions}
    assert {"state_damaged"} == {d.rule for d in played.decisions if d.action == "rollback"}
    withheld = [record.withheld for record in played.records]
    assert most_in(withheld, CONFIG.withheld_window) <= CONFIG.max_withheld


@pytest.mark.parametrize("mode", ["observe", "guard"])
def test_where_nothing_may_go_back_a_damaged_state_is_told_and_training_goes_on(mode):
    records = course(7, 3000, nonfinite=False)
    played = Played(lambda step: records[step], mode=mode, probe=reads(9.0)).run(3000)
    assert "state_damaged" in {finding.kind for finding in played.told}
    assert {"skip_step"} >= {made.action for made in played.decisions}
    assert 3000 == len(played.records)
