"""Which layers and ranks moved before a step."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collector.lookback import BAD, ONSET, troubled_run
from tests.collector.rows import RUN, Writer
from tests.support.examples import examples
from tests.support.queries import query
from trainvitals.errors import UsageError
from trainvitals.views import MoversQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.top_changes import MIN_SCORE, NONFINITE_SCORE, judge_change
from vitals_collector.storage.store import Store


def test_what_was_not_finite_comes_first_and_then_what_moved_most(store: Store):
    troubled_run(store)
    found = query(store).ask(MoversQuestion(run_id=RUN, step=BAD))
    assert {"h.1", "rank:1", "run"} == {one.row for one in found if one.score == NONFINITE_SCORE}
    assert ("h.1", "grad_norm") == (found[0].row, found[0].metric)
    assert all(one.peak is None for one in found[:3])
    before = query(store).ask(MoversQuestion(run_id=RUN, step=BAD - 1))
    assert [("h.1", "grad_norm", ONSET, 500.0)] == [
        (one.row, one.metric, one.peak_step, one.peak) for one in before
    ]
    assert before[0].before == pytest.approx(3.03, abs=0.02)


def test_the_branch_with_the_trouble_is_looked_at_and_not_the_one_that_went_on(store: Store):
    troubled_run(store)
    assert () == query(store).ask(
        MoversQuestion(run_id=RUN, step=BAD + 30)
    )  # of the lineage: nothing moved there
    assert any(one.row == "h.1" for one in query(store).ask(MoversQuestion(run_id=RUN, step=BAD)))


def test_a_run_without_numbers_has_no_movers_and_an_unknown_one_is_an_error(store: Store):
    ingest(store, Writer().steps([0], loss=1.0))
    assert () == query(store).ask(MoversQuestion(run_id=RUN, step=10**15))
    assert () == query(store).ask(MoversQuestion(run_id=RUN, step=-5))
    with pytest.raises(UsageError, match="there is no run"):
        query(store).ask(MoversQuestion(run_id="01JD0000000000000000000009", step=0))


@pytest.mark.parametrize("step", [2**63 - 1, -(2**63)])
def test_a_step_at_the_end_of_all_numbers_has_no_movers(store: Store, step: int):
    ingest(store, Writer().steps(range(20), loss=2.0))
    assert () == query(store).ask(MoversQuestion(run_id=RUN, step=step))


def test_among_equals_the_first_to_leave_its_course_is_first():
    steps = np.arange(600)
    values = np.where(steps % 2, 1.0, 1.1)
    late, early = values.copy(), values.copy()
    late[590:], early[570:] = math.nan, math.nan
    found = [
        judge_change(row, "loss", steps, v, 599) for row, v in (("late", late), ("early", early))
    ]
    assert {"late": 590, "early": 570} == {one.view.row: one.first_step for one in found if one}


def _score_of_wait(waits: np.ndarray, step: int) -> float:
    found = judge_change("rank:0", "data_wait_seconds", np.arange(len(waits)), waits, step)
    assert found is not None
    return found.view.score


def _waits() -> np.ndarray:
    """Waits of 10 ms, every 60th of 500 ms."""
    steps = np.arange(600)
    return np.where(steps % 60 == 30, 0.5, np.where(steps % 2, 0.010, 0.011))


def test_what_jumps_now_and_then_anyway_has_not_moved_by_jumping_once_more():
    waits = _waits()
    waits[590:592] = 5.0  # single steps are late on any machine, now and then two
    assert _score_of_wait(waits, 599) < MIN_SCORE
    waits[592] = 5.0
    moved = judge_change("rank:0", "data_wait_seconds", np.arange(600), waits, 599)
    assert moved is not None
    assert (590, 590) == (moved.first_step, moved.view.peak_step)
    assert moved.view.score >= MIN_SCORE


def test_the_next_steps_show_whether_the_step_of_a_query_is_late_alone():
    waits = _waits()
    waits[590] = 5.0
    assert _score_of_wait(waits, 590) < MIN_SCORE
    waits[591:593] = 5.0
    assert _score_of_wait(waits, 590) >= MIN_SCORE
    assert _score_of_wait(waits[:591], 590) < MIN_SCORE


def test_a_lasting_delay_is_named_even_if_single_steps_are_usually_later():
    waits = _waits()
    waits[570:] = 0.02
    assert _score_of_wait(waits, 599) >= MIN_SCORE
    waits[578:] = _waits()[578:]
    assert _score_of_wait(waits, 599) >= MIN_SCORE
    waits[575:] = _waits()[575:]
    assert _score_of_wait(waits, 599) < MIN_SCORE


def test_a_machine_that_often_delays_a_step_changes_no_duration():
    steps, named = np.arange(402), 0
    for seed in range(200):
        draws = np.random.default_rng(seed)
        waits = 1e-4 * np.exp(0.1 * draws.normal(size=402))
        waits += (draws.random(402) < 0.03) * draws.exponential(3e-3, 402)
        found = judge_change("rank:0", "data_wait_seconds", steps, waits, 399)
        named += found is not None and found.view.score >= MIN_SCORE
    assert named <= 2


@pytest.mark.parametrize("noise", ["normal", "lognormal", "exponential"])
def test_the_noise_of_a_healthy_run_is_no_change(noise: str):
    steps = np.arange(550)
    named = 0
    for seed in range(200):
        draws = getattr(np.random.default_rng(seed), noise)(size=550)
        found = judge_change("h.0", "grad_norm", steps, draws, 549)
        named += found is not None and found.view.score >= MIN_SCORE
    assert named <= 2


def test_a_learning_rate_that_follows_a_schedule_has_not_moved_and_one_that_jumps_has():
    steps = np.arange(300)
    rates = 1e-3 * (1 + np.cos(np.pi * steps / 400))
    assert None is judge_change("run", "learning_rate", steps, rates, 299)
    rates[290:] *= 30
    jumped = judge_change("run", "learning_rate", steps, rates, 299)
    assert jumped is not None
    assert 290 == jumped.first_step


@pytest.mark.parametrize(
    ("metric", "usual", "unusual"),
    [("loss_scale", (2.0, 0.5), 0.25), ("memory_allocated_bytes", (1.04, 0.96), 1.2)],
)
def test_what_a_healthy_run_changes_now_and_then_is_no_change(metric, usual, unusual):
    steps, values = np.arange(600), np.full(600, 65_536.0)
    for factor in usual:
        found = judge_change(
            "run", metric, steps, np.where(steps < 590, values, factor * values), 599
        )
        assert found is not None
        assert found.view.score < MIN_SCORE
    found = judge_change("run", metric, steps, np.where(steps < 590, values, unusual * values), 599)
    assert found is not None
    assert (590, True) == (found.first_step, found.view.score >= MIN_SCORE)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.floats(), max_size=40),
    st.integers(-10, 60),
    st.sampled_from(["loss", "data_wait_seconds"]),
)
def test_whatever_was_measured_a_score_is_a_number(values: list[float], step: int, metric: str):
    found = judge_change("h.0", metric, np.arange(len(values)), np.array(values, dtype=float), step)
    assert found is None or (math.isfinite(found.view.score) and found.view.score >= 0)
