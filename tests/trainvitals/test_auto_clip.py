"""The limit of ``max_norm="auto"``: a pure function of the norms, whenever they arrive."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.auto_clip import DELAY, MAX_NORMS, MIN_NORMS, AutoClip, AutoClipConfig
from trainvitals.errors import ConfigError

CONFIG = AutoClipConfig(multiple=3.0, window=16)
norms = st.one_of(st.floats(1e-12, 1e12), st.sampled_from((0.0, math.nan, math.inf)), st.none())
histories = st.lists(norms, min_size=1, max_size=80)


def after(history, state=None, first=0):
    """Return the clip once the norms of these steps were added; None is a skipped step."""
    clip = AutoClip(CONFIG)
    if state is not None:
        clip.load_state_dict(state)
    for step, norm in enumerate(history, start=first):
        if norm is not None:
            clip.add(step, norm)
    return clip


def test_the_limit_is_the_multiple_of_the_median_of_the_window():
    clip = after([100.0] * 50 + [2.0] * 16)
    assert 6.0 == clip.limit(66 + DELAY - 1)
    assert 300.0 == after([100.0] * 50 + [2.0] * 7).limit(57 + DELAY - 1)


def test_a_burst_within_the_free_share_does_not_move_the_limit():
    assert after([1.0] * 30).limit(40) == after([1.0] * 28 + [1e9]).limit(40) == 3.0


def test_a_third_of_the_steps_with_large_norms_is_not_clipped():
    assert 50.0 == after([1.0, 1.0, 50.0] * 20).limit(62)
    config = AutoClipConfig(multiple=3.0, window=16, free_share=0.0)
    clip = AutoClip(config)
    clip.load_state_dict(after([1.0] * 15 + [50.0]).state_dict())
    assert 50.0 == clip.limit(20)


def test_there_is_no_limit_until_enough_norms_are_known():
    clip = after([1.0] * MIN_NORMS)
    assert [None, 3.0] == [clip.limit(MIN_NORMS + DELAY - 2), clip.limit(MIN_NORMS + DELAY - 1)]


def test_norms_of_zero_and_non_finite_ones_do_not_count():
    clip = after([0.0] * 40 + [math.nan, math.inf] * 10 + [2.0] * MIN_NORMS)
    assert 6.0 == clip.limit(200)
    assert after([0.0] * 200).limit(300) is None


@given(histories)
def test_a_norm_that_arrives_early_does_not_change_the_limit(history):
    step = len(history)
    late, early = after(history[: step - 1]), after(history)
    assert late.limit(step) == early.limit(step)


@given(histories, histories)
def test_a_restored_state_gives_the_same_limits(before, later):
    live = after(before)
    restored = AutoClip(CONFIG)
    restored.load_state_dict(live.state_dict())
    for step, norm in enumerate(later, start=len(before)):
        assert live.limit(step) == restored.limit(step)
        for clip in (live, restored):
            if norm is not None:
                clip.add(step, norm)


@given(histories, histories, st.data())
def test_a_rollback_gives_the_limits_of_a_run_that_never_went_further(before, discarded, data):
    back = data.draw(st.integers(0, len(before)))
    state = after(before[: max(0, back - 1)]).state_dict()  # one norm was still on its way
    clip = after(before + discarded)
    clip.roll_back(back, state)
    expected = after(before[:back])
    assert [expected.limit(step) for step in range(back, back + 3)] == [
        clip.limit(step) for step in range(back, back + 3)
    ]


def test_a_rollback_beyond_the_norms_that_are_kept_takes_the_state_of_the_snapshot():
    state = after([5.0] * 40).state_dict()
    clip = after([5.0] * 40 + [1.0] * (MAX_NORMS + 10))
    clip.roll_back(40, state)
    assert 15.0 == clip.limit(42)


def test_a_state_holds_no_more_than_later_limits_need():
    assert CONFIG.window + DELAY == len(after([1.0] * 1_000).state_dict()["norms"])


@pytest.mark.parametrize("settings", [{"multiple": 1.0}, {"window": MIN_NORMS - 1}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match=r"auto_clip\."):
        AutoClipConfig(**settings)
