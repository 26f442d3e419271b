import statistics

from hypothesis import given
from hypothesis import strategies as st

from trainvitals.detect.outliers import RobustWindow

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=60), st.integers(1, 20))
def test_a_window_holds_the_newest_samples_in_order(values: list[float], size: int) -> None:
    window = RobustWindow(size)
    for value in values:
        window.push(value)
    kept = values[-size:]
    assert kept == window.values()
    assert statistics.median_high(kept) == window.median()
    assert min(kept) == window.smallest
    assert max(kept) == window.upper(0.0)
    assert len(kept) == len(window)


def test_upper_is_exceeded_by_that_fraction_and_no_more() -> None:
    window = RobustWindow(100)
    window.restore(range(100))
    assert 94.0 == window.upper(0.05)
    assert 5 == sum(value > window.upper(0.05) for value in window.values())


def test_an_outlier_within_the_fraction_does_not_move_upper() -> None:
    window = RobustWindow(20)
    window.restore([1.0] * 19 + [1e9])
    assert 1.0 == window.upper(0.05)
    assert 1.0 == window.median()


@given(st.lists(FINITE, max_size=40), st.lists(FINITE, max_size=40))
def test_a_restored_window_goes_on_as_the_kept_one(before: list[float], after: list[float]) -> None:
    kept, restored = RobustWindow(12), RobustWindow(12)
    for value in before:
        kept.push(value)
    restored.restore(kept.values())
    for value in after:
        kept.push(value)
        restored.push(value)
        assert repr(kept.median()) == repr(restored.median())
    assert [repr(v) for v in kept.values()] == [repr(v) for v in restored.values()]


def test_minus_zero_is_zero_so_that_equal_windows_have_equal_bits() -> None:
    window = RobustWindow(3)
    window.push(-0.0)
    assert "[0.0]" == repr(window.values())


def test_a_cleared_window_is_empty() -> None:
    window = RobustWindow(3)
    window.push(1.0)
    window.clear()
    assert [] == window.values()
