"""Three completions of each of the latest steps are held in memory, within bounds."""

import math
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.support.watched import until
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.repro.completions import CompletionRing, CompletionWriter, choose_three
from trainvitals.errors import UsageError
from trainvitals.io.completions import FOLDER
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, ["b"], [0.0]), "got a NoneType, a list, a list; it needs three lists"),
        (("prompt", ["b"], [0.0]), "got a str, a list, a list; it needs three lists"),
        ((["a"], ["b"], [[0.0]]), "got a list as a reward; it must be one number"),
        ((["a"], [0.0], ["secret"]), "got a str as a reward; it must be one number"),
    ],
)
def test_what_cannot_be_stored_is_refused_without_its_text(arguments, text):
    with pytest.raises(UsageError, match=text) as refused:
        CompletionRing().add(*arguments, step=0, attempt=1)
    assert "secret" not in f"{refused.value} {refused.value.hint} {refused.value.__cause__}"


def test_a_missing_reward_counts_as_the_lowest():
    ring = CompletionRing()
    ring.add(["p"] * 3, ["a", "b", "c"], [0.5, None, 0.1], step=4, attempt=1)
    stored = ring.find(finding(onset=4, step=4), 1)
    assert ["b", "c", "a"] == [sample.completion for sample in stored.samples]


def test_threads_may_add_completions_at_the_same_time():
    ring = CompletionRing(max_steps=8)

    def add(first: int) -> None:
        for step in range(first, first + 200):
            ring.add(["p"], ["x" * (step % 7)], [0.5], step=step, attempt=1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, (0, 50, 100, 150)))
    assert 8 == len(ring)
    stored = [ring.find(finding(onset=step, step=step), 1) for step in range(350)]
    held = {found.step: found.samples for found in stored}
    texts = sum(len(s.prompt) + len(s.completion) for kept in held.values() for s in kept)
    assert 8 == len(held)
    assert ring.num_bytes == 4 * texts


def test_a_file_is_noted_once_it_exists(tmp_path):
    ring, noted, faults = filled(4), [], FaultCounter()
    writer = CompletionWriter(tmp_path, faults, noted.append)
    for kind in ("policy_collapse", "truncation"):
        found = msgspec.structs.replace(finding(onset=4, step=8), kind=kind)
        writer.write(ring.find(found, 1))
    until(lambda: 2 == len(noted) + faults.total)
    names = sorted(f"{FOLDER}/{path.name}" for path in (tmp_path / FOLDER).iterdir())
    assert names == sorted(stored.name for stored in noted)
    assert 2 == len(names)


def test_a_file_that_cannot_be_written_is_counted_and_not_noted(tmp_path):
    noted, faults = [], FaultCounter()
    writer = CompletionWriter(tmp_path / "missing", faults, noted.append)
    writer.write(filled(4).find(finding(onset=4, step=8), 1))
    until(lambda: faults.total)
    assert ({"completions.write": 1}, []) == (faults.counts, noted)
