"""Divergence, failed recovery and plateaus: what no single step shows."""

import math
import random

import pytest

from trainvitals.detect import LevelConfig, LevelDetector
from trainvitals.errors import ConfigError
from trainvitals.records import StepRecord


def told(losses, detector=None):
    """Return (step, kind, level) of all that is told about a loss."""
    detector = detector or LevelDetector()
    found = []
    for step, loss in enumerate(losses):
        for finding in detector.update(StepRecord(step=step, attempt=1, loss=loss)):
            found.append((step, finding.kind, finding.level))
    return found


def noisy(course, *, noise=0.01, seed=0):
    """Return a course with noise of this relative size, the same for a seed."""
    rng = random.Random(seed)
    return [value * math.exp(rng.gauss(0.0, noise)) for value in course]


def falling(steps, start=4.0, end=3.0):
    return [end + (start - end) / (1.0 + step / 200.0) for step in range(steps)]


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_falls_is_nothing(seed):
    assert [] == told(noisy(falling(3000), noise=0.02, seed=seed))


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_divergence_is_told_within_a_quarter_of_it(seed):
    ramp = [4.85 + 1.65 * step / 570 for step in range(570)]
    found = told(noisy([4.85] * 1500 + ramp, seed=seed))
    first, kind, level = found[0]
    assert ("divergence", "tell") == (kind, level)
    assert 1500 < first < 1500 + 150


def test_it_may_be_acted_on_once_it_has_gone_far_and_names_where_it_began():
    detector = LevelDetector()
    losses = noisy([3.0] * 500 + [3.0 + 0.01 * step for step in range(300)])
    findings = [
        finding
        for step, loss in enumerate(losses)
        for finding in detector.update(StepRecord(step=step, attempt=1, loss=loss))
    ]
    act = next(f for f in findings if f.level == "act")
    assert 0.25 <= (act.value - act.limit) / act.limit < 0.35
    assert 440 <= act.onset_step <= 520
    assert "above the lowest" in act.reason


@pytest.mark.parametrize("seed", range(10))
def test_a_step_up_of_3_percent_that_never_comes_back_is_told(seed):
    losses = noisy([2.0] * 1000 + [2.06] * 600, noise=0.004, seed=seed)
    kinds = [kind for _, kind, _ in told(losses)]
    assert ["plateau"] == kinds


def test_a_spike_and_its_recovery_are_no_divergence():
    losses = noisy([3.0] * 300 + [9.0, 7.0, 5.0, 4.0] + [3.0] * 300)
    assert [] == told(losses)


def test_a_recovered_rise_may_be_told_again():
    course = [3.0] * 300 + [3.4] * 100 + [3.0] * 300 + [3.4] * 100
    assert [2, 0] == [
        sum(kind == which for _, kind, _ in told(noisy(course))) for which in ("divergence", "x")
    ]


def test_bimodal_losses_and_losses_around_zero_are_nothing():
    rng = random.Random(1)
    assert [] == told([rng.choice((1.0, 3.3)) for _ in range(3000)])
    assert [] == told([rng.gauss(0.0, 0.01) for _ in range(3000)])
    assert [] == told([0.0 if rng.random() < 0.9 else rng.random() for _ in range(3000)])


def test_a_constant_loss_and_a_first_change_of_it_are_nothing():
    assert [] == told([1.0] * 500 + [1.5] * 20)


def test_an_accepted_level_is_told_and_never_acted_on():
    detector = LevelDetector()
    told(noisy([3.0] * 300), detector)
    detector.excuse()
    assert {"tell"} == {level for _, _, level in told(noisy([9.0] * 300), detector)}


def test_after_an_announced_change_the_level_starts_anew():
    detector = LevelDetector()
    told(noisy([3.0] * 300), detector)
    detector.rebaseline()
    assert [] == told(noisy([6.0] * 300), detector)


def test_what_is_not_finite_is_left_out():
    losses = noisy([3.0] * 300)
    with_nan = [x for loss in losses for x in (loss, math.nan, math.inf, None)]
    assert [] == told(with_nan)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"window": 4}, "level.window"),
        ({"rise": 0.5}, "level.rise"),
        ({"sigmas": 20.0}, "level.sigmas"),
        ({"flat_steps": 2}, "level.flat_steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting, word):
    with pytest.raises(ConfigError, match=word):
        LevelConfig(**setting)
