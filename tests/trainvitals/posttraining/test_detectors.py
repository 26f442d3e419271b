"""Faults of post-training, healthy runs that look alike, and scalars of any kind.

The curves are those of a small policy that really trains (``tests/support/policy_gradient.py``), or
written out where the numbers matter.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import pytest

from tests.support.examples import one_in
from tests.support.policy_gradient import FAULTY, HEALTHY, train
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.set import WATCHERS, PostTrainingDetectors
from trainvitals.detect.registry import DETECTORS, KINDS
from trainvitals.records import Finding

Rows = Sequence[Mapping[str, float]]


def judged(
    rows: Iterable[Mapping[str, float]],
    *,
    task: str = "grpo",
    every: int = 1,
    changes: Sequence[int] = (),
) -> list[Finding]:
    """Return the findings about rows that are logged every so many steps."""
    detectors, findings = PostTrainingDetectors(task), list[Finding]()
    for number, values in enumerate(rows):
        if number in changes:
            detectors.expect_change()
        findings += detectors.update(values, step=number * every, attempt=1, time_unix_ns=number)
    return findings


def causes(findings: Iterable[Finding]) -> list[tuple[int, str]]:
    return [(finding.step, finding.cause) for finding in findings]


@cache
def trained(name: str, seed: int) -> tuple[dict[str, float], ...]:
    courses = HEALTHY | FAULTY
    return tuple(scalars for _, scalars in train(courses[name], seed))


# ------------------------------------------------------------------------- a policy that trains

HELD_BACK = (13, 15, 17, 19)
"""Limits were chosen on seeds 0 to 11."""
EXPECTED = {
    "reward without signal": "kl_runaway",
    "signal lost": "policy_collapse",
    "constant reward": "dead_reward",
    "parser breaks": "dead_reward",
    "never right": "dead_reward",
    "prefers length": "policy_collapse",
    "repeats one token": "policy_collapse",
    "drifts on noise": "policy_collapse",
}


def cases(names_of: Iterable[str]) -> Iterator[tuple[str, int]]:
    yield from ((name, seed) for name in names_of for seed in HELD_BACK)


@pytest.mark.parametrize(("name", "seed"), one_in(8, cases(HEALTHY)))
def test_a_healthy_run_is_silent(name: str, seed: int):
    assert [] == causes(judged(trained(name, seed)))


@pytest.mark.parametrize("name", one_in(4, EXPECTED))
def test_a_fault_is_reported_by_name_in_nearly_all_runs(name: str):
    found = [EXPECTED[name] in {f.kind for f in judged(trained(name, s))} for s in HELD_BACK]
    assert sum(found) >= len(HELD_BACK) - 1


def test_levels_do_not_depend_on_the_unit_of_the_reward():
    rows = trained("parser breaks", 1)
    scaled = [row | {"reward": 1000.0 * row["reward"] - 7.0} for row in rows]
    assert causes(judged(rows)) == causes(judged(scaled)) != []


def test_what_is_logged_every_tenth_step_is_judged_as_values():
    rows = trained("parser breaks", 1)
    assert [10 * step for step, _ in causes(judged(rows))] == [
        step for step, _ in causes(judged(rows, every=10))
    ]


# ------------------------------------------------------------------------------- written-out rows


def noisy(level: float, number: int, scale: float = 0.02) -> float:
    return level + scale * random.Random(number).uniform(-1.0, 1.0)


def toy_collapse(num: int = 80, at: int = 30) -> list[dict[str, float]]:
    """Return the collapse of TRL's GRPOTrainer on a toy: its entropy, divergence and shares."""
    rows = []
    for n in range(num):
        part = min(max((n - at) / 15, 0.0), 1.0)
        rows.append(
            {
                "entropy": 1.99 * (0.03 / 1.99) ** part,
                "kl": 1.8 * part * (6.8 / 1.8 if n % 9 == 0 else 1.0),
                "reward": noisy(0.3 - 0.2 * part, n),
                "frac_reward_zero_std": part if part == 1.0 else 0.2 * part,
                "completions/clipped_ratio": 0.1 + 0.9 * part,
            }
        )
    return rows


def test_the_toys_collapse_is_reported_within_20_steps_of_a_tenth_of_its_entropy():
    rows = toy_collapse()
    low = next(n for n, row in enumerate(rows) if row["entropy"] < 0.199)
    findings = judged(rows)
    collapse = next(finding for finding in findings if finding.kind == "policy_collapse")
    assert low <= collapse.step <= low + 20
    assert "its entropy fell from 1.99" in collapse.reason
    assert {"policy_collapse", "dead_reward", "kl_runaway", "truncation"} == {
        finding.kind for finding in findings
    }


def test_one_collapse_is_one_finding_of_each_detector():
    kinds = [finding.kind for finding in judged(toy_collapse(400))]
    assert len(kinds) == len(set(kinds)) == 4


def solved(num: int = 120) -> list[dict[str, float]]:
    """A task that is solved: nearly no entropy, equal and best rewards, a constant divergence."""
    rows = []
    for n in range(num):
        part = min(n / 50, 1.0)
        rows.append(
            {
                "entropy": 1.5 * (0.01 / 1.5) ** part,
                "kl": 2.0 * part,
                "reward": noisy(0.1 + 0.9 * part, n),
                "frac_reward_zero_std": 0.95 * part,
                "completions/clipped_ratio": 0.02,
            }
        )
    return rows


def test_a_solved_task_is_silent():
    assert [] == causes(judged(solved()))


def test_a_task_that_needs_long_completions_is_silent():
    rows = [
        row | {"entropy": noisy(0.4, n, 0.05), "completions/clipped_ratio": min(0.9, n / 60)}
        for n, row in enumerate(solved())
    ]
    assert [] == causes(judged(rows))


def best_at_full_length(num: int = 120) -> list[dict[str, float]]:
    return [
        row | {"completions/clipped_ratio": min(0.95, 0.3 + n / 60)}
        for n, row in enumerate(solved(num))
    ]


def test_a_reward_that_is_best_at_full_length_is_no_reason_to_halt():
    (finding,) = judged(best_at_full_length())
    assert ("policy_collapse", "repetition") == (finding.kind, finding.cause)
    assert "the reward is " in finding.reason


def test_a_reward_that_is_lost_at_full_length_is_reported_as_a_collapse_of_its_own():
    lost = [row | {"reward": noisy(0.2, n)} for n, row in enumerate(best_at_full_length()[-60:])]
    found = causes(judged(best_at_full_length() + lost))
    assert ["repetition", "policy_collapse"] == [
        cause for _, cause in found if cause in ("repetition", "policy_collapse")
    ]


def constant(level: float, *, share_before: float = 0.1, num: int = 40) -> list[dict[str, float]]:
    """Return a reward that rises to 0.6, and then is the same number in all groups."""
    rising = [
        {
            "reward": noisy(0.1 + 0.5 * min(n / 60, 1.0), n),
            "frac_reward_zero_std": noisy(share_before, n, 0.05),
            "entropy": 2.0,
        }
        for n in range(80)
    ]
    return rising + [
        {"reward": level, "frac_reward_zero_std": 1.0, "entropy": 2.0} for _ in range(num)
    ]


def test_a_reward_that_is_constant_at_once_is_reported_although_little_of_it_is_lost():
    (finding,) = judged(constant(0.5))
    assert (80, 87, "dead_reward") == (finding.onset_step, finding.step, finding.cause)
    assert "check its parser" in finding.reason


def test_a_reward_that_is_lost_twice_at_full_length_is_reported_twice():
    best, last = best_at_full_length(), best_at_full_length()[-1]
    lost = [last | {"reward": noisy(0.2, n)} for n in range(60)]
    found = causes(judged([*best, *lost, *[last] * 200, *lost]))
    assert 2 == [cause for _, cause in found].count("policy_collapse")


def test_a_constant_reward_holds_over_a_restart_and_ends_with_another_reward():
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    rows = constant(0.5, num=160)
    for n, row in enumerate(rows):
        attempt = 1 + (n >= 120)
        findings += detectors.update(row, step=n, attempt=attempt, time_unix_ns=n)
    assert [True] == [detectors.holds(finding) for finding in findings]
    for n, row in enumerate(constant(0.5, num=0)[40:], start=len(rows)):
        detectors.update(row, step=n, attempt=2, time_unix_ns=n)
    assert [False] == [detectors.holds(finding) for finding in findings]


@pytest.mark.parametrize("reward", [None, 0.95, 0.2])
def test_completions_that_are_short_again_repeat_no_more(reward: float | None):
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    best = best_at_full_length()
    if reward is None:
        best = [{k: v for k, v in row.items() if k != "reward"} for row in best]
    short = [best[-1] | {"completions/clipped_ratio": 0.0} for _ in range(60)]
    if reward is not None:
        short = [row | {"reward": noisy(reward, n)} for n, row in enumerate(short)]
    for n, row in enumerate(best + short):
        findings += detectors.update(row, step=n, attempt=1, time_unix_ns=n)
        if n == len(best) - 1:
            assert detectors.holds(findings[0])
    assert "repetition" == findings[0].cause
    assert not detectors.holds(findings[0])


def test_hard_prompts_one_per_step_are_no_constant_reward():
    """With one group in a step, its rewards are often all 0."""
    for seed in range(8):
        rng = random.Random(seed)
        rows = []
        for _ in range(800):
            rate = rng.betavariate(0.4, 1.6)
            reward = sum(rng.random() < rate for _ in range(8)) / 8
            rows.append({"reward": reward, "frac_reward_zero_std": float(reward in (0.0, 1.0))})
        assert [] == causes(judged(rows))


@pytest.mark.parametrize(
    "rows",
    [
        constant(0.63),  # as high as ever: the task may be solved
        constant(0.5, num=7),
        constant(0.5, share_before=0.8),  # a share that climbed
    ],
)
def test_a_constant_reward_that_may_be_healthy_is_silent(rows: Rows):
    assert [] == causes(judged(rows))


@pytest.mark.parametrize(
    ("name", "level"), [("frac_reward_zero_std", 12.0), ("completions/clipped_ratio", 95.0)]
)
def test_a_share_in_percent_is_not_taken_for_all_of_them(name: str, level: float):
    rows = [{"reward": noisy(0.2, n), name: level if n > 60 else 4.0} for n in range(300)]
    assert [] == causes(judged(rows))


WRONG_SIGN = """
    8 10 9 9 10 8 8 9 10 11 12 10 11 9 10 11 9 6 14 9 14 9 12 10 13 12 15 14 11 14 12 12 10 12
    14 12 15 16 12 18 18 14 15 18 19 16 15 17 16 17 17 19 25 16 14 20 19 23 26 24 22 24 27 27 31
    26 30 31 28 30 28 35 32 32 48 40 35 34 45 45 46 46 44 54 39 44 46 27 39 46 42 46 49 46 58 33
    47 52 38 43 -57 -55 -57 -59 -64 -56 -48 -58 -62 -56 -55 -60 -55 -41 -57 -52 -60 -49 -52 -41
    -56 -54 -47 -42 -57 -57 -54 -55 -48 -40 -45 -45 -45 -44 -33 -34 -50 -39 -38 -50 -37 -41 -31
    -26 -36 -23 -27 -34 -27 -29 -31 -30 -31 -26 -29 -20 -21 -22 -23 -23
"""
"""Rewards of a training, in hundredths."""


def test_a_reward_with_the_wrong_sign_is_no_divergence_while_the_policy_comes_back():
    """The reward of this training has the wrong sign from step 100 on."""
    levels = (0.0, 0.01, 0.02, 0.05, 0.08, 0.14, 0.18, 0.36, 0.72, 0.94, 0.98, 1.47, 1.08, 0.98,
              0.62, 0.36, 0.22)  # fmt: skip
    divergence = [a + (b - a) * part / 10 for a, b in pairwise(levels) for part in range(10)]
    rewards = [int(percent) / 100 for percent in WRONG_SIGN.split()]
    rows = [{"reward": r, "kl": kl} for r, kl in zip(rewards, divergence, strict=True)]
    assert [] == causes(judged(rows))


def test_other_data_that_were_announced_are_silent_and_unannounced_are_not():
    rows = solved() + [
        row | {"reward": noisy(0.4, n), "entropy": 0.01, "frac_reward_zero_std": 0.3}
        for n, row in enumerate(solved(60)[-1:] * 60)
    ]
    assert [] == causes(judged(rows, changes=[120]))
    assert "policy_collapse" in {finding.kind for finding in judged(rows)}


def test_a_rewards_loss_after_an_announced_change_is_reported():
    later = [
        {"entropy": 0.01, "reward": noisy(0.8 if n < 60 else 0.2, n), "kl": 2.0} for n in range(120)
    ]
    assert "policy_collapse" in {f.kind for f in judged(solved() + later, changes=[120])}


def gauss(seed: int, num: int, sigma: float) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, sigma) for _ in range(num)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num", "first", "last"), [(300, 0.45, 0.6), (600, 0.3, 0.54)])
def test_a_slow_success_with_a_short_length_limit_is_silent(
    num: int, first: float, last: float, seed: int
):
    rows = [
        {"reward": first + (last - first) * n / num + noise, "completions/clipped_ratio": 0.9}
        for n, noise in enumerate(gauss(seed, num, 0.05))
    ]
    assert [] == causes(judged(rows))


@pytest.mark.parametrize("seed", range(4))
def test_a_success_with_slow_noise_is_silent(seed: int):
    slow, rows = 0.0, []
    for n, noise in enumerate(gauss(seed, 600, 0.03)):
        slow = 0.8 * slow + noise
        rows.append({"reward": 0.3 + 0.4 * n / 600 + slow, "completions/clipped_ratio": 0.9})
    assert [] == causes(judged(rows))


def slow_noise(memory: float, rng: random.Random, num: int) -> list[float]:
    """Return noise of which each value has a part of the one before; 1: a random walk."""
    sigma = 0.1 * math.sqrt(1.0 - memory * memory) if memory < 1.0 else 0.15 / math.sqrt(num)
    values = [rng.gauss(0.0, 0.1 if memory < 1.0 else 0.0)]
    while len(values) < num:
        values.append(memory * values[-1] + rng.gauss(0.0, sigma))
    return values


def without_a_loss(memory: float, seed: int, gain: float, num: int = 300) -> Rows:
    """A reward whose noise has a memory, and a policy that settles as in a success."""
    rng = random.Random(seed)
    reward, held_out = slow_noise(memory, rng, num), slow_noise(memory, rng, num)
    return [
        {
            "reward": 0.4 + gain * n / num + reward[n],
            "kl": 0.02 + n / num + rng.gauss(0.0, 0.02),
            "entropy": 2.0 * 0.02 ** min(1.5 * n / num, 1.0),
            "frac_reward_zero_std": min(0.95, 0.4 + n / num),
        }
        | ({} if n % 10 else {"eval/reward": 0.4 + gain * n / num + held_out[n]})
        for n in range(num)
    ]


@pytest.mark.parametrize(
    ("memory", "gain"),
    one_in(5, [(memory, gain) for memory in (0.0, 0.8, 0.95, 0.99, 1.0) for gain in (0.0, 0.4)]),
)
def test_slow_noise_is_neither_a_rise_nor_a_loss(memory: float, gain: float):
    runs = [judged(without_a_loss(memory, seed, gain)) for seed in range(15)]
    lost = [run for run in runs if any("at its best" in finding.reason for finding in run)]
    # The slowest noise rises and falls like a reward that is lost.
    assert len(lost) <= (3 if memory > 0.95 else 1)
    assert not gain or not [run for run in runs if run not in lost and run]


def test_completions_that_are_cut_while_the_reward_does_not_rise():
    rows = [
        {"reward": 0.45 + noise, "completions/clipped_ratio": 0.9} for noise in gauss(1, 400, 0.05)
    ]
    ((step, cause),) = causes(judged(rows))
    assert "truncation" == cause
    assert step >= 99


@pytest.mark.parametrize("seed", range(8))
def test_completions_that_grow_to_the_limit_without_a_gain_are_reported_before_100_values(
    seed: int,
):
    rows = [
        {"reward": 0.5 - 0.01 * n + noise, "completions/clipped_ratio": min(1.0, 0.5 + 0.05 * n)}
        for n, noise in enumerate(gauss(seed, 60, 0.3))
    ]
    ((step, cause),) = causes(judged(rows))
    assert "truncation" == cause
    assert 29 <= step


@pytest.mark.parametrize("seed", range(8))
def test_completions_that_grow_to_the_limit_while_the_reward_rises_are_silent(seed: int):
    rows = [
        {"reward": 0.01 * n + noise, "completions/clipped_ratio": min(1.0, 0.5 + 0.05 * n)}
        for n, noise in enumerate(gauss(seed, 150, 0.1))
    ]
    assert [] == causes(judged(rows))


def test_a_negative_reward_that_is_never_above_its_first_level_did_not_rise():
    penalties = random.Random(5)
    rows = [
        {
            "reward": -0.1 - 0.005 * (penalties.random() < 0.3),
            "completions/clipped_ratio": 1.0,
        }
        for _ in range(150)
    ]
    assert [(99, "truncation")] == causes(judged(rows))


def from_the_start(rewards: Iterable[float]) -> Rows:
    """A policy that becomes deterministic, as in a success, with any reward."""
    return [
        {
            "reward": reward,
            "entropy": 0.02 ** min(n / 60, 1.0),
            "frac_reward_zero_std": 0.5 + 0.47 * min(n / 60, 1.0),
        }
        for n, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    "rewards",
    [
        [min(1.0, 0.97 + noise) for noise in gauss(1, 300, 0.02)],
        [min(2.0, 1.94 + noise) for noise in gauss(2, 300, 0.04)],
        [0.95 + noise for noise in gauss(3, 300, 0.01)],
        [1.0] * 300,
        [2.0] * 300,
        [1.0] * 30 + [0.98] * 270,
        [0.95 + 0.05 * min(n / 30, 1.0) for n in range(60)] + [0.955] * 240,
    ],
    ids=["near 1", "near 2", "never 1", "always 1", "always 2", "harder later", "best early"],
)
def test_a_task_that_is_solved_from_the_start_is_silent(rewards: list[float]):
    assert [] == causes(judged(from_the_start(rewards)))


def test_a_policy_that_collapses_without_a_gain_is_reported():
    rows = from_the_start(0.5 + noise for noise in gauss(1, 400, 0.05))
    assert ["policy_collapse"] == [cause for _, cause in causes(judged(rows))]


def test_a_reward_that_is_lost_soon_after_its_rise_is_reported_at_once():
    rows = [
        row
        | {"reward": noisy(0.1 + 0.5 * min(n / 40, 1.0) - 0.45 * min(max(n - 60, 0) / 30, 1), n)}
        for n, row in enumerate(from_the_start([0.0] * 140))
    ]
    findings = judged(rows)
    assert "policy_collapse" == findings[0].kind
    assert findings[0].step < 80
    assert "at its best" in findings[0].reason


def parser_breaks(num_broken: int) -> list[dict[str, float]]:
    """A task that is learned; then its reward is 0 for all, for some values."""
    rows = [
        {"reward": noisy(0.1 + 0.6 * min(n / 40, 1.0), n), "frac_reward_zero_std": 0.1}
        for n in range(100)
    ]
    for row in rows[60 : 60 + num_broken]:
        row |= {"reward": 0.0, "frac_reward_zero_std": 1.0}
    return rows


def test_a_reward_that_is_lost_at_once_is_reported_after_two_values():
    assert [(61, "dead_reward")] == causes(judged(parser_breaks(40)))
    assert [] == causes(judged(parser_breaks(1)))


def test_single_batches_that_are_as_hard_need_three_values():
    rows = parser_breaks(40)
    for row in rows[45:59:6]:
        row |= {"reward": 0.0, "frac_reward_zero_std": 1.0}
    assert [(62, "dead_reward")] == causes(judged(rows))


def test_an_abrupt_loss_of_the_reward_of_a_policy_without_entropy_is_reported_after_two_values():
    rows = [row | {"entropy": 2.0 * 0.1 ** (n / 80)} for n, row in enumerate(parser_breaks(0))]
    for n, row in enumerate(rows[80:]):
        row |= {"reward": noisy(0.3, n), "entropy": 0.15 if n else 0.25}
    assert [(81, "policy_collapse")] == causes(judged(rows))


def test_a_noisy_reward_is_not_lost_at_once():
    rows = [
        {
            "reward": 0.2 + 0.3 * min(n / 60, 1.0) + noise,
            "entropy": 2.0 * 0.02 ** min(n / 60, 1.0),
            "frac_reward_zero_std": 0.95 * min(n / 60, 1.0),
        }
        for n, noise in enumerate(gauss(7, 600, 0.15))
    ]
    assert [] == causes(judged(rows))


def without_signal(gain: float, seed: int, *, num_falls: int = 8, num_rises: int = 8) -> Rows:
    """A policy that loses its entropy in the first values."""
    return [
        {"reward": gain * min(n / num_rises, 1.0) + noise, "entropy": 2.0 * 0.03 ** (n / num_falls)}
        for n, noise in enumerate(gauss(seed, 60, 0.1))
    ]


def test_a_policy_that_loses_its_entropy_at_once_without_a_gain_is_reported_within_20_values():
    runs = [causes(judged(without_signal(0.0, seed))) for seed in range(60)]
    low = 6  # the entropy is below a tenth of its level
    assert 54 <= sum(bool(run) and run[0][0] <= low + 20 for run in runs)
    assert {"policy_collapse"} == {cause for run in runs for _, cause in run}


@pytest.mark.parametrize(
    ("gain", "num_rises", "num_falls"),
    [(0.5, 3, 16), (0.3, 8, 16), (0.3, 16, 16), (0.5, 40, 8), (1.0, 60, 16)],
)
def test_a_gain_that_comes_before_or_long_after_the_entropy_is_low_is_silent(
    gain: float, num_rises: int, num_falls: int
):
    runs = [
        judged(without_signal(gain, seed, num_falls=num_falls, num_rises=num_rises))
        for seed in range(20)
    ]
    assert 1 >= sum(bool(run) for run in runs)


@pytest.mark.parametrize("memory", [0.9, 0.99, 1.0])
def test_a_gain_with_slow_noise_is_rarely_called_a_collapse(memory: float):
    num_reported = 0
    for seed in range(20):
        rewards = slow_noise(memory, random.Random(seed), 60)
        rows = [
            row | {"reward": 0.3 * min(n / 8, 1.0) + rewards[n]}
            for n, row in enumerate(without_signal(0.0, seed))
        ]
        num_reported += bool(judged(rows))
    assert num_reported <= 2


@pytest.mark.parametrize("seed", range(8))
def test_a_policy_that_loses_its_entropy_as_fast_with_a_gain_is_silent(seed: int):
    assert [] == causes(judged(without_signal(0.5, seed)))
    assert [] == causes(judged(without_signal(0.0, seed), changes=[4]))
    assert [] == causes(judged(without_signal(0.0, seed, num_falls=50)[:60]))


def test_a_reward_with_equal_highest_values_may_be_the_best_possible_one():
    rows = [row | {"reward": min(row["reward"], 0.05) + 2.0} for row in without_signal(0.0, 3)]
    assert [] == causes(judged(rows))


def test_a_dead_reward_after_an_announced_change_is_reported():
    dead = [{"reward": 0.0, "frac_reward_zero_std": 1.0}] * 200
    assert [(99, "dead_reward")] == causes(judged(dead, changes=[0]))
    assert [(139, "dead_reward")] == causes(judged(dead, changes=[40]))


def test_a_change_that_was_announced_early_does_not_hide_a_flat_reward():
    rows = from_the_start(0.5 + noise for noise in gauss(1, 400, 0.05))
    assert ["policy_collapse"] == [cause for _, cause in causes(judged(rows, changes=[0]))]


def after_a_rollback(before: Rows, at: int, after: Rows) -> list[tuple[int, str]]:
    """Return the findings after a rollback to a step."""
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    for n, row in enumerate(before):
        detectors.update(row, step=n, attempt=1, time_unix_ns=n)
    for n, row in enumerate(after, start=at):
        findings += detectors.update(row, step=n, attempt=2, time_unix_ns=n)
    return causes(findings)


def test_a_rollback_forgets_the_best_of_the_discarded_steps():
    rows = [
        {
            "reward": noisy(0.2 + 0.6 * min(n / 40, 1.0), n),
            "entropy": 1.5 * 0.01 ** min(n / 80, 1.0),
            "kl": 0.02 * n,
            "eval/reward": noisy(0.2 + 0.5 * min(n / 40, 1.0), -n, 0.01),
        }
        for n in range(160)
    ]
    wrong = {"reward": 5.0, "entropy": 9.0, "kl": 0.001, "eval/reward": 5.0}
    assert [] == after_a_rollback([*rows[:40], *[wrong] * 15], 40, rows[40:])
    assert [] == after_a_rollback([wrong] * 30, 0, rows)


def test_a_reward_that_is_lost_after_a_rollback_is_reported():
    rows = solved()
    lost = [row | {"reward": 0.3} for row in rows[-60:]]
    assert "policy_collapse" in {cause for _, cause in after_a_rollback(rows, 100, lost)}


def test_a_held_out_reward_that_is_lost_after_many_evaluations():
    rows = [
        {
            "reward": noisy(min(1.0, 0.2 + n / 20), n),
            "eval/reward": noisy(
                0.2 + 0.5 * min(n / 10, 1.0) - (0.4 if n > 200 else 0.0), -n, 0.01
            ),
        }
        for n in range(240)
    ]
    assert [(203, "reward_hacking")] == causes(judged(rows))


def test_a_held_out_reward_that_is_lost_while_the_training_reward_stays():
    rows = [
        {"reward": noisy(min(1.0, 0.2 + n / 50), n)}
        | (
            {"eval/reward": noisy(0.2 + 0.01 * min(n, 50) - 0.01 * max(n - 60, 0), n, 0.005)}
            if n % 5 == 0
            else {}
        )
        for n in range(150)
    ]
    (finding,) = judged(rows)
    assert ("reward_hacking", "advisory") == (finding.kind, finding.level)
    both = [row | {"reward": row.get("eval/reward", 0.3)} for row in rows[:60]]
    assert [] == causes(judged(both))


def test_a_held_out_reward_that_falls_while_the_training_reward_rises_is_reported_early():
    def rows(fall: float) -> Rows:
        return [
            {"reward": noisy(0.01 * n, n)}
            | (
                {}
                if n % 5
                else {
                    "eval/reward": noisy(0.01 * min(n, 60) - fall * max(n - 60, 0), n, 0.002),
                }
            )
            for n in range(100)
        ]

    assert [(70, "reward_hacking")] == causes(judged(rows(0.008)))
    assert [] == causes(judged(rows(0.0)))
    steady = [row | {"reward": noisy(min(0.01 * n, 0.6), n)} for n, row in enumerate(rows(0.002))]
    assert [] == causes(judged(steady))


@pytest.mark.parametrize(
    ("name", "healthy", "faulty", "cause"),
    [
        ("clip_ratio/region_mean", 0.2, 0.7, "clip_saturated"),
        ("val/ratio", 1.02, 4.0, "policy_ratio"),
        ("val/ratio", 1.02, 0.3, "policy_ratio"),
        ("sampling/sampling_logp_difference/mean", 0.01, 0.4, "sampler_gap"),
        ("token_mult_prob_error", 1.01, 1.3, "sampler_gap"),
    ],
)
def test_samples_that_do_not_fit_the_policy(name: str, healthy: float, faulty: float, cause: str):
    rows = [{name: healthy} for _ in range(40)]
    assert [] == causes(judged(rows))
    ((_, found),) = causes(judged([*rows, *({name: faulty} for _ in range(40))]))
    assert cause == found


def test_a_kl_that_torchtunes_ppo_sums_over_the_tokens_is_judged_as_a_sum():
    rows = [
        {"scores": 0.5 + noise, "rlhf_reward": 0.4, "kl_reward": -0.1, "kl": min(n / 15, 20.0)}
        for n, noise in enumerate(gauss(1, 400, 0.05))
    ]
    assert [] == causes(judged(rows, task="ppo"))
    rows = [row | {"kl": 10.0 * row["kl"]} for row in rows]
    assert ["kl_runaway"] == [cause for _, cause in causes(judged(rows, task="ppo"))]


def test_a_sampler_that_differs_is_reported_after_two_values():
    gaps = [0.01] * 20 + [0.3] + [0.01] * 20 + [0.12, 0.3] + [0.01] * 20
    rows = [{"sampling/sampling_logp_difference/mean": gap} for gap in gaps]
    assert [(42, "sampler_gap")] == causes(judged(rows))


@pytest.mark.parametrize(
    "shares", [{}, {"completions/clipped_ratio": 0.85}, {"kl": 3.0}, {"kl": 0.1}]
)
def test_two_hard_batches_of_a_policy_with_little_entropy_are_silent(shares: dict[str, float]):
    rows = [
        {"reward": 2.0 * min(0.1 + n / 50, 0.99) + noise, "entropy": 2.0 * math.exp(-n / 30) + 0.02}
        | dict.fromkeys(shares, 0.1)
        for n, noise in enumerate(gauss(3, 400, 0.02))
    ]
    for n in (100, 101, 320, 321):
        rows[n]["reward"] = 1.3
        rows[n] |= {"kl": shares["kl"]} if "kl" in shares else {}
    assert [] == causes(judged(rows))


def jumps(rise: float, *, num: int = 1, sigma: float = 0.02) -> list[dict[str, float]]:
    """A task that is learned, and a reward that rises at step 60 within some values."""
    return [
        {"reward": 0.1 + 0.4 * min(n / 60, 1.0) + rise * min(max(n - 59, 0) / num, 1.0) + noise}
        for n, noise in enumerate(gauss(5, 120, sigma))
    ]


def test_a_reward_that_jumps_within_one_step_is_reported_with_its_step():
    (finding,) = judged(jumps(0.5))
    assert (64, 60, "reward_jump") == (finding.step, finding.onset_step, finding.cause)
    assert "jumped from 0.488" in finding.reason
    both = [*jumps(0.5), *({"reward": row["reward"] + 0.9} for row in jumps(0.0)[60:])]
    assert [(64, "reward_jump"), (124, "reward_jump")] == causes(judged(both))


@pytest.mark.parametrize(
    "rows",
    [
        jumps(0.5, num=4),  # learned in four steps
        jumps(0.1),  # a quarter of its range
        jumps(0.5, sigma=0.1),
        jumps(-0.5),
        jumps(0.5)[50:],  # too few values before
        [{"reward": (n >= 40) * 0.25 + (n % 20 == 0) * 0.0625} for n in range(100)],
    ],
)
def test_a_reward_that_does_not_jump_is_silent(rows: Rows):
    assert [] == causes(judged(rows))


def test_a_reward_that_is_not_logged_at_each_step_may_have_been_learned_between():
    assert [] == causes(judged(jumps(0.5), every=10))


def test_a_reward_that_jumps_at_an_announced_change_or_a_restart_is_silent():
    assert [] == causes(judged(jumps(0.5), changes=[60]))
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    for number, values in enumerate(jumps(0.5)):
        attempt = 1 + (number >= 60)
        findings += detectors.update(values, step=number, attempt=attempt, time_unix_ns=number)
    assert [] == findings


def test_a_single_outlier_is_silent():
    rows = solved()
    rows[100] = dict.fromkeys(rows[0], 1000.0) | {"val/ratio": 50.0}
    assert [] == causes(judged(rows))


# ---------------------------------------------------------------------------------- preferences


def preferences(num: int = 60, *, fall: float = 0.2, accuracy: float = 0.6) -> Rows:
    """Log-probabilities that fall by a part, as in every DPO run, and the accuracy of the pairs."""
    return [
        {
            "logps/chosen": -200.0 * (1.0 + fall * n / num),
            "logps/rejected": -220.0 * (1.0 + 1.5 * fall * n / num),
            "rewards/chosen": -20.0 * fall * n / num,
            "rewards/accuracies": 0.0 if n == 0 else noisy(accuracy, n, 0.01),
        }
        for n in range(num)
    ]


def test_healthy_preferences_are_silent():
    assert [] == causes(judged(preferences(), task="dpo"))


def test_chosen_completions_that_become_improbable():
    (finding,) = judged(preferences(fall=2.0), task="dpo")
    assert "preference" == finding.cause
    assert "fell from -2" in finding.reason
    assert "expect()" in finding.reason


def test_a_fall_in_the_first_steps_is_compared_with_the_first_values():
    rows = preferences(fall=2.0)
    sudden = [*rows[:2], rows[10], rows[30], *[rows[-1]] * 40]
    (finding,) = judged(sudden, task="dpo")
    assert (14, "preference") >= (finding.step, finding.cause)
    assert "fell from -2" in finding.reason


def test_a_smaller_fall_is_reported_of_pairs_that_are_not_told_apart():
    (finding,) = judged(preferences(fall=0.8, accuracy=0.5), task="dpo")
    assert "preference" == finding.cause
    assert [] == judged(preferences(fall=0.8, accuracy=0.7), task="dpo")
    assert [] == judged(preferences(fall=0.3, accuracy=0.5), task="dpo")


@pytest.mark.parametrize("task", ["dpo", "cpo", "orpo"])
def test_sums_of_longer_completions_are_silent(task: str):
    rewards: dict[str, list[float]] = {
        "of a success": [0.01 * n for n in range(60)],
        "of a usual fall": [-0.1 * n for n in range(60)],
        "missing": [],
    }
    for values in rewards.values():
        rows = [dict(row) for row in preferences(fall=2.0)]
        for n, row in enumerate(rows):
            del row["rewards/chosen"]
            row |= {"rewards/chosen": values[n]} if values else {}
        assert [] == causes(judged(rows, task=task))


def test_a_mean_over_the_tokens_needs_no_reward():
    rows = [
        {name: row[name] / 200.0 for name in ("logps/chosen", "logps/rejected")}
        for row in preferences(fall=2.0)
    ]
    for task in ("dpo", "orpo"):
        assert ["preference"] == [cause for _, cause in causes(judged(rows, task=task))]


def accuracies(*values: float) -> Rows:
    return [{"rewards/accuracies": value} for value in values]


def of_pairs(num: int, share: float, seed: int) -> Rows:
    """Accuracies of batches with few pairs."""
    rng = random.Random(seed)
    return accuracies(
        0.0, *(sum(rng.random() < share for _ in range(num)) / num for _ in range(150))
    )


def test_pairs_that_are_right_from_the_start():
    assert [(8, "preference_leak")] == causes(judged(preferences(accuracy=0.995), task="dpo"))
    assert [(86, "preference_leak")] == causes(judged(of_pairs(64, 1.0, 0), task="dpo"))
    assert [(8, "preference_leak")] == causes(judged(of_pairs(64, 0.995, 0), task="reward_model"))


@pytest.mark.parametrize(
    ("num", "share"), [(1, 0.6), (1, 0.9), (2, 0.7), (4, 0.75), (8, 0.85), (8, 0.93)]
)
def test_right_pairs_of_small_batches_are_no_leak(num: int, share: float):
    runs = [causes(judged(of_pairs(num, share, seed), task="dpo")) for seed in range(40)]
    assert [] == [run for run in runs if run]


def test_pairs_that_are_learned_or_whose_start_is_unknown_are_silent():
    def first_at(first: int, rows: Rows, every: int = 1, task: str = "dpo") -> list[Finding]:
        detectors, findings = PostTrainingDetectors(task), list[Finding]()
        for n, row in enumerate(rows):
            step = first + n * every
            findings += detectors.update(row, step=step, attempt=1, time_unix_ns=n)
        return findings

    learned = accuracies(0.72, 0.985, *[0.99] * 20)
    right = accuracies(*[63 / 64] * 2, *[1.0] * 100)
    assert [] == first_at(10, learned, every=10)
    assert [] == first_at(500, right)
    assert [] == first_at(30, right)
    assert [] == first_at(40, right, every=10)
    assert [] == first_at(0, right, task="cpo")
    assert [] == first_at(0, right, task="orpo")
    assert ["preference_leak"] == [f.cause for f in first_at(0, right)]
    assert ["preference_leak"] == [
        f.cause for f in first_at(10, accuracies(0.9, *[1.0] * 12), every=10)
    ]


def test_pairs_that_are_right_late_are_silent():
    assert [] == causes(judged(preferences(accuracy=0.995), task="dpo", every=100))


# ------------------------------------------------------------------------------------ in general


def test_an_undeclared_run_is_not_judged():
    assert [] == judged(toy_collapse(), task="")
    assert [] == judged(toy_collapse(), task="sft")


@pytest.mark.parametrize("name", ["reward", "entropy", "kl", "frac_reward_zero_std"])
def test_a_detector_without_its_scalar_abstains(name: str):
    rows = [{name: row[name]} for row in toy_collapse()]
    assert [] == causes(judged(rows))


def test_gaps_and_nan_delay_and_do_not_raise():
    rows = [dict(row) for n, row in enumerate(toy_collapse(120)) if n % 11]
    for n, row in enumerate(rows):
        for i, name in enumerate(row):
            if (n + i) % 7 == 0:
                row[name] = math.nan
    assert "policy_collapse" in {finding.kind for finding in judged(rows)}


def test_values_of_any_kind_raise_nothing():
    odd = (0.0, -1.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 1.0)
    rng = random.Random(3)
    rows = [{name: rng.choice(odd) for name in names.NAMES} for _ in range(200)]
    for task in names.TASKS:
        judged(rows, task=task)


def test_a_state_continues_in_the_middle():
    rows = toy_collapse()
    for at in (0, 7, 33, 60):
        first, second = PostTrainingDetectors("grpo"), PostTrainingDetectors("grpo")
        for n, row in enumerate(rows[:at]):
            first.update(row, step=n, attempt=1, time_unix_ns=n)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for n, row in enumerate(rows[at:], start=at):
            expected = first.update(row, step=n, attempt=1, time_unix_ns=n)
            assert expected == second.update(row, step=n, attempt=1, time_unix_ns=n)
        assert first.state_dict() == second.state_dict()


def test_a_rollback_discards_the_recent_values():
    rows, detectors = toy_collapse(), PostTrainingDetectors("grpo")
    findings = list[Finding]()
    for n, row in enumerate(rows[:60]):
        findings += detectors.update(row, step=n, attempt=1, time_unix_ns=n)
    collapse = next(finding for finding in findings if finding.kind == "policy_collapse")
    assert detectors.holds(collapse)
    for n, row in enumerate(rows[:30]):
        assert () == detectors.update(row, step=20 + n, attempt=2, time_unix_ns=n)
    assert not detectors.holds(collapse)


def test_a_condition_lasts_until_it_was_absent_for_a_while():
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    for n in range(30):
        findings += detectors.update({"val/ratio": 4.0}, step=n, attempt=1, time_unix_ns=n)
    assert [True] == [detectors.holds(finding) for finding in findings]
    for n in range(30, 60):
        detectors.update({"val/ratio": 1.0}, step=n, attempt=1, time_unix_ns=n)
    assert [False] == [detectors.holds(finding) for finding in findings]


def test_every_detector_reports_and_never_acts():
    for watcher in WATCHERS:
        spec = DETECTORS[watcher.name]
        assert {"advisory"} == set(spec.kinds.values())
        assert set(spec.kinds) <= set(KINDS)


# ---------------------------------------------------------------------------- where it began


def onset_of(findings: Iterable[Finding], kind: str) -> tuple[int, int]:
    finding = next(finding for finding in findings if finding.kind == kind)
    return finding.onset_step, finding.step


def test_a_collapse_began_when_the_entropy_was_low_and_is_certain_later():
    rows = [{"entropy": 1.0, "reward": 0.1 + 0.01 * n} for n in range(50)]
    rows += [{"entropy": 0.01, "reward": 0.6} for _ in range(20)]
    rows += [{"entropy": 0.01, "reward": 0.1} for _ in range(30)]
    onset, step = onset_of(judged(rows), "policy_collapse")
    # The entropy is low from step 52, as a median of five values; the reward rises until 54.
    assert (54, 72) == (onset, step)


def test_what_was_healthy_while_the_reward_rose_is_not_its_onset():
    rows = [{"completions/clipped_ratio": 0.95, "reward": 0.1 + 0.005 * n} for n in range(100)]
    rows += [{"completions/clipped_ratio": 0.95, "reward": 0.1} for _ in range(40)]
    onset, step = onset_of(judged(rows), "truncation")
    assert 99 == onset < step < 120


def test_a_rollback_forgets_an_onset_after_its_step():
    rows = [{"entropy": 1.0, "reward": 0.1 + 0.01 * n} for n in range(50)]
    low = [{"entropy": 0.01, "reward": 0.6} for _ in range(20)]
    lost = [{"entropy": 0.01, "reward": 0.1} for _ in range(30)]
    detectors, findings = PostTrainingDetectors("grpo"), list[Finding]()
    for step, values in enumerate([*rows, *low]):
        detectors.update(values, step=step, attempt=1, time_unix_ns=step)
    for step, values in enumerate([*rows[40:], *low, *lost], start=40):
        findings += detectors.update(values, step=step, attempt=2, time_unix_ns=step)
    onset, step = onset_of(findings, "policy_collapse")
    assert 50 < onset < step
