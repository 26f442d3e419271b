"""After a jump of the rate that damaged the state the earlier one is held, then whole again."""

import math
from dataclasses import dataclass

import pytest

from tests.trainvitals.played import Played, reads
from trainvitals.records import StepRecord

PEAK, WARM_UP, STEPS = 1e-3, 100, 1500
JUMP, TIMES = 400, 30.0


@dataclass
class Schedule:
    """Warm-up and cosine, with a stretch in it that asks for many times the rate."""

    until: int = 700
    again: range = range(0)

    def cosine(self, step: int) -> float:
        if step < WARM_UP:
            return PEAK * (step + 1) / WARM_UP
        return PEAK * 0.5 * (1.0 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))

    def asked(self, step: int) -> float:
        jumped = JUMP <= step < self.until or step in self.again
        return self.cosine(step) * (TIMES if jumped else 1.0)


def trained(schedule: Schedule, *, checkpoints=(0, 300), ratio=9.0, start=2.0, **loop) -> Played:
    """Train by a schedule; where the applied rate is many times the cosine's, losses explode."""

    def made(step: int) -> StepRecord:
        rate = schedule.asked(step)
        factor = played.judge.lr_factor_at(step, rate)
        explodes = rate * factor > 5.0 * schedule.cosine(step) and step >= JUMP + 2
        loss = (50.0 if explodes else start if step < WARM_UP else 2.0) * (1.0 + 0.01 * (step % 7))
        return StepRecord(step=step, attempt=1, loss=loss, grad_norm=1.0, learning_rate=rate)

    played = Played(made, checkpoints=checkpoints, probe=reads(ratio), **loop)
    return played.run(STEPS)


@pytest.mark.parametrize("target", [300, 40], ids=["on the cosine", "in the warm-up"])
def test_the_earlier_rate_is_held_from_the_jump_until_the_schedule_asks_for_an_ordinary_one(target):
    schedule = Schedule()
    played = trained(schedule, checkpoints=(0, target))
    (back,) = [made for made in played.decisions if made.action == "rollback"]
    assert ("lr_jump", target, 0) == (back.rule, back.rollback_to_step, back.skip_batches)
    held = schedule.cosine(JUMP - 1)
    for step, rate in played.applied.items():
        expected = held if JUMP <= step < schedule.until else schedule.asked(step)
        assert pytest.approx(expected) == rate, step
    assert ["lr_jump"] == [f.cause for f in played.told if f.kind == "lr_jump"]  # not once more


@pytest.mark.parametrize("clips", [True, False], ids=["clips", "does not clip"])
def test_half_of_the_progress_is_enough_right_after_a_jump_with_and_without_a_clip(clips):
    played = trained(Schedule(), ratio=3.0, start=10.0, clips=clips)
    (back,) = [made for made in played.decisions if made.action == "rollback"]
    assert ("lr_jump", 300) == (back.rule, back.rollback_to_step)


def test_the_hold_ends_where_the_schedule_has_come_down_below_three_times_what_is_held():
    """One that falls from thirty times the rate by itself, as a cosine does."""

    class Falling(Schedule):
        def asked(self, step: int) -> float:
            falls = TIMES * max(0.0, 1.0 - (step - JUMP) / 500.0)
            return self.cosine(step) * (max(1.0, falls) if step >= JUMP else 1.0)

    schedule = Falling()
    played = trained(schedule)
    held = schedule.cosine(JUMP - 1)
    ends = next(step for step in range(JUMP, STEPS) if schedule.asked(step) < 3.0 * held)
    assert JUMP + 300 < ends < JUMP + 500
    assert pytest.approx([held] * (ends - JUMP)) == [played.applied[s] for s in range(JUMP, ends)]
    rest = range(ends, STEPS)
    assert [schedule.asked(s) for s in rest] == [played.applied[s] for s in rest]
    assert 0.0 == played.judge.facts.lr_cap
    assert 1 == sum(made.action == "rollback" for made in played.decisions)


def test_a_hold_that_ended_is_over_though_the_schedule_asks_for_as_much_once_more():
    """The next jump is one of its own: it is told, and applied until something says it damages."""
    schedule = Schedule(again=range(900, 905))
    played = trained(schedule)
    assert [schedule.asked(s) for s in schedule.again] == [
        played.applied[s] for s in schedule.again
    ]
    jumps = [finding.step for finding in played.told if finding.kind == "lr_jump"]
    assert [JUMP, 900] == jumps


def test_a_jump_that_does_no_harm_is_told_and_nothing_is_held():
    schedule = Schedule()
    played = trained(schedule, ratio=1.0)
    assert [JUMP] == [finding.step for finding in played.told if finding.kind == "lr_jump"]
    assert "rollback" not in {made.action for made in played.decisions}
    assert [schedule.asked(s) for s in range(STEPS)] == [played.applied[s] for s in range(STEPS)]


class Restarts(Schedule):
    """A cosine that begins again at ``JUMP``, at so many times its first peak."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def asked(self, step: int) -> float:
        peak, since = (PEAK, step) if step < JUMP else (self.times * PEAK, step - JUMP)
        if step < 20:
            return PEAK
        return peak * max(0.5 * (1.0 + math.cos(math.pi * since / JUMP)), 1e-3)


@pytest.mark.parametrize(
    ("times", "declared", "backs"),
    [(1.0, False, 0), (0.5, False, 0), (30.0, False, 1), (30.0, True, 0), (1.0, True, 0)],
)
def test_a_rate_trained_with_before_or_declared_is_no_jump_that_damages(times, declared, backs):
    """A warm restart: the loss rises, and what was learnt reads 1.9 times as bad for a while."""
    schedule = Restarts(times)

    def made(step: int) -> StepRecord:
        held = played.judge.facts.lr_cap > 0.0
        rises = JUMP <= step < JUMP + 40 and not held
        loss = (2.4 if rises else 2.0) * (1.0 + 0.01 * (step % 7)) + 2.0 * math.exp(-step / 40.0)
        return StepRecord(
            step=step, attempt=1, loss=loss, grad_norm=1.0, learning_rate=schedule.asked(step),
            rate_declared=declared and step == JUMP,
        )  # fmt: skip

    played = Played(made, checkpoints=(0, 300), probe=reads(1.9))
    played.run(JUMP + 60)
    assert backs == sum(decision.action == "rollback" for decision in played.decisions)
    jumps = [finding.step for finding in played.told if finding.kind == "lr_jump"]
    assert (JUMP in jumps) == (times > 1.0 and not declared)
    if declared:
        assert not played.told and not played.decisions


def test_what_was_trained_with_is_known_after_a_rollback_and_in_a_checkpoint():
    played = trained(Schedule(until=JUMP + 20), ratio=1.0)
    judge = played.judge
    known = judge.detector_state()["known_rate"]
    judge.rolled_back(detector_state=judge.detector_state(), attempt=9, step=STEPS)
    assert known == judge.detector_state()["known_rate"] >= PEAK
