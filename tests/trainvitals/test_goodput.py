"""Each nanosecond of a run in one bucket: who takes what two could claim."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.goodput import (
    BUCKETS,
    PRECEDENCE,
    Bucket,
    EndedSteps,
    Goodput,
    Launch,
    TimeSpan,
    goodput,
)

S = 1_000_000_000
T0 = 1_700_000_000 * S


def steps(ends: list[float], seconds: list[float] | float = 1.0, **columns: object) -> EndedSteps:
    """Return steps that ended so many seconds after the start; what is not given is 0."""
    num = len(ends)

    def column(name: str, kind: type, default: object = 0) -> np.ndarray:
        return np.broadcast_to(np.array(columns.get(name, default), kind), num).copy()

    return EndedSteps(
        end_unix_ns=T0 + np.array([round(end * S) for end in ends], np.int64),
        launch=column("launch", np.int64),
        attempt=column("attempt", np.int64, 1),
        seconds=np.broadcast_to(np.array(seconds, float), num).copy(),
        data_wait=column("data_wait", float),
        checkpoint=column("checkpoint", float),
        evaluation=column("evaluation", float),
        wait=column("wait", float),
        least_wait=column("least_wait", float),
        is_undone=column("is_undone", bool),
        is_skipped=column("is_skipped", bool),
    )


def launch(
    process: float, ready: float, end: float, ended: str = "finished", num_gpus: int = 0
) -> Launch:
    begin, at, until = (T0 + round(time * S) for time in (process, ready, end))
    return Launch(begin, at, until, ended, num_gpus)  # type: ignore[arg-type]


def span(begin: float, end: float) -> TimeSpan:
    return TimeSpan(T0 + round(begin * S), T0 + round(end * S))


def told(sums: Goodput) -> dict[Bucket, float]:
    """Return what the buckets have, in seconds; empty ones are left out."""
    return {bucket: taken / S for bucket, taken in sums.nanoseconds.items() if taken}


PLAIN = [10.0 + i for i in range(1, 101)]
"""A hundred steps of a second, behind a start of ten."""


def test_a_plain_run_is_its_start_and_its_steps():
    sums = goodput([launch(0, 10, 110)], steps(PLAIN))
    assert told(sums) == {"start": 10, "productive": 100}
    assert sums.ratio == pytest.approx(100 / 110)
    assert sums.mttf_seconds is None


def test_the_measured_parts_of_a_step_are_taken_out_of_it():
    parts = {"data_wait": 0.2, "checkpoint": 0.1, "evaluation": 0.05}
    sums = goodput([launch(0, 10, 110)], steps(PLAIN, wait=0.3, least_wait=0.1, **parts))
    assert told(sums) == {
        "start": 10, "data_wait": 20, "checkpoint": 10, "evaluation": 5,
        "straggler_wait": 20, "exchange": 10, "productive": 35,
    }  # fmt: skip


def test_parts_never_take_more_than_the_step_has():
    sums = goodput([launch(0, 10, 110)], steps(PLAIN, data_wait=0.7, checkpoint=0.8, wait=5.0))
    assert told(sums) == {"start": 10, "checkpoint": 80, "data_wait": 20}


def test_what_a_first_step_takes_above_a_usual_one_is_compilation():
    ends = [10 + 31.0 + i for i in range(100)]
    seconds = [float("nan")] + [1.0] * 99
    sums = goodput([launch(0, 10, ends[-1])], steps(ends, seconds))
    assert told(sums) == {"start": 10, "compile": 30, "productive": 100}


def test_a_long_step_later_is_no_compilation():
    ends = [*PLAIN[:50], *(end + 30 for end in PLAIN[50:])]
    seconds = [1.0] * 50 + [31.0] + [1.0] * 49
    assert told(goodput([launch(0, 10, 140)], steps(ends, seconds))) == {
        "start": 10, "productive": 130,
    }  # fmt: skip


def test_a_hang_is_a_hang_also_within_a_save():
    ends = [*PLAIN[:50], *(end + 600 for end in PLAIN[50:])]
    seconds = [1.0] * 50 + [601.0] + [1.0] * 49
    saved = [0.0] * 50 + [600.5] + [0.0] * 49
    own = steps(ends, seconds, checkpoint=saved)
    sums = goodput([launch(0, 10, 710)], own, hangs=[span(60.0, 660.0)])
    assert told(sums) == {"start": 10, "hang": 600, "checkpoint": 1, "productive": 99}
    assert sums.mttr_seconds == pytest.approx(601)


def test_an_undone_step_is_lost_whole_but_for_saves_and_evaluations():
    undone = [False] * 60 + [True] * 40
    own = steps(PLAIN, data_wait=0.5, checkpoint=0.1, evaluation=0.1, is_undone=undone)
    sums = goodput([launch(0, 10, 110)], own)
    assert told(sums)["rolled_back"] == pytest.approx(40 * 0.8)
    assert told(sums)["checkpoint"] == pytest.approx(10)
    assert sums.undone["data_wait"] == 20 * S
    assert sums.undone["productive"] == 12 * S
    assert sums.lost_steps == 40


def test_a_step_that_was_skipped_and_then_undone_counts_once():
    both = [False] * 99 + [True]
    sums = goodput([launch(0, 10, 110)], steps(PLAIN, is_undone=both, is_skipped=both))
    assert told(sums) == {"start": 10, "rolled_back": 1, "productive": 99}


def test_between_two_processes_the_run_is_down_and_then_starts_again():
    first, second = [11.0, 12.0, 13.0], [63.0, 64.0, 65.0]
    own = steps([*first, *second], launch=[0, 0, 0, 1, 1, 1], attempt=[1, 1, 1, 2, 2, 2])
    sums = goodput([launch(0, 10, 13.5, "failed", 8), launch(43.5, 62, 65, num_gpus=8)], own)
    assert told(sums) == {
        "start": 10, "productive": 6, "rolled_back": 0.5, "down": 30, "restart": 18.5,
    }  # fmt: skip
    by_attempt = {a.attempt: sum(a.nanoseconds.values()) / S for a in sums.attempts}
    assert by_attempt == {1: 13.5, 2: 51.5}
    assert sums.gpu_nanoseconds == 8 * 35 * S, "no GPU is held while the run is down"
    assert (sums.mttf_seconds, sums.mttr_seconds) == (15, 50)


def test_a_halted_run_waits_for_a_person():
    own = steps([11.0, 62.0], launch=[0, 1])
    sums = goodput([launch(0, 10, 11, "halted"), launch(60, 61, 62)], own)
    assert told(sums)["halted"] == 49


def test_an_interruption_is_no_failure():
    own = steps([11.0, 62.0], launch=[0, 1])
    sums = goodput([launch(0, 10, 11, "interrupted"), launch(60, 61, 62)], own)
    assert sums.failures == ()
    assert told(sums)["down"] == 49


def test_a_hang_that_ends_a_process_is_one_failure():
    own = steps([11.0, 500.0], launch=[0, 1])
    launches = [launch(0, 10, 311, "interrupted"), launch(400, 499, 500)]
    sums = goodput(launches, own, hangs=[span(11.0, 311.0)])
    assert told(sums)["hang"] == 300
    assert [failure.what for failure in sums.failures] == ["hang"]


def test_a_pause_is_a_persons():
    ends = [*PLAIN[:50], *(end + 300 for end in PLAIN[50:])]
    seconds = [1.0] * 50 + [float("nan")] + [1.0] * 49
    sums = goodput([launch(0, 10, 410)], steps(ends, seconds), pauses=[span(60.0, 360.0)])
    assert told(sums) == {"start": 10, "halted": 300, "productive": 100}


def test_what_a_rollback_takes_to_restore_is_a_restart():
    ends = [*PLAIN[:50], *(end + 7 for end in PLAIN[50:])]
    seconds = [1.0] * 50 + [float("nan")] + [1.0] * 49
    sums = goodput([launch(0, 10, 117)], steps(ends, seconds, attempt=[1] * 50 + [2] * 50))
    assert told(sums) == {"start": 10, "restart": 7, "productive": 100}


def test_rows_that_were_lost_leave_a_gap_that_is_unknown():
    kept = PLAIN[:30] + PLAIN[60:]
    assert told(goodput([launch(0, 10, 110)], steps(kept))) == {
        "start": 10, "productive": 70, "unknown": 30,
    }  # fmt: skip


def test_a_clock_that_is_set_back_takes_no_time_away():
    ends = [*PLAIN[:50], *(end - 20 for end in PLAIN[50:])]
    sums = goodput([launch(0, 10, 90)], steps(ends))
    assert sum(sums.nanoseconds.values()) == sums.wall_ns > 0
    assert all(taken >= 0 for taken in sums.nanoseconds.values())


def test_a_run_without_a_step_is_its_start():
    sums = goodput([launch(0, 10, 12, "failed"), launch(20, 25, 26, "failed")], steps([]))
    assert told(sums) == {"start": 10, "unknown": 3, "down": 8, "restart": 5}


def test_every_bucket_has_its_place_in_the_order():
    assert sorted(bucket for bucket, _ in PRECEDENCE) == sorted(BUCKETS)


@given(seed=st.integers(0, 2**32 - 1))
def test_buckets_always_add_up_to_the_nanosecond(seed: int):
    """Whatever was measured, in whatever order clocks say it was."""
    draw = np.random.default_rng(seed)
    num, num_launches = int(draw.integers(0, 30)), int(draw.integers(1, 5))

    def when(size: int | None = None) -> np.ndarray:
        return T0 + draw.integers(0, 10**13, size)

    def seconds() -> np.ndarray:
        odd = draw.choice([np.nan, np.inf, -np.inf, 0.0, -5.0], num)
        return np.where(draw.random(num) < 0.2, odd, draw.uniform(0, 1e4, num))

    own = EndedSteps(
        end_unix_ns=when(num),
        launch=np.sort(draw.integers(0, num_launches, num)),
        attempt=draw.integers(1, 4, num),
        seconds=seconds(),
        data_wait=seconds(),
        checkpoint=seconds(),
        evaluation=seconds(),
        wait=seconds(),
        least_wait=seconds(),
        is_undone=draw.random(num) < 0.3,
        is_skipped=draw.random(num) < 0.3,
    )
    ended = ("finished", "failed", "lost", "halted", "interrupted", "running")
    launches = [
        Launch(int(when()), int(when()), int(when()), str(draw.choice(ended)), 2)  # type: ignore[arg-type]
        for _ in range(num_launches)
    ]
    hangs = [TimeSpan(*sorted(when(2).tolist())) for _ in range(draw.integers(0, 4))]
    sums = goodput(launches, own, hangs=hangs)
    assert sum(sums.nanoseconds.values()) == sums.wall_ns
    assert sum(sum(a.nanoseconds.values()) for a in sums.attempts) == sums.wall_ns
    assert all(taken >= 0 for taken in sums.nanoseconds.values())
