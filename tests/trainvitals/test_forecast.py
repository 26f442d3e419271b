"""When a run ends, at what loss, and how far it is behind another: pure."""

import numpy as np
import pytest

from trainvitals.forecast import (
    FinalLoss,
    Finish,
    Lag,
    forecast_final_loss,
    forecast_finish,
    measure_token_lag,
)

SECOND = 10**9


def power(step: np.ndarray, *, scale: float = 4.0, exponent: float = 0.1) -> np.ndarray:
    return scale * (step + 1.0) ** -exponent


def noisy(values: np.ndarray, spread: float, seed: int = 0) -> np.ndarray:
    return values * np.exp(np.random.default_rng(seed).normal(0, spread, len(values)))


def times(seconds: np.ndarray) -> np.ndarray:
    return np.rint(np.cumsum(seconds) * SECOND).astype(np.int64)


def end_of(seconds: np.ndarray, done: int, *, waits: float = 0.0) -> Finish:
    """Return what is foreseen after so many of the steps, which take these seconds."""
    at = times(seconds)
    foreseen = forecast_finish(
        np.arange(done),
        at[:done],
        total_steps=len(seconds),
        now_unix_ns=int(at[done - 1] + waits * SECOND),
    )
    assert isinstance(foreseen, Finish), foreseen
    return foreseen


def test_the_end_counts_evaluations_and_saves_as_they_came_so_far():
    seconds = np.random.default_rng(1).lognormal(0, 0.1, 10_000)
    seconds[::500] += 60.0
    foreseen = end_of(seconds, 2_500)
    assert foreseen.unix_ns == pytest.approx(seconds.sum() * SECOND, rel=0.02)
    assert foreseen.step_share == pytest.approx(1 / 1.12, abs=0.02)
    assert foreseen.low_unix_ns < foreseen.unix_ns < foreseen.high_unix_ns
    assert not foreseen.is_waiting


def test_restarts_are_expected_to_become_rarer():
    """Rows of what rollbacks discarded are not there: what is seen of a restart is a long gap."""
    seconds = np.ones(9_000)
    seconds[::100] += 20.0
    calm = end_of(seconds, 3_000)
    seconds[[550, 1_050, 2_050]] += 50.0
    attempt = np.searchsorted([550, 1_050, 2_050], np.arange(3_000), "right")
    at = times(seconds)[:3_000]
    now = int(at[-1])
    hurt = forecast_finish(np.arange(3_000), at, attempt, total_steps=9_000, now_unix_ns=now)
    assert isinstance(hurt, Finish)
    more = (hurt.unix_ns - calm.unix_ns) / SECOND - 150
    assert more == pytest.approx(2 * (3 - 3**0.5) * 50, rel=0.02), "as of twice the time so far"


def test_one_night_of_standing_still_is_not_expected_every_night():
    seconds = np.ones(8_000)
    seconds[1_500] += 10_000.0
    left = end_of(seconds, 2_000).unix_ns - int(seconds[:2_000].sum() * SECOND)
    assert left == pytest.approx(6_000 * SECOND, rel=0.01)


@pytest.mark.parametrize(("waits", "is_waiting"), [(5.0, False), (60.0, True)])
def test_rows_of_a_fast_run_that_are_on_their_way_are_no_standing_still(waits, is_waiting):
    assert is_waiting == end_of(np.full(4_000, 0.016), 1_000, waits=waits).is_waiting


def test_while_a_run_stands_still_its_end_moves_on():
    seconds = np.ones(4_000)
    waiting = end_of(seconds, 1_000, waits=600.0)
    assert waiting.is_waiting
    assert waiting.unix_ns == pytest.approx((1_000 + 600 + 3_000) * SECOND, rel=0.01)


def test_the_pace_is_that_of_the_newest_steps():
    seconds = np.concatenate((np.full(1_000, 0.5), np.full(9_000, 2.0)))
    foreseen = end_of(seconds, 4_000)
    assert foreseen.unix_ns == pytest.approx(seconds.sum() * SECOND, rel=0.01)


def test_thinned_rows_count_by_their_steps():
    step = np.arange(0, 1_000, 10)
    foreseen = forecast_finish(
        step, (step + 1) * SECOND, total_steps=4_000, now_unix_ns=991 * SECOND
    )
    assert isinstance(foreseen, Finish)
    assert foreseen.seconds_per_step == pytest.approx(1.0)
    assert foreseen.unix_ns == pytest.approx(4_000 * SECOND, rel=0.001)


def test_no_end_without_a_pace_or_anything_left():
    step = np.arange(10)
    few = forecast_finish(step, times(np.ones(10)), total_steps=100, now_unix_ns=10 * SECOND)
    assert few == "20 steps are needed to know the pace"
    done = forecast_finish(step, times(np.ones(10)), total_steps=10, now_unix_ns=10 * SECOND)
    assert done == "all 10 planned steps are done"
    still = forecast_finish(np.arange(50), np.zeros(50, np.int64), total_steps=100, now_unix_ns=0)
    assert still == "the steps' times do not rise"
    none = forecast_finish(
        np.zeros(0, np.int64), np.zeros(0, np.int64), total_steps=5, now_unix_ns=0
    )
    assert isinstance(none, str)


def test_an_end_beyond_a_thousand_years_is_none():
    at = times(np.ones(100))
    words = forecast_finish(np.arange(100), at, total_steps=10**20, now_unix_ns=int(at[-1]))
    assert words == "at 1 s a step, 99,999,999,999,999,999,900 more steps take over 1,000 years"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_power_law_is_followed_to_its_end(share: float):
    step = np.arange(10_000)
    loss = noisy(power(step), 0.03)
    done = step < share * len(step)
    foreseen = forecast_final_loss(step[done], loss[done], total_steps=len(step))
    assert isinstance(foreseen, FinalLoss), foreseen
    assert foreseen.loss == pytest.approx(np.median(loss[-500:]), rel=0.02)
    assert foreseen.low < np.median(loss[-500:]) < foreseen.high


def test_spikes_and_losses_that_are_not_finite_do_not_tilt_it():
    step = np.arange(6_000)
    loss = noisy(power(step), 0.01)
    clean = forecast_final_loss(step[:3_000], loss[:3_000], total_steps=6_000)
    loss[1_500:3_000:40] *= 10
    loss[1_501:3_000:40] = np.nan
    hurt = forecast_final_loss(step[:3_000], loss[:3_000], total_steps=6_000)
    assert isinstance(clean, FinalLoss) and isinstance(hurt, FinalLoss)
    assert hurt.loss == pytest.approx(clean.loss, rel=0.01)


def test_a_curve_that_does_not_foretell_its_own_last_part_has_no_forecast():
    step = np.arange(4_000)
    loss = np.where(step < 1_600, power(step), 0.5 * power(step))
    foreseen = forecast_final_loss(step[:2_000], loss[:2_000], total_steps=4_000)
    assert isinstance(foreseen, str)
    assert "does not foretell its own last part" in foreseen and "% off" in foreseen


def test_no_forecast_of_what_rises_lies_below_zero_or_has_just_begun():
    step = np.arange(2_000)
    rising = forecast_final_loss(step, power(step, exponent=-0.1), total_steps=4_000)
    assert rising == "the loss has been rising"
    below = forecast_final_loss(step, np.sin(step / 50.0), total_steps=4_000)
    assert isinstance(below, str) and "not above 0" in below
    early = forecast_final_loss(step[:400], power(step[:400]), total_steps=2_000)
    assert early == "known from a quarter of the run on, step 500"
    for few in (0, 3, 29):  # a short run that is over, too
        said = forecast_final_loss(step[:few], power(step[:few]), total_steps=3)
        assert said == "30 steps with a loss are needed"


def test_a_run_that_is_over_has_the_loss_it_has():
    step = np.arange(1_000)
    loss = noisy(power(step), 0.02)
    foreseen = forecast_final_loss(step, loss, total_steps=1_000)
    assert isinstance(foreseen, FinalLoss)
    assert foreseen.loss == pytest.approx(np.median(loss[-50:]))


def test_a_run_is_behind_by_what_the_other_needed_less():
    """Curves of which one is the other, drawn out by a fifth: it is behind by a sixth."""
    tokens = np.arange(1.0, 20_001.0)
    loss, slower = noisy(power(tokens), 0.01), noisy(power(tokens / 1.2), 0.01, seed=1)
    half = slice(0, 12_000)
    behind = measure_token_lag(tokens[half], slower[half], tokens, loss)
    assert isinstance(behind, Lag)
    assert behind.tokens == pytest.approx(2_000, rel=0.25)
    ahead = measure_token_lag(tokens[half], loss[half], tokens, slower)
    assert isinstance(ahead, Lag)
    assert ahead.tokens == pytest.approx(-2_400, rel=0.25)
    assert not ahead.is_least


def test_runs_that_noise_alone_tells_apart_are_level():
    tokens = np.arange(1.0, 5_001.0)
    same = measure_token_lag(
        tokens, noisy(power(tokens), 0.05), tokens, noisy(power(tokens), 0.05, seed=1)
    )
    assert isinstance(same, Lag)
    assert same.tokens == 0.0


def test_a_lead_beyond_the_other_runs_end_is_at_least_what_is_left_of_it():
    tokens = np.arange(1.0, 5_001.0)
    early = measure_token_lag(tokens[:3_000], 0.5 * power(tokens[:3_000]), tokens, power(tokens))
    assert early == Lag(-2_000.0, is_least=True)
    late = measure_token_lag(tokens, 0.5 * power(tokens), tokens[:3_000], power(tokens[:3_000]))
    assert late == "the other run has not come to this loss yet"
    few = measure_token_lag(tokens[:5], power(tokens[:5]), tokens, power(tokens))
    assert few == "20 steps of each run are needed"
