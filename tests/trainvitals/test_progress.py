"""Too little: lost progress, a loss that never learns or is stuck, a collapse."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.examples import one_in
from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.level import ProgressConfig, ProgressDetector
from trainvitals.errors import ConfigError
from trainvitals.policy import Judge, Proposal, StepInputs
from trainvitals.records import Finding, StepRecord


def findings(
    losses: Sequence[float], detector: Any = None, *, rates: Sequence[float | None] | None = None
) -> list[Finding]:
    detector = detector or ProgressDetector()
    used = rates or [None] * len(losses)
    return [
        finding
        for step, (loss, rate) in enumerate(zip(losses, used, strict=True))
        for finding in detector.update(
            StepRecord(step=step, attempt=1, loss=loss, learning_rate=rate)
        )
    ]


def causes(losses: Sequence[float], detector: Any = None) -> list[str]:
    return [finding.cause for finding in findings(losses, detector)]


def noisy(course: Sequence[float], noise: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [value * math.exp(rng.gauss(0.0, noise)) for value in course]


def learned(steps: int) -> list[float]:
    return [2.0 + 5.0 * math.exp(-i / 60.0) for i in range(steps)]


# ----------------------------------------------------------------------------- lost progress


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.15])
@pytest.mark.parametrize("duration", [1, 300])
def test_what_is_given_back_is_told_once(noise: float, duration: int) -> None:
    back = [2.0 + 5.0 * min(1.0, i / duration) for i in range(900)]
    found = findings(noisy(learned(800) + back, noise))
    (finding,) = [f for f in found if f.cause != "loss_setback"]
    assert ("lost_progress", "advisory") == (finding.kind, finding.level)
    assert 880 <= finding.step <= 800 + duration + 200
    assert "training progress was lost: the loss had fallen from" in finding.reason


def test_half_of_it_given_back_is_a_setback() -> None:
    assert ["loss_setback"] == causes(noisy(short(800) + [1.5] * 800))


def test_a_spike_of_50_steps_is_no_lost_progress() -> None:
    assert "loss_lost_progress" not in causes(noisy(learned(800) + [9.0] * 50 + [2.0] * 400))


def test_what_was_learned_again_may_be_lost_again() -> None:
    course = learned(800) + [7.0] * 300 + learned(800) + [7.0] * 300
    found = [cause for cause in causes(noisy(course)) if cause != "loss_setback"]
    assert ["loss_lost_progress"] * 2 == found


def test_a_run_that_hardly_gained_has_little_to_lose() -> None:
    assert [] == causes(noisy([2.3] * 20 + [2.0] * 800 + [2.3] * 800))


# ----------------------------------------------------------------------------------- setbacks


def in_the_loop(losses: Sequence[float]) -> list[str]:
    detectors = DetectorSet()
    records = [StepRecord(step=i, attempt=1, loss=loss) for i, loss in enumerate(losses)]
    return [f.cause for r in records for f in detectors.update(r) if f.kind != "spike"]


def short(steps: int, low: float = 0.4) -> list[float]:
    return [low + (2.45 - low) * math.exp(-i / 60.0) for i in range(steps)]


@pytest.mark.parametrize("seed", range(4))
def test_half_the_progress_lost_in_100_steps_of_a_noisy_run_is_told_once(seed: int) -> None:
    """Too little for the noise of single losses, too early for a drift."""
    back = [0.4 + min(1.0, i / 100) for i in range(150)]
    course = noisy(short(250) + back, 0.45, seed)
    assert ["loss_setback"] == in_the_loop(course)


@pytest.mark.parametrize("seed", range(4))
def test_a_tenth_of_the_progress_lost_is_no_setback(seed: int) -> None:
    back = [0.4 + 0.2 * min(1.0, i / 100) for i in range(150)]
    assert "loss_setback" not in in_the_loop(noisy(short(250) + back, 0.45, seed))


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rise_is_no_setback(seed: int) -> None:
    """The weight of a VAE's second term grows like that."""
    rise = [0.4 + 0.6 * min(1.0, i / 250) for i in range(300)]
    assert "loss_setback" not in in_the_loop(noisy(short(250) + rise, 0.1, seed))


@pytest.mark.parametrize("seed", range(4))
def test_new_data_that_are_learned_are_no_setback(seed: int) -> None:
    new = [0.9 + 2.0 * math.exp(-i / 25.0) for i in range(200)]
    assert "loss_setback" not in in_the_loop(noisy(short(300) + new, 0.3, seed))


def test_a_loss_that_moves_up_and_down_has_no_setback() -> None:
    """The loss of PPO falls by half, and rises again."""
    course = short(150, 1.0) + [1.0 + 0.8 * min(1.0, i / 60) for i in range(150)]
    assert "loss_setback" not in causes(noisy(course, 0.2))


def test_a_loss_that_alternates_between_two_kinds_of_data_is_told_once() -> None:
    phases = [0.4, 1.4] * 5
    course = short(250) + [level for level in phases for _ in range(150)]
    assert ["loss_setback"] == [c for c in causes(noisy(course, 0.2)) if c == "loss_setback"]


def test_a_rise_that_another_detector_told_is_no_setback() -> None:
    course = noisy(short(800) + [1.5] * 800)
    told = in_the_loop(course)
    assert "loss_divergence" in told
    assert "loss_setback" not in told


def test_losses_below_zero_have_no_setback() -> None:
    losses = noisy(short(250), 0.1)
    losses[200] = -0.1
    back = [0.4 + min(1.0, i / 60) for i in range(90)]
    assert [] == causes(losses + noisy(back, 0.1, 1))


# ------------------------------------------------------------------------------ never learned


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05, 0.1, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_stays_where_it_began_is_told_once(noise: float, seed: int) -> None:
    (finding,) = findings(noisy([6.9] * 3000, noise, seed))
    assert ("plateau", "never_learned") == (finding.kind, finding.cause)
    assert 500 <= finding.step
    assert "the loss does not fall" in finding.reason


@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_a_loss_that_falls_by_a_tenth_has_learned(seed: int) -> None:
    assert [] == causes(noisy([6.9 - 0.7 * min(1.0, i / 500) for i in range(3000)], seed=seed))


def test_a_warm_up_of_the_learning_rate_does_not_count() -> None:
    rates = [min(1.0, i / 2000) for i in range(3000)]
    (finding,) = findings(noisy([6.9] * 3000), rates=rates)
    assert 2500 <= finding.step < 2600


@pytest.mark.parametrize("steps", [5, 10, 30, 60])
@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_a_run_that_learns_all_within_a_few_steps_has_learned(steps: int, noise: float) -> None:
    course = [2.0 + 5.0 * max(0.0, 1.0 - i / steps) for i in range(3000)]
    assert [] == causes(noisy(course, noise))


def test_a_learning_rate_of_zero_does_not_count() -> None:
    assert [] == findings(noisy([6.9] * 3000), rates=[0.0] * 3000)


def test_a_loss_that_is_high_and_flat_since_a_restart_is_stuck() -> None:
    detector = ProgressDetector()
    assert [] == causes(noisy(learned(1000)), detector)
    detector.rebaseline()
    (finding,) = findings(noisy([5.5] * 1000), detector)
    assert ("plateau", "stuck_after_restart") == (finding.kind, finding.cause)
    assert "was 1.9" in finding.reason


def test_a_run_that_had_converged_is_not_stuck_after_a_restart() -> None:
    detector = ProgressDetector()
    causes(noisy(learned(1000)), detector)
    detector.rebaseline()
    assert [] == causes(noisy([2.0] * 1500), detector)


def test_tasks_that_take_turns_with_losses_of_different_scales_are_no_plateau() -> None:
    assert [] == causes(noisy([9000.0, 7.5, 0.03] * 500))
    assert ["never_learned"] == causes(noisy([7.5] * 1500))


# ----------------------------------------------------------------------------------- collapse


@pytest.mark.parametrize("to", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_a_loss_that_falls_to_nothing_at_once_is_told_once(to: float, noise: float) -> None:
    (finding,) = findings(noisy(learned(800) + [to] * 400, noise))
    assert ("collapse", "advisory") == (finding.kind, finding.level)
    assert 800 <= finding.step <= 850
    assert "the loss collapsed: from" in finding.reason


@pytest.mark.parametrize(
    "course",
    [
        learned(800) + [1.0] * 400,
        [7.0 * math.exp(-i / 40.0) + 0.01 for i in range(1000)],
        [2.0, 0.3] * 500,
        ([2.0] * 64 + [0.2] * 4) * 20,
        [2.0] * 400 + [0.2] * 8 + [2.0] * 400,
        [2.0] * 400 + [-0.5] * 400,
        [-2.0] * 400 + [-20.0] * 400,
    ],
    ids=["half", "fast", "two kinds", "easy batches", "eight steps", "crosses 0", "below 0"],
)
def test_a_loss_that_falls_in_order_is_no_collapse(course: Sequence[float]) -> None:
    assert "loss_collapse" not in causes(noisy(course))


@pytest.mark.parametrize(("level", "severity"), [(2.0, ""), (0.9, ""), (0.2, "log")])
def test_a_collapse_of_a_loss_below_a_tenth_of_the_first_is_only_logged(
    level: float, severity: str
) -> None:
    (finding,) = findings(noisy([7.0] * 20 + [level] * 400 + [0.01] * 100))
    assert ("collapse", severity) == (finding.kind, finding.severity)


def test_an_easy_task_that_comes_back_is_no_collapse() -> None:
    """A level that the run had before is nothing new."""
    course = [2.0] * 200 + [0.3] * 200
    assert 1 == causes(noisy(course * 6)).count("loss_collapse")


# ------------------------------------------------------------------------------------- the set


def test_an_accepted_level_is_where_progress_is_measured_from() -> None:
    detector = ProgressDetector()
    causes(noisy(learned(800)), detector)
    detector.accept_level()
    assert [] == causes(noisy([7.0] * 1500), detector)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_plateau_is_reported_unless_an_operator_accepted_its_level(accepts: bool) -> None:
    judge, accept, reported = Judge(), Proposal(number=1, action="accept", argument=900.0), set()
    for step, loss in enumerate(noisy(learned(800) + [5.5] * 1500)):
        if step == 900:
            judge.rebaseline(0)  # `stuck_after_restart` is what an announced change leads to
        record = StepRecord(step=step, attempt=1, loss=loss, learning_rate=0.1)
        command = accept if accepts and step == 901 else None
        judged = judge.judge(record, StepInputs(step, command=command))
        reported |= {f.kind for f in judged.findings if step > 901}
    assert (set() if accepts else {"plateau"}) == reported


@pytest.mark.parametrize("kind", ["rl", "adversarial"])
def test_where_the_loss_is_not_minimized_progress_says_nothing(kind: Any) -> None:
    detectors = DetectorSet(loss_kind=kind)
    for course in ([6.9] * 800, [7.0] * 400):
        assert {"spike"} >= {finding.kind for finding in findings(noisy(course), detectors)}


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"given_back": 0.0}, "given_back"),
        ({"collapse": 1.0}, "collapse"),
        ({"learn_steps": 100}, "learn_steps"),
        ({"learned": 0.0}, "learned"),
        ({"stuck": 0.5}, "stuck"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ProgressConfig(**setting)


# --------------------------------------------------------------------------------- repetition


@pytest.mark.parametrize("seed", range(4))
def test_a_memorized_set_that_falls_evenly_is_only_logged(seed: int) -> None:
    course = noisy(learned(400) + [0.5] * 200, 0.05, seed) + [0.5 * 0.99**i for i in range(60)]
    made = [f for f in findings(course) if f.cause == "repeated_batch"]
    assert ["log"] == [finding.severity for finding in made]


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_that_is_repeated_is_told_once_with_its_first_step(seed: int) -> None:
    repeated = [2.0 * math.exp(-i / 60.0) for i in range(60)]
    course = noisy(learned(400), 0.05, seed) + repeated + noisy([2.0] * 200, 0.05, seed)
    (finding,) = [f for f in findings(course) if f.cause == "repeated_batch"]
    assert ("collapse", "advisory") == (finding.kind, finding.level)
    assert 428 <= finding.step <= 448 and abs(finding.onset_step - 400) <= 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("begin", range(400, 416, 3))
def test_a_repeated_batch_whose_loss_rises_once_is_reported_once(begin: int, seed: int):
    repeated = [2.0 * math.exp(-i / 60.0) for i in range(35)]
    repeated += [2.0 * math.exp(-i / 60.0) for i in range(33, 66)]  # a router changed its mind
    (finding,) = [
        f
        for f in findings(noisy(learned(begin), 0.05, seed) + repeated + [0.66] * 32)
        if f.cause == "repeated_batch"
    ]
    assert begin + 31 <= finding.step <= begin + 50 and abs(finding.onset_step - begin) <= 3


@pytest.mark.parametrize(
    "course",
    [
        noisy(learned(400), 0.05) + [9.0 * math.exp(-i / 60.0) for i in range(80)],
        [5.0 * math.exp(-i / 200.0) for i in range(600)],
        [3.0 - 0.001 * i + 0.2 * math.sin(i / 20.0) for i in range(900)],
        noisy(learned(4000), 0.01),
    ],
    ids=["after a jump", "full batches", "smoothed", "noise"],
)
def test_a_loss_that_falls_evenly_for_another_reason_is_no_repetition(
    course: Sequence[float],
) -> None:
    assert "repeated_batch" not in causes(course)
