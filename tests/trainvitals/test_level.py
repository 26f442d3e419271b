"""Divergence, drift, failed recovery and plateaus: what no single step shows."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.examples import one_in
from trainvitals.detect.level import DriftConfig, DriftDetector, LevelConfig, LevelDetector
from trainvitals.errors import ConfigError
from trainvitals.records import Finding, StepRecord


def findings(losses: Sequence[float | None], detector: Any = None) -> list[Finding]:
    """Return all that is told about a loss."""
    detector = detector or LevelDetector()
    return [
        finding
        for step, loss in enumerate(losses)
        for finding in detector.update(StepRecord(step=step, attempt=1, loss=loss))
    ]


def told(losses: Sequence[float | None], detector: Any = None) -> list[tuple[int, str]]:
    """Return (step, kind) of all that is told about a loss."""
    return [(finding.step, finding.kind) for finding in findings(losses, detector)]


def noisy(course: Sequence[float], *, noise: float = 0.01, seed: int = 0) -> list[float]:
    """Return a course with noise of this relative size, the same for a seed."""
    rng = random.Random(seed)
    return [value * math.exp(rng.gauss(0.0, noise)) for value in course]


def falling(steps: int, start: float = 4.0, end: float = 3.0) -> list[float]:
    return [end + (start - end) / (1.0 + step / 200.0) for step in range(steps)]


# ----------------------------------------------------------------------------------- level


@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_a_loss_that_falls_is_nothing(seed: int) -> None:
    assert [] == told(noisy(falling(3000), noise=0.02, seed=seed))


@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_a_slow_divergence_is_told_within_a_quarter_of_it(seed: int) -> None:
    ramp = [4.85 + 1.65 * step / 570 for step in range(570)]
    first, kind = told(noisy([4.85] * 1500 + ramp, seed=seed))[0]
    assert "divergence" == kind
    assert 1500 < first < 1500 + 150


def test_it_only_tells_however_far_the_loss_goes_and_names_where_it_began() -> None:
    losses = noisy([3.0] * 500 + [3.0 + 0.01 * step for step in range(300)])
    made = findings(losses)
    assert {"advisory"} == {finding.level for finding in made}
    assert 440 <= made[0].onset_step <= 520
    assert "above its lowest" in made[0].reason


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("height", [3.6, 4.5, 1e6])
def test_a_rise_begins_where_the_loss_changed_and_not_with_the_window(
    seed: int, height: float
) -> None:
    losses = noisy([3.0] * 521 + [height] * 80, noise=0.02, seed=seed)
    losses[480] = 50.0  # a spike that was over before
    onset = findings(losses)[0].onset_step
    assert abs(onset - 521) <= 3, onset


@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_a_step_up_of_3_percent_that_never_comes_back_is_told(seed: int) -> None:
    losses = noisy([2.0] * 1000 + [2.06] * 600, noise=0.004, seed=seed)
    assert ["plateau"] == [kind for _, kind in told(losses)]


def test_a_plateau_says_that_it_has_not_recovered() -> None:
    (finding,) = findings(noisy([2.0] * 1000 + [2.06] * 600, noise=0.004))
    assert "not_recovered" == finding.cause
    assert "did not recover" in finding.reason


def test_a_far_rise_that_lasts_is_reported_as_a_divergence_and_not_as_a_plateau() -> None:
    losses = noisy([3.0] * 300 + [9.0] * 900)
    assert ["divergence"] == [kind for _, kind in told(losses)]


@pytest.mark.parametrize(("end", "top", "kinds"), [
    (3.8, 3.99, set()),  # fell by 5 %, and is below its start: as a GAN's loss
    (3.8, 4.5, {"divergence"}),
    (3.0, 3.5, {"divergence"}),
])  # fmt: skip
def test_a_loss_that_has_hardly_fallen_diverges_only_above_its_start(
    end: float, top: float, kinds: set[str]
) -> None:
    course = falling(600, end=end) + [end + (top - end) * i / 200 for i in range(200)] + [top] * 64
    assert kinds == {kind for _, kind in told(noisy(course, noise=0.002))}


@pytest.mark.parametrize(("make", "steps"), [(LevelDetector, 400), (DriftDetector, 900)])
@pytest.mark.parametrize(("top", "severity"), [
    (0.08, "log"),  # 4 times the lowest, and below a tenth of the first loss
    (0.3, ""),  # 15 times the lowest
])  # fmt: skip
def test_a_memorized_loss_is_only_logged_until_it_is_ten_times_the_lowest(
    make: Any, steps: int, top: float, severity: str
) -> None:
    course = falling(300, start=4.0, end=0.02) + [0.02] * steps + [top] * 600
    made = findings(noisy(course, noise=0.002), make())
    assert severity == made[-1].severity


def test_a_spike_and_its_recovery_are_no_divergence() -> None:
    losses = noisy([3.0] * 300 + [9.0, 7.0, 5.0, 4.0] + [3.0] * 300)
    assert [] == told(losses)


def test_a_slow_recovery_is_no_divergence_while_the_median_lags_behind() -> None:
    spike = [5.7, 4.1] + [3.8] * 6 + [3.1, 2.8, 2.4, 2.2, 2.0, 2.0, 1.8]
    after = spike + [1.65] * 7 + [1.4] * 5 + [1.2] * 7 + [1.05] * 4 + [0.9] * 24
    assert [] == told(noisy([0.7] * 300 + after + [0.7] * 300, noise=0.04))


def test_a_recovered_rise_may_be_told_again() -> None:
    course = [3.0] * 300 + [3.4] * 100 + [3.0] * 300 + [3.4] * 100
    assert ["divergence", "divergence"] == [kind for _, kind in told(noisy(course))]


def test_rises_that_come_and_go_are_told_three_times_and_a_higher_one_again() -> None:
    course = ([3.0] * 200 + [3.4] * 100) * 8
    detector = LevelDetector()
    assert ["divergence"] * 3 == [kind for _, kind in told(noisy(course), detector)]
    assert "divergence" in [kind for _, kind in told(noisy([4.2] * 100), detector)]


def test_bimodal_losses_and_losses_around_zero_are_nothing() -> None:
    rng = random.Random(1)
    assert [] == told([rng.choice((1.0, 3.3)) for _ in range(3000)])
    assert [] == told([rng.gauss(0.0, 0.01) for _ in range(3000)])
    assert [] == told([0.0 if rng.random() < 0.9 else rng.random() for _ in range(3000)])


def test_a_constant_loss_and_a_first_change_of_it_are_nothing() -> None:
    assert [] == told([1.0] * 500 + [1.5] * 20)


def test_after_an_announced_or_accepted_change_only_a_further_rise_is_reported() -> None:
    detector = LevelDetector()
    told(noisy([3.0] * 300), detector)
    detector.rebaseline()
    assert [] == told(noisy([9.0] * 300), detector)
    assert "divergence" in {kind for _, kind in told(noisy([12.0] * 300), detector)}


def test_what_is_not_finite_is_left_out() -> None:
    losses = noisy([3.0] * 300)
    with_nan = [x for loss in losses for x in (loss, math.nan, math.inf, None)]
    assert [] == told(with_nan)
    assert [] == told(with_nan * 3, DriftDetector())


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"window": 4}, "level.window"),
        ({"rise": 0.5}, "level.rise"),
        ({"divergence": 0.5}, "level.divergence"),
        ({"sigmas": 0.0}, "level.sigmas"),
        ({"flat_steps": 2}, "level.flat_steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        LevelConfig(**setting)


# ----------------------------------------------------------------------------------- drift


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_ten_percent_for_good_is_told_whatever_the_noise(noise: float, seed: int) -> None:
    course = [2.0] * 1200 + [2.2] * 1200
    steps = [step for step, _ in told(noisy(course, noise=noise, seed=seed), DriftDetector())]
    assert 1200 < steps[0] < 1200 + 600


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.15])
def test_white_noise_drifts_nowhere(noise: float) -> None:
    assert [] == told(noisy([2.0] * 20_000, noise=noise, seed=4), DriftDetector())


def test_a_drift_says_how_far_and_names_where_it_began() -> None:
    finding = findings(noisy([2.0] * 1200 + [2.2] * 600, noise=0.05), DriftDetector())[0]
    assert ("divergence", "advisory", "loss_drift") == (finding.kind, finding.level, finding.cause)
    assert 1100 <= finding.onset_step <= 1300
    assert "sigma)" in finding.reason


def test_a_loss_that_goes_up_and_down_by_itself_is_told_once() -> None:
    course = [2.0 * (1.0 + 0.035 * math.sin(step / 150.0)) for step in range(6000)]
    assert 1 == len(told(noisy(course, noise=0.02), DriftDetector()))


def test_after_a_sudden_fall_the_level_is_learned_anew() -> None:
    """A set that is learned by heart: each epoch begins lower and creeps up by 12 %."""
    epochs = [1.1] * 416 + [0.71 * (1.0 + i / 5000.0) for i in range(384)]
    course = epochs + [0.4 * (1.0 + 0.12 * i / 400.0) for i in range(400)]
    assert [] == told(noisy(course, noise=0.05), DriftDetector())


def test_a_drift_is_measured_from_an_accepted_level() -> None:
    detector = DriftDetector()
    told(noisy([2.0] * 1200, noise=0.05), detector)
    detector.rebaseline()
    assert [] == told(noisy([2.6] * 1200, noise=0.05), detector)


def test_a_loss_around_zero_has_no_drift() -> None:
    rng = random.Random(1)
    assert [] == told([rng.gauss(0.0, 1.0) for _ in range(3000)], DriftDetector())


@pytest.mark.parametrize(
    ("setting", "word"),
    [({"rise": 0.0}, "drift.rise"), ({"sigmas": 0.0}, "drift.sigmas"), ({"warm_up": 2}, "warm")],
)
def test_settings_of_a_drift_that_cannot_work_are_refused(
    setting: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        DriftConfig(**setting)
