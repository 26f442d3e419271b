"""Three completions of each of the latest steps are held in memory, within bounds."""

import math

import pytest

from trainer_hooks.repro.completions import CompletionRing, choose_three
from trainvitals.errors import UsageError
from trainvitals.records import Finding

NAN = math.nan


def finding(*, onset: int, step: int) -> Finding:
    return Finding(
        kind="policy_collapse",
        level="advisory",
        step=step,
        detector="policy_collapse",
        reason="",
        onset_step=onset,
    )


def filled(*steps: int, **bounds: int) -> CompletionRing:
    ring = CompletionRing(**bounds)
    for step in steps:
        ring.add([f"prompt {step}"], [f"completion {step}"], [0.5], step=step, attempt=1)
    return ring


@pytest.mark.parametrize(
    ("rewards", "chosen"),
    [
        ([], []),
        ([0.3], [0]),
        ([0.3, 0.1], [1, 0]),
        ([0.3, 0.1, 0.2, 0.9, 0.5], [1, 0, 3]),
        ([1.0, NAN, 0.0], [1, 2, 0]),
        ([0.0, 0.0, 0.0, 0.0], [0, 2, 3]),
    ],
)
def test_the_lowest_the_median_and_the_highest_reward_are_chosen(rewards, chosen):
    assert chosen == choose_three(rewards)


def test_the_calls_of_one_step_count_together():
    ring = CompletionRing()
    for rewards in ([0.5, 0.1], [0.9, 0.4], [0.3]):
        texts = [f"{reward}" for reward in rewards]
        ring.add(texts, texts, rewards, step=4, attempt=1)
    stored = ring.find(finding(onset=4, step=4), 1)
    assert 3 == len(stored.samples)
    assert (0.1, 0.9) == (stored.samples[0].reward, stored.samples[-1].reward)


def test_the_step_where_the_problem_began_is_found():
    stored = filled(*range(10)).find(finding(onset=4, step=8), 1)
    assert (4, 4, 8) == (stored.step, stored.onset_step, stored.reported_step)
    assert ["completion 4"] == [sample.completion for sample in stored.samples]


def test_after_a_long_time_the_first_step_that_is_held_is_found():
    ring = filled(*range(20), max_steps=5)
    assert 5 == len(ring)
    assert 15 == ring.find(finding(onset=4, step=19), 1).step


def test_samples_of_every_tenth_step_and_of_earlier_ones_are_found():
    assert 20 == filled(0, 10, 20, 30).find(finding(onset=14, step=33), 1).step
    assert 30 == filled(0, 10, 20, 30).find(finding(onset=33, step=33), 1).step


def test_samples_of_a_discarded_attempt_are_not_found():
    assert filled(1, 2).find(finding(onset=1, step=2), 2) is None


def test_memory_is_bounded_by_the_texts():
    ring = CompletionRing(max_bytes=10_000)
    for step in range(100):
        ring.add(["x" * 100], ["y" * 500], [0.0], step=step, attempt=1)
    assert 4 == len(ring)
    assert ring.num_bytes == 4 * 4 * 600


def test_different_lengths_are_refused():
    with pytest.raises(UsageError, match="2 prompts, 1 completions and 1 rewards"):
        CompletionRing().add(["a", "b"], ["c"], [0.0], step=0, attempt=1)
