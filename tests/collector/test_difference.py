"""What one run has more than another."""

import math

import numpy as np
import pytest

from tests.collector.rows import OTHER_RUN, RUN, SECOND, START, Writer
from tests.support.queries import query
from trainvitals.errors import UsageError
from trainvitals.rows import Value
from trainvitals.views import DifferenceQuestion
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.difference import SampledCurve, subtract
from vitals_collector.storage.store import Store


def curve(**values: float | None) -> SampledCurve:
    at = [float(name[1:]) for name in values]
    return SampledCurve(
        np.array(at), np.array([math.nan if v is None else v for v in values.values()])
    )


def test_both_runs_spikes_and_gaps_are_in_the_difference():
    first = curve(x0=1.0, x10=1.0, x20=1.0, x30=1.0)
    other = curve(x5=2.0, x12=9.0, x15=2.0, x20=None, x25=2.0)
    found = subtract(first, other)
    assert [5.0, 10.0, 12.0, 15.0, 20.0, 25.0] == found.x.tolist()
    assert np.array_equal([1.0, 6.0, 8.0, 1.0, math.nan, 1.0], found.value, equal_nan=True)
    assert 0 == len(subtract(first, curve(x0=None)).x)
    assert 0 == len(subtract(first, curve(x100=1.0)).x), "the runs have no step in common"


def test_a_long_difference_has_the_extremes_of_every_point_and_no_others(store: Store):
    rng = np.random.default_rng(5)
    num = 10_000
    mine, theirs = rng.normal(size=(2, num))
    mine[2_345], theirs[2_346] = 50.0, 50.0
    for run_id, values in ((RUN, mine), (OTHER_RUN, theirs)):
        writer = Writer(run=run_id)
        for half in (range(num // 2), range(num // 2, num)):
            ingest(store, writer.steps(half, loss=values[half.start : half.stop].tolist()))
    found = query(store).ask(
        DifferenceQuestion(run_id=RUN, other=OTHER_RUN, metric="steps.loss", points=500)
    )
    stored = np.float64(theirs.astype(np.float32)) - np.float64(mine.astype(np.float32))
    drawn = dict(zip(found.x, found.value, strict=True))
    assert (num, False) == (found.num_total, found.is_interpolated)
    assert 500 <= len(drawn) <= 1_002
    for step, value in drawn.items():
        assert pytest.approx(stored[step], abs=1e-5) == value
    for step in (2_345, 2_346, int(stored.argmax())):
        assert step in drawn


def test_along_tokens_runs_stand_where_they_had_seen_as_many(store: Store):
    for run_id, size in ((RUN, 10), (OTHER_RUN, 20)):
        tokens: list[Value] = [size * (step + 1) for step in range(100)]
        ingest(store, Writer(run=run_id).steps(range(100), loss=tokens, tokens_seen=tokens))
    found = query(store).ask(
        DifferenceQuestion(
            run_id=RUN, other=OTHER_RUN, metric="steps.loss", along="tokens", points=1_000
        )
    )
    assert (20, 1_000) == (found.x[0], found.x[-1])
    assert {0.0} == {round(value or 0.0, 6) for value in found.value}
    assert found.is_interpolated


def test_along_time_runs_are_compared_since_the_first_point_of_each(store: Store):
    for run_id, days, loss in ((RUN, 0, 1.0), (OTHER_RUN, 3, 4.0)):
        writer = Writer(run=run_id, started=START + days * 86_400 * SECOND)
        ingest(store, writer.steps(range(5, 15), loss=loss))
    found = query(store).ask(
        DifferenceQuestion(run_id=RUN, other=OTHER_RUN, metric="steps.loss", along="time")
    )
    assert [1_000 * second for second in range(10)] == list(found.x)
    assert {3.0} == {*found.value}


def test_what_cannot_be_compared_is_said(store: Store):
    for run_id in (RUN, OTHER_RUN):
        ingest(store, Writer(run=run_id).steps([0], loss=1.0))
    with pytest.raises(UsageError, match="has no steps"):
        query(store).ask(DifferenceQuestion(run_id=RUN, other=OTHER_RUN, metric="gpu.power_watts"))
    with pytest.raises(UsageError, match="there is no run"):
        query(store).ask(
            DifferenceQuestion(run_id=RUN, other="01JD0000000000000000000009", metric="steps.loss")
        )
    assert (
        ()
        == query(store)
        .ask(DifferenceQuestion(run_id=RUN, other=OTHER_RUN, metric="steps.loss", along="tokens"))
        .x
    )
