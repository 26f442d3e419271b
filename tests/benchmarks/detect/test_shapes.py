"""The logs that are made have what their names say, and real-looking residuals around it."""

import math
import statistics

import pytest

from vitals_bench.detect.shapes import (
    BLOOM_LOSS,
    BLOOM_NORM,
    BLOOM_PEAK,
    ONSET,
    RECORDS,
    SHAPES,
    make_shape,
)

pytestmark = pytest.mark.nightly

NAMES = {shape.name: shape for shape in SHAPES}


def made(name, seed=0):
    return make_shape(NAMES[name], seed)


def median(values, start, stop):
    return statistics.median(values[start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_and_a_seed_are_one_log_and_another_seed_is_another(name):
    log, again, other = made(name), made(name), made(name, 1)
    assert repr(log) == repr(again)
    assert log.losses != other.losses
    assert {RECORDS} == {len(log.steps), len(log.losses), len(log.norms), len(log.rates)}
    assert 1 == log.cadence
    assert name.startswith("clean") <= log.is_clean


def test_the_promised_shapes_are_these():
    assert [
        "BLOOM-176B's spike",
        "3x for five steps",
        "two spikes, 20 steps apart",
        "NaN once",
        "NaN, and a spike 20 steps later",
    ] == [shape.name for shape in SHAPES if shape.must]


def test_bloom_s_numbers_are_the_published_ones():
    log = made("BLOOM-176B's spike")
    assert list(BLOOM_LOSS) == log.losses[ONSET - 1 : ONSET + 8]
    assert list(BLOOM_NORM) == log.norms[ONSET - 1 : ONSET + 8]
    assert max(BLOOM_LOSS) == log.losses[BLOOM_PEAK]
    assert 2.199 == pytest.approx(median(log.losses, ONSET - 60, ONSET - 1), rel=0.05)
    assert 0.242 == pytest.approx(median(log.norms, ONSET - 60, ONSET - 1), rel=0.25)


def test_a_nan_is_one_record_and_everything_else_is_finite():
    log = made("NaN once")
    assert [ONSET] == [i for i, loss in enumerate(log.losses) if not math.isfinite(loss)]
    assert [ONSET] == [i for i, norm in enumerate(log.norms) if not math.isfinite(norm)]


@pytest.mark.parametrize(("name", "factor"), [("+30 %", 1.3), ("+3 %", 1.03)])
def test_a_shift_never_comes_back(name, factor):
    log = made(f"{name} that never comes back")
    before, after = log.losses[ONSET - 100 : ONSET], log.losses[-100:]
    assert 0.98 * factor < statistics.median(after) / statistics.median(before) <= factor


def test_the_ramp_goes_from_4_85_to_6_5():
    log = made("slow ramp, 4.85 to 6.5 in 570 steps")
    assert 4.85 == pytest.approx(median(log.losses, 480, 500), rel=0.02)
    assert 6.5 == pytest.approx(median(log.losses, 1080, 1120), rel=0.02)


def test_clean_norms_spike_while_the_loss_hardly_moves():
    log = made("clean: norm spikes, loss unmoved")
    far = [i for i in range(20, RECORDS - 20) if log.norms[i] > 4.0 * near(log.norms, i)]
    assert 4 <= len(far) <= 30
    assert max(log.norms[i] / near(log.norms, i) for i in far) < 20.0
    assert max(log.losses[i] / near(log.losses, i) for i in far) < 1.1


def near(values, i):
    return median(values, i - 20, i + 21)


def test_few_batches_are_heavy_and_none_is_twice_its_neighbours():
    logs = [made("clean: single heavy batches", seed) for seed in range(10)]
    rows = range(120, RECORDS - 20)
    ratios = [log.losses[i] / near(log.losses, i) for log in logs for i in rows]
    assert 0.005 < sum(ratio > 1.2 for ratio in ratios) / len(ratios) < 0.03
    assert 0.0002 < sum(ratio > 1.5 for ratio in ratios) / len(ratios) < 0.005
    assert max(ratios) < 2.0


def test_the_loss_rises_in_warm_up_and_around_zero_it_is_often_negative():
    rise = made("clean: loss rises in warm-up").losses
    assert (12.4, 17.0) == (
        pytest.approx(rise[0], rel=0.06), pytest.approx(max(rise[50:70]), rel=0.06),
    )  # fmt: skip
    zero = made("clean: loss around zero").losses
    assert 0.3 < sum(loss < 0.0 for loss in zero) / RECORDS < 0.7


def test_two_modes_begin_as_one():
    losses = made("clean: two modes, 1.0 and 3.3").losses
    assert 6.9 == pytest.approx(median(losses, 0, 3), rel=0.1)
    late = losses[-200:]
    assert 40 < sum(loss < 2.3 for loss in late) < 160
    assert [] == [loss for loss in late if 1.6 < loss < 3.2]


def test_an_appended_run_goes_back_once():
    steps = made("clean: appended, steps go back").steps
    assert [ONSET] == [i for i in range(1, RECORDS) if steps[i] <= steps[i - 1]]
    assert ONSET - 200 == steps[ONSET]


def test_residuals_have_heavier_tails_than_a_normal_distribution():
    logs = [made("clean", seed) for seed in range(5)]
    ratios = [
        math.log(log.losses[i] / median(log.losses, i - 4, i + 5))
        for log in logs
        for i in range(300, RECORDS - 5)
    ]
    spread = statistics.pstdev(ratios)
    assert 0.004 < spread < 0.03
    kurtosis = statistics.fmean((ratio / spread) ** 4 for ratio in ratios)
    assert kurtosis > 3.5
