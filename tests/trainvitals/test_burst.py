"""A gradient norm that rises for several steps, as before BLOOM-176B's spike."""

import random

import pytest

from tests.support.examples import one_in
from trainvitals.detect.spike import BurstConfig, BurstDetector
from trainvitals.errors import ConfigError
from trainvitals.records import StepRecord

BLOOM_LOSS = [2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805]
BLOOM_NORM = [0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0]
"""Its iterations 31214 to 31222, as published."""


def told(norms, losses=None, detector=None):
    """Return the steps at which something is told."""
    detector = detector or BurstDetector()
    losses = losses or [2.2] * len(norms)
    return [
        step
        for step, (norm, loss) in enumerate(zip(norms, losses, strict=True))
        for _ in detector.update(StepRecord(step=step, attempt=1, loss=loss, grad_norm=norm))
    ]


def usual(steps, seed=0):
    rng = random.Random(seed)
    return [0.24 * rng.lognormvariate(0.0, 0.1) for _ in range(steps)]


@pytest.mark.parametrize("seed", one_in(4, range(10)))
def test_bloom_s_spike_is_announced_three_steps_before_the_loss_peaks(seed):
    norms = usual(200, seed) + BLOOM_NORM
    losses = [2.2] * 200 + BLOOM_LOSS
    assert [202] == told(norms, losses)
    assert 205 == losses.index(max(losses))


@pytest.mark.parametrize("times", [5, 15, 35, 1e6])
def test_one_step_alone_is_never_enough(times):
    norms = [*usual(100), 0.24 * times, *usual(100)]
    assert [] == told(norms)


def test_two_high_steps_far_from_each_other_are_nothing():
    assert [] == told([*usual(100), 3.0, *usual(20), 3.0, *usual(100)])


def test_two_high_steps_in_a_row_are_told_once_and_a_later_burst_again():
    assert [101, 163] == told(usual(100) + [3.0] * 3 + usual(59) + [3.0] * 3 + usual(20))


@pytest.mark.parametrize(
    ("times", "severities"),
    [([4, 5, 6, 5], ["log"]), ([9, 9, 9], ["notify"]), ([4, 5, 6, 9, 20, 60], ["log", "notify"])],
)
def test_a_burst_is_worth_a_message_from_8_times_the_median(times, severities):
    detector = BurstDetector()
    norms = [0.24] * 100 + [0.24 * each for each in times] + [0.24] * 5
    found = [
        finding.severity
        for step, norm in enumerate(norms)
        for finding in detector.update(StepRecord(step=step, attempt=1, loss=2.2, grad_norm=norm))
    ]
    assert severities == found


def test_a_norm_that_grows_while_the_loss_falls_is_a_run_that_begins_to_learn():
    losses = [8.5] * 100 + [8.5 - 0.1 * step for step in range(60)]
    norms = usual(100) + [norm * 4.0 for norm in usual(60)]
    assert [] == told(norms, losses)


def test_a_run_whose_norms_always_jump_is_no_burst():
    rng = random.Random(3)
    norms = [0.24 * rng.lognormvariate(0.0, 1.0) for _ in range(1000)]
    assert len(told(norms)) <= 2


def test_a_lasting_rise_becomes_the_reference():
    detector = BurstDetector()
    norms = usual(100) + [norm * 20 for norm in usual(300)]
    assert [101, 111] == told(norms, detector=detector)  # a message, and a page: nothing clips
    assert [] == told([norm * 20 for norm in usual(100, 5)], detector=detector)


def pages(norms, *, clips=False, detector=None):
    """Return the steps that are worth a page."""
    detector = detector or BurstDetector()
    records = [
        StepRecord(step=step, attempt=1, loss=2.2, grad_norm=norm, clips=clips)
        for step, norm in enumerate(norms)
    ]
    findings = [finding for record in records for finding in detector.update(record)]
    return [finding.step for finding in findings if finding.severity == "page"]


def test_huge_norms_in_a_row_page_once_unless_the_loop_clips():
    norms = usual(200) + [norm * 30 for norm in usual(20)] + usual(200)
    assert [211] == pages(norms)
    assert [] == pages(norms, clips=True)


def test_the_page_names_the_first_huge_norm_and_what_it_does_to_adam():
    detector = BurstDetector()
    pages(usual(200), detector=detector)
    found = [
        finding
        for step in range(200, 212)
        for finding in detector.update(StepRecord(step=step, attempt=1, loss=2.2, grad_norm=7.2))
        if finding.severity == "page"
    ]
    assert [(211, 200, 7.2)] == [(f.step, f.onset_step, f.value) for f in found]
    assert "since step 200" in found[0].reason
    assert "With Adam the second moments grew too" in found[0].reason


@pytest.mark.parametrize(
    "rise",
    [
        [30.0] * 11,
        [30.0, 30.0, 1.0] * 10,
        [8.0] * 30,
        [1.3**step for step in range(30)],
    ],
    ids=["eleven steps", "with pauses", "below ten times", "learning starts"],
)
def test_shorter_lower_and_gradual_rises_do_not_page(rise):
    assert [] == pages(usual(200) + [0.24 * each for each in rise] + usual(50))


def test_a_withheld_update_neither_counts_nor_ends_the_row():
    detector = BurstDetector()
    pages(usual(200), detector=detector)
    found = []
    for step in range(200, 216):
        record = StepRecord(
            step=step, attempt=1, loss=2.2, grad_norm=7.2, skipped=step in (203, 204)
        )
        found += [f.step for f in detector.update(record) if f.severity == "page"]
    assert [213] == found


def test_a_state_saved_without_the_mean_square_is_restored():
    detector, restored = BurstDetector(), BurstDetector()
    told(usual(100), detector=detector)
    saved = detector.state_dict()
    del saved["huge"]
    restored.load_state_dict(saved)
    assert saved["window"] == restored.state_dict()["window"]


def test_its_words_have_the_numbers():
    detector = BurstDetector()
    told(usual(100), detector=detector)
    records = [StepRecord(step=100 + i, attempt=1, loss=2.2, grad_norm=2.4) for i in range(2)]
    (finding,) = [finding for record in records for finding in detector.update(record)]
    assert ("advisory", 100, 2.4) == (finding.level, finding.onset_step, finding.value)
    assert "rising since step 100: 2.4 is 9.99x" in finding.reason


@pytest.mark.parametrize(
    ("setting", "word"),
    [({"warm_up": 2}, "warm_up"), ({"enough": 5.0}, "enough"), ({"recurs": 0}, "recurs")],
)
def test_settings_that_cannot_work_are_refused(setting, word):
    with pytest.raises(ConfigError, match=word):
        BurstConfig(**setting)
