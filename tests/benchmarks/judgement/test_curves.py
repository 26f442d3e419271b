"""What is told about synthetic worlds, by seeds that no setting was chosen by."""

import pytest

from vitals_bench.judgement.curves import (
    HELD_OUT_SEEDS,
    NOISES,
    TUNING_SEEDS,
    WORLDS,
    episodes,
    findings_of,
    is_told,
    rate,
)

pytestmark = pytest.mark.nightly

SEEDS = HELD_OUT_SEEDS[:2]


def share_told(name: str, seeds: tuple[int, ...] = SEEDS) -> float:
    rates = [rate(WORLDS[name], noise, seeds) for noise in NOISES]
    return sum(each.num_alarmed for each in rates) / sum(each.curves for each in rates)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("NaN once", 1.0),
        ("3x for one step", 1.0),
        ("10x for one step", 1.0),
        ("1.5x for 5 steps", 0.75),
        ("1.5x for 30 steps", 0.9),
        ("+10 % for good", 0.75),
        ("never learns", 0.9),
        ("stuck after a restart", 0.9),
        ("loses what it learned", 0.9),
        ("collapse", 0.9),
    ],
)
def test_a_fault_is_told_by_seeds_that_set_nothing(name: str, least: float) -> None:
    assert share_told(name) >= least


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("plain", 0.5),
        ("hard batches, .5 % at 10x", 12.0),
        ("every 100th at 5x", 8.0),
        ("RL, around zero", 0.5),
        ("GAN", 0.5),
    ],
)
def test_a_healthy_run_is_told_about_seldom(name: str, most: float) -> None:
    rates = [rate(WORLDS[name], noise, SEEDS[:1]) for noise in NOISES[::2]]
    assert sum(each.episodes for each in rates) / len(rates) <= most


def test_a_world_is_a_pure_function_of_seed_and_noise() -> None:
    for name in ("1.5x for 5 steps", "collapse", "plain", "GAN"):
        first, second = (WORLDS[name].make(1, 0.05) for _ in range(2))
        assert first == second


def test_every_world_says_what_is_wrong_with_it() -> None:
    for world in WORLDS.values():
        curve = world.make(0, 0.02)
        assert curve.is_healthy == world.is_healthy
        assert world.is_healthy or 0 <= curve.onset <= curve.told_by < len(curve.points)


def test_no_seed_is_in_both_halves() -> None:
    assert not set(TUNING_SEEDS) & set(HELD_OUT_SEEDS)


def test_what_is_told_before_the_fault_does_not_count() -> None:
    curve = WORLDS["NaN once"].make(0, 0.02)
    findings = findings_of(curve)
    assert is_told(curve, findings)
    assert not is_told(curve, [f for f in findings if f.step < curve.onset])
    assert 1 == episodes(findings)
